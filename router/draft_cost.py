"""What asking for drafts costs a lane, in seconds of its verifier. Pure.

A drafter pool of its own costs nothing but waiting: from a step's result to the blocks behind it,
as `router.link_profile` measures it for every number of blocks. Where requests go in two groups by
turns, each group's drafting hides behind the other's step, and what it costs is the difference of
two half steps and a whole one. If drafters have a price, their busy time is charged besides.

A drafter on the verifier's own device is another matter: nothing hides there, for whatever it
computes it takes from the verifier; its threads and caches slow the step that follows, and what
else a block costs, on both ends of its way, is paid for on the same cores. How much all that is is
measured (`SharedDevice`).

Shape legend: C candidates, n = 0..C blocks asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.drafter_book import DrafterBook, DrafterRef

F64 = NDArray[np.float64]

_GAP_GAIN: Final = 0.05
_LEVEL_GAIN: Final = 0.1
_SHARE_GAIN: Final = 0.05
_SLOW_GAIN: Final = 0.3
_MAX_LOG_RATIO: Final = math.log(2.0)
"""A round counts as at most twice as fast or slow as predicted."""


class Drafting(NamedTuple):
    """Seconds that n = 0..C blocks take, index n."""

    latency_s: F64
    """From a step's result to the last of the blocks."""
    priced_s: F64
    """Busy time of the drafters in seconds of the verifier, at their price."""


def drafting(book: DrafterBook, drafters: Sequence[DrafterRef], *, price: float) -> Drafting:
    """Expected drafting for some of the candidates, spread over drafters as all of them are.

    A drafter that has not answered yet costs nothing: it is tried.

    Args:
        drafters: of the candidates [C].
        price: of a drafter's second in the verifier's.
    """
    num = len(drafters)
    latency_s, busy_s = np.zeros(num + 1), np.zeros(num + 1)
    for drafter_id, count in Counter(ref.drafter_id for ref in drafters).items():
        link = book.link(drafter_id)
        if link is None or not link.num_samples:
            continue
        blocks_n = np.maximum(np.arange(1, num + 1) * (count / num), 1.0)
        draft_n = link.hopeful_draft_s(blocks_n)
        np.maximum(latency_s[1:], draft_n + link.round_trip_s, out=latency_s[1:])
        busy_s[1:] += draft_n
    return Drafting(latency_s, price * busy_s)


class Gap:
    """Time between two steps that has nothing to do with drafting: the link, the router's work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num = 0

    def observe(self, gap_s: float, drafting_s: float) -> None:
        """A gap after a step that asked for drafts expected to take so long, 0 if it asked for
        none."""
        rest_s = max(gap_s - drafting_s, 0.0)
        if self._num and rest_s > 4 * self.seconds:
            rest_s = 4 * self.seconds + 1e-4  # a pause of the machine, or of the client
        self._num += 1
        self.seconds += max(_GAP_GAIN, 1 / self._num) * (rest_s - self.seconds)


class SharedDevice:
    """How much longer than predicted drafted rounds take, compared with plain ones.

    The profiles that predict them follow whatever runs most, so that only the contrast between
    drafted and plain rounds tells. Both are fitted at once, as ``m + d x`` to the logarithm of
    actual over predicted time (x: drafted or not): m moves fast and takes up what the profile has
    yet to learn, d moves by as much as x departs from its own mean, so that it keeps while there
    is nothing but steps of one kind.
    """

    def __init__(self) -> None:
        self.slow_down = 0.0
        """d: logarithm of how much longer a drafted round takes, in [0, log 2]."""
        self.share = 0.5
        """Of drafted rounds, lately."""
        self._level = 0.0

    def observe(self, *, drafted: bool, round_s: float, predicted_s: float) -> None:
        """A round that is over, drafting included."""
        if round_s <= 0 or predicted_s <= 0:
            return
        x = float(drafted)
        ratio = math.log(round_s / predicted_s)
        ratio = min(max(ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)
        centred = x - self.share
        error = ratio - self._level - self.slow_down * centred
        self._level += _LEVEL_GAIN * error
        self.slow_down += _SLOW_GAIN * abs(centred) * error * centred
        self.slow_down = min(max(self.slow_down, 0.0), _MAX_LOG_RATIO)
        self.share += _SHARE_GAIN * (x - self.share)

    @property
    def factors(self) -> tuple[float, float]:
        """What the predicted time of a plain and of a drafted round is to be multiplied by."""
        plain = math.exp(-self.slow_down * self.share)
        return plain, plain * math.exp(self.slow_down)

"""What asking for drafts costs a lane, in seconds of its verifier. Pure.

A drafter pool of its own costs nothing but waiting: from a step's result to the blocks behind it,
as `router.link_profile` measures it for every number of blocks. Where requests go in two groups by
turns, each group's drafting hides behind the other's step, and what it costs is the difference of
two half steps and a whole one. If drafters have a price, their busy time is charged besides.

A drafter on the verifier's own device is another matter: nothing hides there, for whatever it
computes it takes from the verifier; its threads and caches slow the step that follows, and what
else a block costs, on both ends of its way, is paid for on the same cores. How much all that is is
measured (`router.round_times`).

Shape legend: C candidates, n = 0..C blocks asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.drafter_book import DrafterBook, DrafterRef

F64 = NDArray[np.float64]


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

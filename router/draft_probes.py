"""Rounds decided otherwise than pays, so that what the decision goes by stays true. Pure.

All are keyed draws by request id and anchor: no draft, present or future, has a part in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.noise import KEYED, Stream
from router.draft_plan import DraftPlan
from router.lane_request import LaneRequest

_LOSS: Final = 0.003
"""Plain rounds that each of a pair of probes may cost, on average over all rounds, where drafting
does not pay."""
_LOSS_GAIN: Final = 0.2
_FREAK: Final = 8.0
"""A loss counts as at most so many times what is known, and a round."""
_LEAST_GAIN: Final = 0.1
_MOST: Final = 1 / 64
_PART: Final = 1 / 8
_LEAST: Final = 4
"""Of a lane without drafts, a share of the rows is asked, at least so many: what texts are worth
can be told from a few, at a fraction of what all of them cost."""
_WHOLE: Final = 1 / 8
"""Of these probes, all rows are asked: that tells what so many at once take."""
_ROWS: Final = 1 / 64
_PLAIN: Final = 1 / 64
_CLEARLY_PAYS: Final = 1.3
"""Times faster than plain: no need to go without to be sure."""


class ProbeLosses:
    """What probes have cost a lane without drafts, in plain rounds: a running mean for each binary
    order of the number of rows, a few rows asked or more.

    That is more than the plan expects of a drafted round: before the blocks of a probe the drafter
    has everything to catch up with that came since the one before. The first ones hardly count by
    themselves, for one freak would stand for long: what is dear is rarely tried again.
    """

    def __init__(self) -> None:
        self._lost: dict[tuple[int, bool], float] = {}
        self._num: Counter[tuple[int, bool]] = Counter()

    def observe(self, num_rows: int, num_asked: int, lost_rounds: float) -> None:
        """A round for which so many were asked took so much longer, less what its drafts gave."""
        key = _kind(num_rows, num_asked)
        before = self._lost.get(key, 0.0)
        lost = min(max(lost_rounds, -1.0), 1.0 + _FREAK * max(before, 0.0))
        self._num[key] += 1
        self._lost[key] = before + max(_LOSS_GAIN, 1 / (1 + self._num[key])) * (lost - before)

    def at(self, num_rows: int, num_asked: int) -> float:
        """Rounds that such a round loses; 0 where none was seen."""
        return self._lost.get(_kind(num_rows, num_asked), 0.0)


def probe(
    candidates: Sequence[LaneRequest],
    chosen: set[int],
    plan: DraftPlan,
    losses: ProbeLosses,
    *,
    num_rows: int,
    num_rounds: int,
    shared: bool,
) -> set[int]:
    """Requests to ask for in the end.

    * Nothing was chosen: now and then some are asked, or all, the less often the more that loses.
    * Something was, and the device is shared: now and then none is, to see the difference.
    * Else those passed over are asked once in a while.

    Args:
        candidates: at least one.
        chosen: request ids of those that the plan asks for.
        losses: of the lane.
        num_rows: that it decodes.
        num_rounds: that this one stands for: draws are so many times likelier.
        shared: whether drafting takes from the verifier.
    """
    first = min(candidates, key=lambda request: request.rid)
    draw = _draw([first])[0] / num_rounds
    if not chosen:

        def rate(num_asked: int) -> float:
            return _rate(plan, num_asked, losses.at(num_rows, num_asked))

        if draw < _WHOLE * rate(len(candidates)):
            return {request.rid for request in candidates}
        return sample(candidates) if draw < rate(num_sampled(len(candidates))) else chosen
    if shared and plan.gains.max() < _CLEARLY_PAYS and draw < _PLAIN:
        return set()
    passed = [request for request in candidates if request.rid not in chosen]
    if not passed:
        return chosen
    turn = _draw(passed) < num_rounds * _ROWS
    return chosen | {r.rid for r, yes in zip(passed, turn, strict=True) if yes}


def sample(candidates: Sequence[LaneRequest]) -> set[int]:
    """Ids of a few of these requests, others each time."""
    order = np.argsort(_draw(candidates, index=1), kind="stable")
    return {candidates[n].rid for n in order[: num_sampled(len(candidates))].tolist()}


def num_sampled(num_rows: int) -> int:
    """Rows that are asked of so many where a few will do."""
    return min(num_rows, max(_LEAST, round(num_rows * _PART)))


def _rate(plan: DraftPlan, num_asked: int, lost_rounds: float) -> float:
    """How often so many may be asked though that does not pay."""
    gain = max(float(plan.gains[min(num_asked, len(plan.gains) - 1)]), _LEAST_GAIN)
    return min(_MOST, _LOSS / max(1 / gain - 1, lost_rounds, _LOSS))


def _kind(num_rows: int, num_asked: int) -> tuple[int, bool]:
    return num_rows.bit_length(), num_asked > num_sampled(num_rows)


def _draw(requests: Sequence[LaneRequest], *, index: int = 0) -> NDArray[np.float64]:
    rids = np.array([request.rid for request in requests], np.uint64)
    anchors = np.array([request.anchor for request in requests], np.int64)
    return KEYED.uniform(Stream.GATE, rids, anchors, index)

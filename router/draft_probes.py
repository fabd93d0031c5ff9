"""Rounds decided otherwise than pays, so that what the decision goes by stays true. Pure.

All are keyed draws by request id and anchor: no draft, present or future, has a part in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.noise import KEYED, Stream
from router.draft_plan import DraftPlan
from router.lane_request import LaneRequest

_LOSS: Final = 0.0025
"""Share of throughput that drafted rounds may cost where drafting does not pay. They come in pairs.
"""
_MOST: Final = 1 / 64
_ROWS: Final = 1 / 64
_PLAIN: Final = 1 / 64
_CLEARLY_PAYS: Final = 1.3
"""Times faster than plain: no need to go without to be sure."""


def probe(
    candidates: Sequence[LaneRequest],
    chosen: set[int],
    plan: DraftPlan,
    *,
    num_rounds: int,
    shared: bool,
) -> set[int]:
    """Requests to ask for in the end.

    * Nothing was chosen: now and then all are asked, the less often the more that loses.
    * Something was, and the device is shared: now and then none is, to see the difference.
    * Else those passed over are asked once in a while.

    Args:
        candidates: at least one.
        chosen: request ids of those that the plan asks for.
        num_rounds: that this one stands for: draws are so many times likelier.
        shared: whether drafting takes from the verifier.
    """
    first = min(candidates, key=lambda request: request.rid)
    if not chosen:
        rate = min(_MOST, _LOSS / max(1 - plan.gain_of_all, _LOSS))
        return {r.rid for r in candidates} if _draw([first])[0] < num_rounds * rate else chosen
    if shared and plan.gain < _CLEARLY_PAYS and _draw([first])[0] < num_rounds * _PLAIN:
        return set()
    passed = [request for request in candidates if request.rid not in chosen]
    if not passed:
        return chosen
    turn = _draw(passed) < num_rounds * _ROWS
    return chosen | {r.rid for r, yes in zip(passed, turn, strict=True) if yes}


def _draw(requests: Sequence[LaneRequest]) -> NDArray[np.float64]:
    rids = np.array([request.rid for request in requests], np.uint64)
    anchors = np.array([request.anchor for request in requests], np.int64)
    return KEYED.uniform(Stream.GATE, rids, anchors, 0)

"""Plain rows that go while the step that emits their anchors still runs.

Nothing about such a row is a guess: a plain row emits one token, so its request's next row is known
but for that token. What the lane must get right is who may go, and what comes back.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.config import SchedulingConfig
from cluster.wire import FINISH_STOP, Failure, Step
from router.lane_request import Emission, Phase
from tests.router.lane_rig import Rig


def plain_rig(*rids: int, **changes: Any) -> Rig:
    """Requests without drafts that have their first token."""
    rig = Rig()
    for rid in rids:
        rig.add(rid, draft=False, **changes)
    rig.prefill(*rids)
    return rig


def is_due(rig: Rig) -> bool:
    """Whether a step goes once the one in the air is about to land."""
    rig.now += 0.05
    return rig.state.next_step_at(rig.now) <= rig.now


def land(rig: Rig, step: Step, **changes: Any) -> list[Any]:
    rig.now += 0.01
    return rig.state.apply(rig.result(step, **changes), rig.now)


def test_the_next_row_goes_before_the_anchor_is_known() -> None:
    rig = plain_rig(1, 2)
    known = {rid: request.digest for rid, request in rig.state.requests.items()}
    first = rig.step()
    assert rig.state.next_step_at(rig.now) < math.inf, "it is known when to look again"
    assert is_due(rig)
    second = rig.step()
    assert second.rid.tolist() == [1, 2]
    assert second.anchor.tolist() == [anchor + 1 for anchor in first.anchor.tolist()]
    assert second.digest.tolist() == [known[1], known[2]], "of all that is known of the text"
    assert not is_due(rig), "one runs, one waits"
    for step in (first, second):
        outcomes = land(rig, step)
        assert [(o.rid, o.token_ids) for o in outcomes] == [(1, (1,)), (2, (1,))]
    assert set(rig.phases().values()) == {Phase.READY}
    assert rig.counters.num_retries == 0
    assert [len(r.ids) for r in rig.state.requests.values()] == [3 + 3, 3 + 3]


def test_on_and_on() -> None:
    """With one step always queued, to the last token of the longer request."""
    rig = Rig()
    rig.add(1, draft=False, max_new_tokens=5)
    rig.add(2, draft=False, max_new_tokens=9)
    rig.prefill(1, 2)
    steps = [rig.step()]
    rows = []
    while steps or rig.state.requests:
        while len(steps) < 2 and is_due(rig):
            steps.append(rig.step())
        step = steps.pop(0)
        rows.append(step.rid.tolist())
        land(rig, step)
    assert rows == [[1, 2]] * 4 + [[2]] * 4
    assert rig.counters.num_retries == 0


def test_the_last_token_is_not_followed() -> None:
    rig = plain_rig(1, max_new_tokens=2)
    rig.step()
    assert not is_due(rig)


def test_a_row_too_many_is_ignored() -> None:
    """The verifier ends a request that has a row in the queued step: that row fails there, and the
    others' go on. A request that ends here (a stop string) is not heard of again either."""
    rig = plain_rig(1, 2, 3)
    first = rig.step()
    assert is_due(rig)
    second = rig.step()
    finish = np.array([FINISH_STOP, 0, 0], np.uint8)
    assert [o.finish for o in land(rig, first, finish=finish)] == [FINISH_STOP, 0, 0]
    result = rig.result(dataclasses.replace(second, **_rows(second, [1, 2])))
    rig.state.end(3)
    failures = (Failure(rid=1, code="StaleFrame", message="it is not here"),)
    outcomes = rig.state.apply(dataclasses.replace(result, failures=failures), rig.now + 0.01)
    assert [(o.rid, type(o)) for o in outcomes] == [(2, Emission)]
    assert rig.phases() == {2: Phase.READY}
    assert rig.counters.num_retries == 0
    assert rig.step().releases.tolist() == [3], "the verifier has freed the first by itself"


def _rows(step: Step, which: list[int]) -> dict[str, Any]:
    names = ("rid", "anchor", "digest", "num_draft", "want_draft", "has_q")
    return {name: getattr(step, name)[which] for name in names}


def test_what_waits_for_a_block_holds_all_back() -> None:
    """A block that was asked for, or is awaited, is worth waiting for: its row and the plain ones
    go together, as the gather rule says."""
    rig = Rig()
    rig.add(1, draft=False)
    rig.add(2, asks_first=True)
    rig.prefill(1, 2)
    assert rig.phases() == {1: Phase.READY, 2: Phase.AWAITING}
    step = rig.step()
    assert step.rid.tolist() == [1]
    assert not rig.state.ready_rows(rig.now), "request 2 waits for its block"
    rig.answer(2)
    assert [r.rid for r in rig.state.ready_rows(rig.now)] == [2, 1], "with the block in hand"
    land(rig, step)
    both = rig.step()
    assert sorted(both.rid.tolist()) == [1, 2]
    assert both.want_draft.tolist()[both.rid.tolist().index(2)] == 1
    assert not is_due(rig), "the step asks for a block"


def test_drafts_are_not_followed_by_a_guess() -> None:
    """How many drafts are accepted is not known before the step is back."""
    rig = Rig()
    rig.add(1)
    rig.prefill(1)
    rig.answer(1)
    rig.state.requests[1].draft = False  # no further block is asked for
    step = rig.step(lengths=2)
    assert (step.num_draft.tolist(), step.want_draft.tolist()) == ([2], [0])
    assert not is_due(rig)
    assert not rig.state.ready_rows(rig.now)


def test_a_row_ahead_may_ask_for_a_block() -> None:
    """So that a lane that goes ahead can start to draft."""
    rig = plain_rig(1)
    request = rig.state.requests[1]
    first = rig.step()
    assert first.want_draft.tolist() == [0]
    request.draft = True
    assert is_due(rig)
    second = rig.step()
    assert second.want_draft.tolist() == [1]
    assert [rebind.rid for rebind in second.rebinds] == [1]
    land(rig, first)
    assert rig.phases() == {1: Phase.IN_STEP}
    land(rig, second)
    assert rig.phases() == {1: Phase.AWAITING}
    rig.answer(1)
    step = rig.step(lengths=4)
    assert (step.num_draft.tolist(), step.anchor.tolist()) == ([4], [request.anchor])
    assert step.digest.tolist() == [digest.of(request.ids)]


@pytest.mark.parametrize("scheduling", [{"gather": "when_free"}, {"late_dispatch": False}])
def test_baselines_do_not(scheduling: dict[str, Any]) -> None:
    rig = plain_rig(1)
    rig.state.configure(SchedulingConfig(**scheduling))
    rig.step()
    assert not is_due(rig)

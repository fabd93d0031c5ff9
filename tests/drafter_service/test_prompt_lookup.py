"""The lookup drafter behind the common seam: sessions, lengths, one-hot blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cluster import digest
from cluster.config import LookupConfig
from cluster.wire import Commit, Open, Release
from drafter_service.drafter import Drafter, DraftOutcome, HangUp, Work
from drafter_service.prompt_lookup import PromptLookup
from tests.drafters import LANE
from tests.frames import make_sampling

SETTINGS = LookupConfig(gamma=4, max_ngram=3, min_ngram=2)


def make_lookup(**changes: Any) -> PromptLookup:
    bounds = {"max_sessions": 8, "max_session_tokens": 1 << 10, "idle_session_s": 60.0}
    return PromptLookup(SETTINGS, vocab_size=100, max_positions=512, **{**bounds, **changes})


class Telling:
    """The frames of one session, without features."""

    def __init__(self, rid: int, first_id: int, epoch: int = 0) -> None:
        self.rid, self.epoch, self.ids = rid, epoch, [first_id]

    def open(self, **sampling: Any) -> Work:
        frame = Open(
            lane_id=LANE,
            rid=self.rid,
            epoch=self.epoch,
            first_id=self.ids[0],
            sampling=make_sampling(**sampling),
        )
        return Work(owner=1, frame=frame)

    def commit(self, ids: list[int], *, want_draft: bool = True, **changes: Any) -> Work:
        first = len(self.ids) - 1
        self.ids += ids
        frame = Commit(
            lane_id=LANE,
            rid=np.array([self.rid], np.int64),
            epoch=np.array([self.epoch], np.int32),
            first_position=np.array([first], np.int32),
            num_rows=np.array([len(ids)], np.int32),
            digest=np.array([digest.of(self.ids)], np.uint64),
            want_draft=np.array([want_draft], np.uint8),
            ids=np.array(ids, np.int32),
            features=np.zeros((0, 0), np.float32),
        )
        return Work(owner=1, frame=dataclasses.replace(frame, **changes))


def drafts(outcome: DraftOutcome) -> dict[int, list[int]]:
    assert outcome.block is not None
    return {
        d.rid: outcome.block.ids[row, : outcome.num_draft[row]].tolist()
        for row, d in enumerate(outcome.drafted)
    }


def test_it_is_a_drafter_without_features() -> None:
    drafter: Drafter = make_lookup()
    assert (drafter.limits.gamma, drafter.limits.feature_size) == (4, 0)


def test_sessions_of_a_batch_are_drafted_by_their_own_text() -> None:
    lookup = make_lookup()
    one, two, three = Telling(1, 5), Telling(2, 5), Telling(3, 5)
    work = [one.open(), two.open(mode="rejection", temperature=1.0), three.open()]
    work += [one.commit([6, 7, 8, 9, 5, 6]), two.commit([6, 1, 5, 6]), three.commit([7, 8])]
    outcome = lookup.run(work, 0.0)
    assert drafts(outcome) == {1: [7, 8, 9, 5], 2: [1, 5, 6, 1], 3: []}
    block = outcome.block
    assert block is not None
    assert block.has_q.tolist() == [0, 0, 0], "one-hot, in rejection mode too"
    assert block.q_ids.shape == (0, 4, 0)
    assert (block.confidence[:2] > 0).all()
    assert (block.confidence <= 1).all()
    assert [(d.anchor, d.digest) for d in outcome.drafted] == [
        (len(t.ids) - 1, digest.of(t.ids)) for t in (one, two, three)
    ]


def test_text_grows_over_batches_and_within_one() -> None:
    lookup = make_lookup()
    one = Telling(1, 5)
    outcome = lookup.run([one.open(), one.commit([6, 7], want_draft=False)], 0.0)
    assert outcome.drafted == ()
    assert outcome.block is None
    outcome = lookup.run([one.commit([9]), one.commit([5, 6])], 0.1)
    assert drafts(outcome) == {1: [7, 9, 5, 6]}


def test_a_new_epoch_starts_from_nothing() -> None:
    lookup = make_lookup()
    one, again = Telling(1, 5), Telling(1, 5, epoch=1)
    lookup.run([one.open(), one.commit([6, 7, 5, 6])], 0.0)
    outcome = lookup.run([again.open(), again.commit([6, 8, 5, 6])], 0.1)
    assert drafts(outcome) == {1: [8, 5, 6, 8]}


@pytest.mark.parametrize("end", ["release", "hang up", "gap", "digest"])
def test_nothing_is_kept_of_sessions_that_ended(end: str) -> None:
    lookup = make_lookup()
    one = Telling(1, 5)
    lookup.run([one.open(), one.commit([6, 7, 5, 6])], 0.0)
    frames = {
        "release": Work(owner=1, frame=Release(lane_id=LANE, rid=np.array([1], np.int64))),
        "hang up": Work(owner=1, frame=HangUp()),
        "gap": one.commit([4], first_position=np.array([9], np.int32)),
        "digest": one.commit([4], digest=np.array([1], np.uint64)),
    }
    outcome = lookup.run([frames[end]], 0.1)
    assert len(outcome.lost) == (end in ("gap", "digest"))
    assert lookup.num_sessions == len(lookup._texts) == 0
    assert lookup.sessions.allocator.num_free == (1 << 10) // 32


def test_idle_sessions_expire_and_the_token_bound_holds() -> None:
    lookup = make_lookup(idle_session_s=5.0, max_session_tokens=64)
    one, two = Telling(1, 5), Telling(2, 5)
    lookup.run([one.open(), one.commit([1] * 40)], 0.0)
    outcome = lookup.run([two.open(), two.commit([1] * 40)], 0.1)
    assert [lost.rid for lost in outcome.lost] == [2]
    assert [lost.rid for lost in lookup.run([], 6.0).lost] == [1]
    assert lookup.num_sessions == 0

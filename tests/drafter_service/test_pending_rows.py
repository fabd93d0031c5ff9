"""Rows that wait until a draft is asked for: what is drafted then, and what they cost till then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.config import LookupConfig
from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.wire import Release
from drafter_service.autoregressive.engine import AutoregressiveEngine
from drafter_service.drafter import DraftOutcome, HangUp, Work
from drafter_service.engine import DraftEngine
from drafter_service.pending_rows import NewRows, PendingRows, join
from drafter_service.prompt_lookup import PromptLookup
from drafter_service.sessions import DraftSession
from tests import autoregressive
from tests.drafters import LANE, Feed, make_engine, make_model, make_spec
from tests.frames import make_sampling

Engine = DraftEngine | AutoregressiveEngine | PromptLookup
Maker = Callable[[int], Engine]


def dspark(**changes: Any) -> tuple[DrafterSpec, Maker]:
    spec = make_spec(**changes)
    model = make_model(spec)
    return spec, lambda most: make_engine(copy.deepcopy(model), max_pending_bytes=most)


def rollout() -> tuple[AutoregressiveSpec, Maker]:
    spec = autoregressive.make_spec()
    model = autoregressive.make_model(spec)
    return spec, lambda most: autoregressive.make_engine(
        copy.deepcopy(model), max_pending_bytes=most
    )


def lookup() -> tuple[DrafterSpec, Maker]:
    """Few ids, so that texts repeat themselves, and no features."""
    spec = make_spec(vocab_size=4, hidden_size=0)
    return spec, lambda most: PromptLookup(
        LookupConfig(gamma=4),
        vocab_size=4,
        max_positions=512,
        max_sessions=64,
        max_session_tokens=1 << 14,
        idle_session_s=60.0,
        max_pending_bytes=most,
    )


DRAFTERS = {
    "dspark": dspark,
    "windows": lambda: dspark(sliding_windows=(8, 40)),
    "autoregressive": rollout,
    "lookup": lookup,
}


def rows_of(session: DraftSession, first: int, num: int) -> NewRows:
    positions = torch.arange(first, first + num, dtype=torch.float32)
    return NewRows(
        session=session,
        first_position=first,
        ids=tuple(range(first + 1, first + num + 1)),
        features=positions[:, None].expand(num, 3),
    )


def make_session(rid: int) -> DraftSession:
    return DraftSession(
        lane_id=LANE,
        rid=rid,
        epoch=0,
        owner=1,
        sampling=make_sampling(),
        digest=0,
        first_id=0,
        last_id=0,
    )


def same(lazy: DraftOutcome, eager: DraftOutcome) -> None:
    """Two outcomes with the same blocks, in whatever order."""
    assert {d.rid: d for d in lazy.drafted} == {d.rid: d for d in eager.drafted}
    assert lazy.lost == eager.lost == ()
    if eager.block is None:
        assert lazy.block is None
        return
    assert lazy.block is not None
    at = [[d.rid for d in lazy.drafted].index(d.rid) for d in eager.drafted]
    np.testing.assert_array_equal(lazy.block.ids[at], eager.block.ids)
    np.testing.assert_array_equal(lazy.num_draft[at], eager.num_draft)
    np.testing.assert_allclose(lazy.block.confidence[at], eager.block.confidence, atol=1e-5)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_blocks_are_the_same_whether_rows_were_computed_at_once_or_late(kind: str) -> None:
    """Stretches of up to twelve rounds without a draft, in no step with one another."""
    spec, make = DRAFTERS[kind]()  # type: ignore[operator]
    lazy, eager = make(1 << 30), make(0)
    random = np.random.default_rng(3)
    feeds = [Feed(rid, spec) for rid in range(6)]
    work = [feed.open() for feed in feeds]
    work += [feed.commit(5 + 9 * feed.rid, want_draft=feed.rid < 2) for feed in feeds]
    same(lazy.run(work, 0.0), eager.run(work, 0.0))
    num_drafted = 0
    for n in range(30):
        asked = random.random(6) < (0.08, 0.2, 0.4, 0.6, 0.9, n >= 12)
        work = [
            feed.commit(int(random.integers(1, 5)), want_draft=bool(want))
            for feed, want in zip(feeds, asked, strict=True)
        ]
        got = lazy.run(work, 0.1)
        same(got, eager.run(work, 0.1))
        num_drafted += len(got.drafted)
    assert num_drafted > 40
    assert lazy.counters.rows_caught_up > 100
    assert eager.counters.rows_caught_up == lazy.counters.rows_overdue == 0


def test_a_session_without_a_draft_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model(make_spec()))
    feeds = [Feed(rid, engine.spec) for rid in range(3)]
    passes: list[int] = []
    real = engine.model.context_key_values

    def counted(context_ND: torch.Tensor, positions_N: torch.Tensor) -> Any:
        passes.append(len(positions_N))
        return real(context_ND, positions_N)

    monkeypatch.setattr(engine.model, "context_key_values", counted)
    engine.run([w for f in feeds for w in (f.open(), f.commit(10, want_draft=False))], 0.0)
    for _ in range(20):
        engine.run([feed.commit(2, want_draft=False) for feed in feeds], 0.1)
    assert passes == []
    outcome = engine.run([feed.commit(2) for feed in feeds], 0.2)
    assert len(outcome.drafted) == 3
    assert passes == [3 * 52], "one pass for all that waited"
    assert engine.pending.num_bytes == len(engine.pending) == 0


def test_past_the_bound_the_longest_waiting_are_computed() -> None:
    spec, make = dspark()
    bound = 18_000
    engine = make(bound)
    assert isinstance(engine, DraftEngine)
    feeds = [Feed(rid, spec) for rid in range(4)]
    engine.run([feed.open() for feed in feeds], 0.0)
    for feed in feeds[:3]:
        engine.run([feed.commit(20, want_draft=False)], 0.1)
    assert engine.counters.rows_overdue == 0
    assert len(engine.pending) == 3
    engine.run([feeds[3].commit(60, want_draft=False)], 0.2)
    assert engine.counters.rows_overdue == 20, "the first one's, and no more than need be"
    assert len(engine.pending) == 3
    for _ in range(40):
        engine.run([feed.commit(3, want_draft=False) for feed in feeds], 0.3)
        assert engine.pending.num_bytes <= bound
    fresh = make(0)
    want = fresh.run([w for feed in feeds for w in (feed.open(), replayed(feed))], 0.4)
    same(engine.run([feed.commit(0) for feed in feeds], 0.4), want)


def replayed(feed: Feed) -> Work:
    """All that a feed has committed, in one frame."""
    whole = Feed(feed.rid, feed.spec)
    return whole.commit(
        len(feed.rows),
        ids=np.array(feed.ids[1:], np.int32),
        features=feed.rows,
        digest=np.array([digest.of(feed.ids)], np.uint64),
    )


@pytest.mark.parametrize("kind", ["dspark", "autoregressive", "lookup"])
@pytest.mark.parametrize("end", ["release", "hang up", "reopened"])
def test_nothing_waits_for_sessions_that_ended(kind: str, end: str) -> None:
    spec, make = DRAFTERS[kind]()  # type: ignore[operator]
    engine = make(1 << 20)
    feed, other = Feed(1, spec), Feed(2, spec, owner=2)
    for one in (feed, other):
        engine.run([one.open(), one.commit(9, want_draft=False)], 0.0)
    before = engine.pending.num_bytes
    work = {
        "release": Work(owner=1, frame=Release(lane_id=LANE, rid=np.array([1], np.int64))),
        "hang up": Work(owner=1, frame=HangUp()),
        "reopened": Feed(1, spec, epoch=1).open(),
    }
    engine.run([work[end]], 0.1)
    assert len(engine.pending) == 1
    assert engine.pending.num_bytes == before // 2
    assert len(engine.run([other.commit(1)], 0.2).drafted) == 1


def test_an_error_while_computing_what_is_overdue_loses_those_sessions_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(make_model(make_spec()), max_pending_bytes=2000)
    hit, asking, spared = (Feed(rid, engine.spec) for rid in range(3))
    engine.run([f.open() for f in (hit, asking, spared)], 0.0)
    engine.run([hit.commit(9, want_draft=False)], 0.0)

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "write", explode)
        outcome = engine.run([spared.commit(1, want_draft=False), asking.commit(2)], 0.1)
    assert sorted(lost.rid for lost in outcome.lost) == [0, 1, 2]
    assert engine.counters.failed == 3
    engine.run([], 0.2)
    assert engine.pending.num_bytes == 0


def test_what_has_left_every_window_is_not_kept() -> None:
    spec, make = dspark(sliding_windows=(8, 16))
    engine = make(1 << 30)
    assert isinstance(engine, DraftEngine)
    feed = Feed(0, spec)
    engine.run([feed.open(), feed.commit(3, want_draft=False)], 0.0)
    for _ in range(80):
        engine.run([feed.commit(3, want_draft=False)], 0.1)
    session = engine.sessions.get(LANE, 0)
    assert session is not None
    assert len(session.blocks) <= 2
    waiting = engine.pending.take(session)
    assert waiting[0].first_position == session.covered - 16
    assert sum(len(rows.ids) for rows in waiting) == 16


def test_pending_rows_come_back_in_order_and_whole() -> None:
    pending = PendingRows(1 << 20)
    a, b = make_session(1), make_session(2)
    pending.put(a, [rows_of(a, 0, 4), rows_of(a, 4, 1)], first_needed=0)
    pending.put(b, [rows_of(b, 0, 2)], first_needed=0)
    pending.put(a, [rows_of(a, 5, 3)], first_needed=2)
    (one,) = join(pending.take(a))
    assert (one.first_position, one.stop, one.ids) == (2, 8, (3, 4, 5, 6, 7, 8))
    assert one.features[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert pending.take(a) == []
    assert len(pending) == 1
    pending.put(b, [rows_of(b, 2, 1)], first_needed=3)
    assert pending.num_bytes == len(pending) == 0


def test_kept_rows_hold_no_frame_in_memory() -> None:
    """A frame brings the rows of many sessions: one that waits must not keep all of it."""
    pending = PendingRows(1 << 20)
    session = make_session(1)
    frame = torch.zeros(1000, 3)
    rows = NewRows(session=session, first_position=0, ids=(1, 2), features=frame[:2])
    pending.put(session, [rows], first_needed=0)
    (kept,) = pending.take(session)
    assert kept.features.untyped_storage().nbytes() == 2 * 3 * 4


def test_rows_of_different_sessions_are_not_joined() -> None:
    a, b = make_session(1), make_session(2)
    joined = join([rows_of(a, 0, 2), rows_of(a, 2, 2), rows_of(b, 4, 1)])
    assert [(rows.session.rid, rows.first_position, rows.stop) for rows in joined] == [
        (1, 0, 4),
        (2, 4, 5),
    ]

"""The serving engine against an independent slow rollout, and against the training forward."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.wire import Release
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.drafter import Drafter, DraftOutcome, HangUp, Work
from tests.autoregressive import make_engine, make_model, make_spec, reference_rollout
from tests.drafters import LANE, Feed

LENGTHS = (1, 2, 31, 32, 33, 70, 200)
"""Around the KV block size, and far enough apart to be attended in several groups."""


def check_against_reference(model: AutoregressiveModel, feed: Feed, outcome: DraftOutcome) -> None:
    """Greedy ids and confidences of one session equal the reference's."""
    row = [d.rid for d in outcome.drafted].index(feed.rid)
    drafted = outcome.drafted[row]
    assert drafted.anchor == len(feed.ids) - 1
    assert drafted.digest == digest.of(feed.ids)
    _, ids, confidence = reference_rollout(model, feed.ids, torch.from_numpy(feed.rows))
    assert outcome.block is not None
    assert outcome.block.ids[row].tolist() == ids
    np.testing.assert_allclose(outcome.block.confidence[row], confidence, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norms_heads": True},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"has_confidence": False},
        {"draft_vocab_size": 20},
        {"gamma": 1, "target_layer_ids": (5,)},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "plain",
)
def test_blocks_equal_the_slow_rollout(changes: dict[str, Any]) -> None:
    model = make_model(make_spec(**changes))
    engine = make_engine(copy.deepcopy(model))
    feeds = [Feed(rid, model.spec) for rid in range(len(LENGTHS))]
    work = [feed.open() for feed in feeds]
    work += [feed.commit(num) for feed, num in zip(feeds, LENGTHS, strict=True)]
    outcome = engine.run(work, 0.0)
    assert len(outcome.drafted) == len(feeds)
    for feed in feeds:
        check_against_reference(model, feed, outcome)


def test_sessions_go_on_from_the_targets_features() -> None:
    """Whatever part of a block was accepted: rows come from the commit, not from the rollout."""
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    feeds = [Feed(rid, model.spec) for rid in range(3)]
    engine.run([feed.open() for feed in feeds], 0.0)
    for lengths in [(3, 40, 1), (1, 5, 2), (5, 1, 33), (2, 2, 2)]:
        work = [feed.commit(num) for feed, num in zip(feeds, lengths, strict=True)]
        outcome = engine.run(work, 0.1)
        for feed in feeds:
            check_against_reference(model, feed, outcome)


def test_several_commits_of_a_session_in_one_batch() -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    feed = Feed(1, model.spec)
    outcome = engine.run([feed.open(), feed.commit(30, want_draft=False), feed.commit(4)], 0.0)
    check_against_reference(model, feed, outcome)


def test_a_session_without_rows_gets_no_block() -> None:
    model = make_model(make_spec())
    engine = make_engine(model)
    feed = Feed(1, model.spec)
    outcome = engine.run([feed.open(), feed.commit(0)], 0.0)
    assert (outcome.drafted, outcome.block, outcome.lost) == ((), None, ())
    assert len(engine.run([feed.commit(1)], 0.0).drafted) == 1


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_batch_draws_what_each_session_would_alone(mode: str) -> None:
    model = make_model(make_spec(draft_vocab_size=24))
    feeds = [Feed(rid, model.spec) for rid in range(4)]
    works = []
    for seed, feed in enumerate(feeds):
        temperature = 0.0 if seed == 0 else 0.8
        works.append([feed.open(temperature=temperature, mode=mode, seed=seed), feed.commit(9)])
    together = make_engine(copy.deepcopy(model)).run([w for work in works for w in work], 0.0)
    assert together.block is not None
    assert together.block.has_q.tolist() == [0, *([int(mode == "rejection")] * 3)]
    q_row = 0
    for row, work in enumerate(works):
        alone = make_engine(copy.deepcopy(model)).run(work, 0.0).block
        assert alone is not None
        assert alone.ids[0].tolist() == together.block.ids[row].tolist()
        if together.block.has_q[row]:
            np.testing.assert_array_equal(alone.q_ids[0], together.block.q_ids[q_row])
            np.testing.assert_allclose(alone.q_probs[0], together.block.q_probs[q_row], atol=1e-5)
            q_row += 1


def test_shipped_q_is_the_truncated_law_that_was_drawn_from() -> None:
    model = make_model(make_spec(draft_vocab_size=24))
    engine = make_engine(copy.deepcopy(model), q_top_k=5)
    feed = Feed(3, model.spec)
    outcome = engine.run(
        [feed.open(temperature=0.7, mode="rejection", seed=5), feed.commit(12)], 0.0
    )
    assert outcome.block is not None
    drafts = outcome.block.ids[0].tolist()
    logits, _, _ = reference_rollout(model, feed.ids, torch.from_numpy(feed.rows), forced=drafts)
    top, place = (logits / 0.7).topk(5, dim=-1)
    assert outcome.block.q_ids[0].tolist() == model.d2t[place].tolist()
    np.testing.assert_allclose(outcome.block.q_probs[0], top.softmax(-1), atol=1e-4)
    for k, token in enumerate(drafts):
        assert token in outcome.block.q_ids[0, k]


def test_drafting_leaves_the_context_alone() -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    feed = Feed(1, model.spec)
    first = engine.run([feed.open(), feed.commit(40)], 0.0).block
    again = engine.run([feed.commit(0)], 0.1).block
    assert first is not None
    assert again is not None
    np.testing.assert_array_equal(first.ids, again.ids)


@pytest.mark.parametrize("end", ["release", "hang up", "not finite"])
def test_nothing_is_kept_of_sessions_that_ended(end: str) -> None:
    engine = make_engine(make_model(make_spec()))
    feed, other = Feed(1, engine.spec), Feed(2, engine.spec, owner=2)
    engine.run([feed.open(), feed.commit(5), other.open(), other.commit(5)], 0.0)
    bad = np.full((1, engine.spec.hidden_size), np.inf, np.float32)
    work = {
        "release": Work(owner=1, frame=Release(lane_id=LANE, rid=np.array([1], np.int64))),
        "hang up": Work(owner=1, frame=HangUp()),
        "not finite": feed.commit(1, features=bad),
    }
    outcome = engine.run([work[end], other.commit(1)], 0.1)
    assert [lost.rid for lost in outcome.lost] == ([1] if end == "not finite" else [])
    assert [d.rid for d in outcome.drafted] == [2]
    engine.run([], 0.2)
    assert [session.rid for session, _ in engine._last.values()] == [2]
    assert engine.num_sessions == 1


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_session_whose_numbers_overflow_costs_no_other_its_block(mode: str) -> None:
    """fp16 holds the features, but not what the rollout makes of them: such a block would make a
    frame that cannot be sent, with all that is in it."""
    model = make_model(make_spec()).half()
    with torch.no_grad():
        model.layers[0].mlp.down_proj.weight.mul_(10)
    feeds = [Feed(rid, model.spec) for rid in range(3)]
    opened = [feed.open(temperature=1.0, mode=mode, seed=feed.rid) for feed in feeds]
    huge = np.full((9, model.spec.hidden_size), 65504, np.float32)
    commits = [feeds[0].commit(9), feeds[1].commit(9, features=huge), feeds[2].commit(80)]
    engine = make_engine(copy.deepcopy(model))
    outcome = engine.run([*opened, *commits], 0.0)
    assert [d.rid for d in outcome.drafted] == [0, 2]
    assert [lost.rid for lost in outcome.lost] == [1]
    assert engine.counters.failed == 1
    block = outcome.block
    assert block is not None
    assert np.isfinite(block.confidence).all()
    assert np.isfinite(block.q_probs).all()
    sound = [opened[0], opened[2], commits[0], commits[2]]
    alone = make_engine(copy.deepcopy(model)).run(sound, 0.0).block
    assert alone is not None
    np.testing.assert_array_equal(block.ids, alone.ids)
    np.testing.assert_array_equal(block.q_probs, alone.q_probs)


def test_it_is_a_drafter() -> None:
    drafter: Drafter = make_engine(make_model(make_spec()))
    assert (drafter.limits.gamma, drafter.limits.feature_size) == (4, 32)

"""The engine against an independent slow reference, and against itself at batch 1."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.wire import Commit, Release
from drafter_service.backbone import DSparkModel
from drafter_service.drafter import Drafter, DraftOutcome, HangUp, Work
from drafter_service.engine import DraftEngine
from drafter_service.staging import to_tensor
from tests.drafters import (
    LANE,
    Feed,
    make_engine,
    make_model,
    make_spec,
    reference_block,
    reference_hidden,
)

LENGTHS = (1, 3, 31, 32, 33, 70, 200)
"""Around the KV block size, and far enough apart to be attended in several groups."""


def check_against_reference(
    engine: DraftEngine, model: DSparkModel, feed: Feed, outcome: DraftOutcome
) -> None:
    """Block ids and confidences of one session equal the reference's."""
    row = [d.rid for d in outcome.drafted].index(feed.rid)
    drafted = outcome.drafted[row]
    assert drafted.anchor == len(feed.ids) - 1
    assert drafted.digest == digest.of(feed.ids)
    windows = model.spec.sliding_windows
    hidden = reference_hidden(model, torch.from_numpy(feed.rows), feed.ids[-1], visible=windows)
    session = engine.sessions.get(LANE, feed.rid)
    assert session is not None
    torch.testing.assert_close(engine.block_hidden([session])[0], hidden, atol=1e-4, rtol=1e-4)
    ids, confidence = reference_block(model, hidden, feed.ids[-1])
    assert outcome.block is not None
    assert outcome.block.ids[row].tolist() == ids
    np.testing.assert_allclose(outcome.block.confidence[row], confidence, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "gated"},
        {"head": "rnn"},
        {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
        {"confidence_with_markov": False},
        {"has_confidence": False, "confidence_with_markov": False},
        {"draft_vocab_size": 20},
        {"head": "gated", "draft_vocab_size": 20, "sample_from_anchor": False},
        {"sliding_windows": (8, 8)},
        {"sliding_windows": (None, 40), "causal_sliding_blocks": True},
        {"sliding_windows": (5, 40)},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
    ],
)
def test_a_mixed_batch_equals_the_reference(changes: dict[str, Any]) -> None:
    model = make_model(make_spec(**changes))
    engine = make_engine(copy.deepcopy(model))
    feeds = [Feed(rid, model.spec) for rid in range(len(LENGTHS))]
    work = [feed.open() for feed in feeds]
    work += [feed.commit(length) for feed, length in zip(feeds, LENGTHS, strict=True)]
    outcome = engine.run(work, 0.0)
    for num_new in (None, 3, 1):  # the first block, then two rounds
        if num_new:
            outcome = engine.run([f.commit(num_new) for f in feeds[3:] + feeds[:3]], 1.0)
        assert len(outcome.drafted) == len(feeds)
        assert outcome.lost == ()
        for feed in feeds:
            check_against_reference(engine, model, feed, outcome)


def test_the_reference_is_sensitive_to_what_it_checks() -> None:
    """A hole, a shifted position, or a window off by one would move the reference's figures."""
    model = make_model(make_spec())
    rows = torch.randn(12, 32)
    hidden = reference_hidden(model, rows, 7)
    for other in (
        reference_hidden(model, rows[1:], 7),
        reference_hidden(model, torch.cat([rows[1:], rows[:1]]), 7),
        reference_hidden(model, rows, 8),
        reference_hidden(model, rows, 7, visible=(11, None)),
    ):
        assert (hidden - other).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_batch_equals_batch_one_when_sampling(mode: str) -> None:
    model = make_model(make_spec())
    together = make_engine(copy.deepcopy(model))
    feeds = [Feed(rid, model.spec) for rid in range(len(LENGTHS))]
    opens = [feed.open(temperature=0.9, seed=rid, mode=mode) for rid, feed in enumerate(feeds)]
    commits = [feed.commit(n) for feed, n in zip(feeds, LENGTHS, strict=True)]
    batch = together.run([*opens, *commits], 0.0)
    assert batch.block is not None
    for rid, (opening, commit) in enumerate(zip(opens, commits, strict=True)):
        alone = make_engine(copy.deepcopy(model)).run([opening, commit], 0.0)
        assert alone.block is not None
        assert batch.drafted[rid] == alone.drafted[0]
        assert batch.block.ids[rid].tolist() == alone.block.ids[0].tolist()
        assert batch.block.has_q[rid] == alone.block.has_q[0] == (mode == "rejection")
        if mode == "rejection":
            np.testing.assert_allclose(batch.block.q_probs[rid], alone.block.q_probs[0], atol=1e-5)


def test_block_keys_never_stay() -> None:
    model = make_model(make_spec())
    engine, feed = make_engine(model), Feed(0, model.spec)
    first = engine.run([feed.open(), feed.commit(20)], 0.0)
    session = engine.sessions.get(LANE, 0)
    assert session is not None
    assert first.block is not None
    covered, blocks = session.covered, list(session.blocks)
    before = [layer.clone() for layer in engine.kv._layers]
    again = engine.draft([session])
    assert again.ids.tolist() == first.block.ids.tolist()
    assert again.confidence.tolist() == first.block.confidence.tolist()
    assert (session.covered, session.blocks) == (covered, blocks)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.kv._layers, strict=True))
    written = sum(int(layer.flatten(1).any(dim=1).sum()) for layer in before)
    assert written == 20 * model.spec.num_layers


def test_chunks_of_a_prompt_equal_one_commit() -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    feed = Feed(0, model.spec)
    work = [feed.open()]
    work += [feed.commit(n, want_draft=False) for n in (40, 1, 25)]
    assert engine.run(work[:3], 0.0).drafted == ()
    outcome = engine.run([work[3], feed.commit(7)], 0.0)  # two commits of one session in a batch
    assert len(outcome.drafted) == 1
    check_against_reference(engine, model, feed, outcome)


def test_the_last_commit_of_a_batch_decides_whether_to_draft() -> None:
    model = make_model(make_spec())
    engine, feed = make_engine(model), Feed(0, model.spec)
    work = [feed.open(), feed.commit(4), feed.commit(2, want_draft=False)]
    assert engine.run(work, 0.0).drafted == ()
    assert engine.num_sessions == 1


def test_window_frees_what_no_layer_sees() -> None:
    model = make_model(make_spec(sliding_windows=(8, 16)))
    engine = make_engine(copy.deepcopy(model), max_session_tokens=8 * 32)
    feed = Feed(0, model.spec)
    engine.run([feed.open(), feed.commit(100)], 0.0)
    for _ in range(20):
        outcome = engine.run([feed.commit(17)], 0.0)
    check_against_reference(engine, model, feed, outcome)
    session = engine.sessions.get(LANE, 0)
    assert session is not None
    assert session.covered == 440
    assert len(session.blocks) <= 2


@pytest.mark.parametrize("dtype", ["f4", "f2", "u2"])
def test_features_in_every_wire_dtype(dtype: str) -> None:
    rows = torch.randn(5, 32)
    if dtype == "u2":
        wire = rows.bfloat16().view(torch.int16).numpy().view(np.uint16)
        expected = rows.bfloat16().float()
    else:
        wire = rows.numpy().astype(dtype)
        expected = torch.from_numpy(wire.astype(np.float32))
    wire.flags.writeable = False  # as it comes out of the codec
    assert torch.equal(to_tensor(wire).float(), expected)
    model = make_model(make_spec())
    engine, feed = make_engine(copy.deepcopy(model)), Feed(0, model.spec)
    commit = feed.commit(5, features=wire)
    feed.rows = expected.numpy()
    check_against_reference(engine, model, feed, engine.run([feed.open(), commit], 0.0))


def test_broken_sessions_are_lost_and_the_others_drafted() -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    good, gap, diverged, huge = (Feed(rid, model.spec) for rid in range(4))
    engine.run([feed.open() for feed in (good, gap, diverged, huge)], 0.0)
    commits = [
        gap.commit(5, first_position=np.array([1], np.int32)),
        huge.commit(40, features=np.full((40, 32), 3e38, np.float32)),
        good.commit(9),
        diverged.commit(5, digest=np.array([1], np.uint64)),
        Feed(9, model.spec).commit(2),
    ]
    outcome = engine.run(commits, 0.0)
    assert sorted(lost.rid for lost in outcome.lost) == [1, 2, 3, 9]
    assert [d.rid for d in outcome.drafted] == [0]
    check_against_reference(engine, model, good, outcome)
    assert engine.num_sessions == 1
    # Blocks that the broken one wrote its rubbish to are used again; padding stays clean.
    others = [Feed(rid, model.spec) for rid in (10, 11)]
    work = [feed.open() for feed in others]
    outcome = engine.run([*work, others[0].commit(2), others[1].commit(50), good.commit(1)], 0.0)
    for feed in (*others, good):
        check_against_reference(engine, model, feed, outcome)


def test_an_error_while_computing_loses_that_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    other, hit = Feed(0, model.spec), Feed(1, model.spec)
    engine.run([other.open(), hit.open(), other.commit(4)], 0.0)

    def explode(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "write", explode)
        outcome = engine.run([hit.commit(3)], 0.0)
    assert outcome.block is None
    assert [(lost.rid, lost.reason) for lost in outcome.lost] == [(1, "error while drafting")]
    check_against_reference(engine, model, other, engine.run([other.commit(2)], 0.0))


def test_release_hang_up_and_expiry() -> None:
    model = make_model(make_spec())
    engine = make_engine(model, idle_session_s=5.0)
    feeds = [Feed(rid, model.spec, owner=1 + rid % 2) for rid in range(4)]
    engine.run([w for feed in feeds for w in (feed.open(), feed.commit(3))], 0.0)
    release = Work(owner=1, frame=Release(lane_id=LANE, rid=np.array([0], np.int64)))
    # A release behind a commit of the same batch: nothing is drafted for it.
    outcome = engine.run([feeds[0].commit(1), release, feeds[1].commit(1)], 1.0)
    assert [d.rid for d in outcome.drafted] == [1]
    engine.run([Work(owner=1, frame=HangUp())], 1.0)
    assert engine.num_sessions == 2
    outcome = engine.run([], 5.5)
    assert [lost.rid for lost in outcome.lost] == [3]
    assert engine.num_sessions == 1


def test_context_ends_where_rotary_positions_end() -> None:
    model = make_model(make_spec(max_position_embeddings=24))
    engine, feed = make_engine(model), Feed(0, model.spec)
    assert len(engine.run([feed.open(), feed.commit(20)], 0.0).drafted) == 1
    outcome = engine.run([feed.commit(1)], 0.0)
    assert outcome.drafted == ()
    assert "exceeds 20" in outcome.lost[0].reason


def test_kv_grows_and_keeps_its_contents() -> None:
    model = make_model(make_spec(max_position_embeddings=4096))
    engine = make_engine(copy.deepcopy(model))
    first, second = Feed(0, model.spec), Feed(1, model.spec)
    engine.run([first.open(), second.open(), first.commit(60)], 0.0)
    engine.run([second.commit(3000)], 0.0)
    check_against_reference(engine, model, first, engine.run([first.commit(2)], 0.0))


def test_a_commit_carries_several_sessions() -> None:
    model = make_model(make_spec())
    engine = make_engine(copy.deepcopy(model))
    feeds = [Feed(rid, model.spec) for rid in range(3)]
    engine.run([feed.open() for feed in feeds], 0.0)
    frames = [feed.commit(2 + feed.rid).frame for feed in feeds]
    commits = [frame for frame in frames if isinstance(frame, Commit)]
    merged = dataclasses.replace(
        commits[0],
        **{
            f.name: np.concatenate([getattr(commit, f.name) for commit in commits])
            for f in dataclasses.fields(Commit)
            if f.name != "lane_id"
        },
    )
    outcome = engine.run([Work(owner=1, frame=merged)], 0.0)
    for feed in feeds:
        check_against_reference(engine, model, feed, outcome)


def test_the_engine_fits_the_seam() -> None:
    drafter: Drafter = make_engine(make_model(make_spec()))
    assert (drafter.limits.gamma, drafter.limits.vocab_size) == (4, 60)
    assert drafter.limits.feature_size == 32

"""Simulated drafters and verifiers, frame by frame."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cluster import digest
from cluster.sampling import plain_sampling
from cluster.wire import Admission, Rebind, Step, StepResult
from deploy.simulation.acceptance import AcceptanceModel, Domain
from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.curves import DraftCurve, StepCurve
from deploy.simulation.drafter import Commits, SimDrafter
from deploy.simulation.specs import DrafterSpec, VerifierSpec
from deploy.simulation.text import text
from deploy.simulation.verifier import SimVerifier
from router.blocks import DraftBlock

SURE = AcceptanceModel(
    domains=(Domain(acceptance=(0.99999,) * 3),), request_sd=0.0, drift_sd=0.0, position_sd=0.0
)


class Peer:
    """A lane that keeps what it gets."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.frames: list[tuple[float, list[DraftBlock]]] = []
        self.results: list[StepResult] = []

    def take_blocks(self, drafter_id: str, blocks: list[DraftBlock]) -> None:
        self.frames.append((self.clock.now, blocks))


def link(clock: Clock) -> Link:
    return Link(clock, np.random.default_rng(0), latency_s=0.0, jitter_s=0.0)


def drafter_of(clock: Clock, model: AcceptanceModel = SURE, **spec: object) -> SimDrafter:
    curve = DraftCurve(fixed_s=1.0, per_block_s=0.1, per_row_s=0.01)
    return SimDrafter(
        "d",
        DrafterSpec(curve=curve, jitter=0.0, **spec),  # type: ignore[arg-type]
        model=model,
        clock=clock,
        device=Device(clock, "device"),
        link=link(clock),
        rng=np.random.default_rng(0),
    )


def commits(peer: Peer, keys: list[int], num_rows: int = 0) -> Commits:
    key_S = np.array(keys, np.uint64)
    return Commits(
        lane=peer,
        rid_S=np.array(keys),
        epoch_S=np.zeros(len(keys), np.int64),
        anchor_S=np.full(len(keys), 9),
        digest_S=key_S,
        key_S=key_S,
        traits_SG=SURE.traits(key_S),
        num_rows=num_rows,
    )


# --- drafters ---------------------------------------------------------------------------------


def test_what_comes_during_a_batch_makes_the_next_one() -> None:
    clock = Clock()
    peer, drafter = Peer(clock), drafter_of(clock)
    drafter.take(0, commits(peer, [1], num_rows=10))
    clock.at(0.5, drafter.take, 0, commits(peer, [2, 3]))
    clock.at(0.6, drafter.take, 0, commits(peer, [4]))
    clock.run(10.0)
    seen = [(at, [block.rid for block in blocks]) for at, blocks in peer.frames]
    assert seen == [
        (pytest.approx(1.2), [1]),
        (pytest.approx(2.5), [2, 3]),
        (pytest.approx(2.5), [4]),
    ]
    assert (drafter.num_batches, drafter.num_blocks) == (2, 4)
    assert drafter.busy_s == pytest.approx(2.5)
    block = peer.frames[1][1][1]
    assert block.ids == tuple(text(3, 10, 13))
    assert block.confidence == pytest.approx(1.0, abs=1e-4)
    assert (block.anchor, block.digest, block.batch_size, block.q) == (9, 3, 2, None)
    assert block.draft_s == pytest.approx(2.0)


def test_a_batch_has_its_bound() -> None:
    clock = Clock()
    peer, drafter = Peer(clock), drafter_of(clock, max_batch=2)
    drafter.take(0, commits(peer, [1, 2, 3], num_rows=100))
    clock.run(10.0)
    seen = [(at, [block.rid for block in blocks]) for at, blocks in peer.frames]
    assert seen == [(pytest.approx(2.2), [1, 2]), (pytest.approx(3.3), [3])]


def test_the_dead_say_nothing_and_their_successors_know_nothing() -> None:
    clock = Clock()
    peer, drafter = Peer(clock), drafter_of(clock)
    drafter.take(0, commits(peer, [1]))
    clock.at(0.5, drafter.die)
    clock.at(0.6, drafter.take, 1, commits(peer, [2]))
    clock.at(0.7, drafter.revive)
    clock.at(0.8, drafter.take, 0, commits(peer, [3]))
    clock.at(0.9, drafter.take, 1, commits(peer, [4]))
    clock.run(10.0)
    assert [[block.rid for block in blocks] for _, blocks in peer.frames] == [[4]]


def test_rejection_mode_ships_the_law_it_drew_from() -> None:
    clock = Clock()
    model = AcceptanceModel(regime="rejection", domains=SURE.domains)
    peer, drafter = Peer(clock), drafter_of(clock, model)
    drafter.take(0, commits(peer, [1, 2]))
    clock.run(10.0)
    for block in peer.frames[0][1]:
        assert block.q is not None
        assert block.q.ids[:, 0].tolist() == list(block.ids)
        assert block.q.probs.tolist() == [[1.0]] * 3


# --- verifiers --------------------------------------------------------------------------------


def verifier_of(clock: Clock, peer: Peer, drafters: Mapping[str, SimDrafter]) -> SimVerifier:
    verifier = SimVerifier(
        VerifierSpec(curve=StepCurve(fixed_s=1.0, per_token_s=0.1), jitter=0.0),
        model=SURE,
        num_outputs={7: 100, 8: 100},
        drafters=drafters,
        clock=clock,
        device=Device(clock, "device"),
        link=link(clock),
        to_drafters=link(clock),
        rng=np.random.default_rng(0),
    )
    verifier.serve(peer, peer.results.append)
    return verifier


def admission(key: int, drafter_id: str = "") -> Admission:
    return Admission(
        rid=key,
        ids=np.array(text(key, 0, 10), np.int32),
        num_prompt=10,
        max_new_tokens=100,
        stop_ids=np.zeros(0, np.int32),
        sampling=plain_sampling(0.0, mode="coupled", seed=key),
        drafter_id=drafter_id,
        drafter_address=drafter_id,
        session_epoch=3,
        want_draft=bool(drafter_id),
    )


def step(
    step_id: int,
    rows: Mapping[int, list[int]] | None = None,
    *,
    admissions: tuple[Admission, ...] = (),
    rebinds: tuple[Rebind, ...] = (),
    anchor: int = 10,
    wrong_digest: bool = False,
) -> Step:
    """Rows: drafts by request, all at one anchor."""
    rows = rows or {}
    digests = [digest.of(text(rid, 0, anchor + 1)) ^ wrong_digest for rid in rows]
    return Step(
        lane_epoch=1,
        step_id=step_id,
        admissions=admissions,
        rebinds=rebinds,
        releases=np.zeros(0, np.int64),
        prefill_budget=64,
        rid=np.array(list(rows), np.int64),
        anchor=np.full(len(rows), anchor, np.int32),
        digest=np.array(digests, np.uint64),
        num_draft=np.array([len(ids) for ids in rows.values()], np.int32),
        want_draft=np.ones(len(rows), np.uint8),
        draft_ids=np.array([token for ids in rows.values() for token in ids], np.int32),
        has_q=np.zeros(len(rows), np.uint8),
        q_ids=np.zeros((0, 0), np.int32),
        q_probs=np.zeros((0, 0), np.float32),
    )


def test_a_step_takes_what_its_load_costs_and_one_may_wait() -> None:
    clock = Clock()
    peer = Peer(clock)
    verifier = verifier_of(clock, peer, {})
    verifier.take(step(0, admissions=(admission(7), admission(8))))
    clock.run(5.0)
    (prefill,) = peer.results
    assert prefill.step_s == pytest.approx(3.0)
    assert (prefill.num_real_tokens, prefill.num_prefill_tokens) == (20, 20)
    assert prefill.token_ids.tolist() == text(7, 10, 11) + text(8, 10, 11)
    verifier.take(step(1, {7: text(7, 11, 13)}))
    verifier.take(step(2, {8: []}))
    with pytest.raises(AssertionError, match="one waits"):
        verifier.take(step(3))
    clock.run(20.0)
    first, second = peer.results[1:]
    assert (first.step_s, second.step_s) == (pytest.approx(1.3), pytest.approx(1.1))
    assert first.token_ids.tolist() == text(7, 11, 14)
    assert first.num_accepted.tolist() == [2]
    assert (first.sum_context, second.sum_context) == (13, 11)
    assert verifier.busy_s == pytest.approx(5.4)


def test_rows_of_another_prefix_fail_alone() -> None:
    clock = Clock()
    peer = Peer(clock)
    verifier = verifier_of(clock, peer, {})
    verifier.take(step(0, admissions=(admission(7), admission(8))))
    clock.run(5.0)
    verifier.take(step(1, {7: [], 9: text(9, 11, 13)}))
    clock.run(10.0)
    result = peer.results[1]
    assert [(f.rid, f.code) for f in result.failures] == [(9, "StaleFrame")]
    assert result.rid.tolist() == [7]
    assert result.num_real_tokens == 1
    verifier.take(step(2, {8: []}, wrong_digest=True))
    clock.run(15.0)
    assert [f.rid for f in peer.results[2].failures] == [8]
    assert peer.results[2].num_real_tokens == 0


def test_blocks_are_asked_for_where_the_session_is() -> None:
    clock = Clock()
    peer, drafter = Peer(clock), drafter_of(clock)
    verifier = verifier_of(clock, peer, {"d": drafter})
    verifier.take(step(0, admissions=(admission(7, "d"),)))
    clock.run(20.0)
    ((at, (block,)),) = peer.frames
    # A step of 10 tokens, then a block with the prompt's 10 rows.
    assert at == pytest.approx(2.0 + 1.0 + 0.1 + 0.1)
    assert (block.rid, block.epoch, block.anchor) == (7, 3, 10)
    assert block.digest == digest.of(text(7, 0, 11))
    drafter.die()
    drafter.revive()
    verifier.take(step(1, {7: []}))
    clock.run(40.0)
    assert peer.results[1].unbound.tolist() == [7]
    assert len(peer.frames) == 1
    rebind = Rebind(rid=7, drafter_id="d", drafter_address="d", session_epoch=4, want_draft=False)
    verifier.take(step(2, {7: []}, rebinds=(rebind,), anchor=11))
    clock.run(60.0)
    at, (block,) = peer.frames[1]
    # All 12 rows so far.
    assert at == pytest.approx(40.0 + 1.1 + 1.0 + 0.1 + 0.12)
    assert (block.epoch, block.anchor) == (4, 12)

"""Rows for the drafters are transformers' hidden states, projected, at every committed position."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import pytest
import torch

from tests.frames import make_admission
from tests.verifier_service.conformance.drafts import MixedDrafts
from tests.verifier_service.conformance.rounds import Rounds
from tests.verifier_service.conformance.targets import Target, chat_prompts
from tests.verifier_service.torch_targets import prompt
from verifier_service.engine import Engine

NUM_NEW: Final = 12
TOLERANCE: Final = 1e-4
"""Largest error of a row over the largest entry of the row."""


def check_rows(rounds: Rounds, target: Target) -> None:
    """Every position but the last token's has its row, once, and it is the right one."""
    for rid, ids in rounds.ids.items():
        rows = rounds.committed[rid]
        features = [item.features for item in rows if item.features is not None]
        assert len(features) == len(rows), "a projection was asked for"
        got_TD, want_TD = torch.cat(features), target.features(ids[:-1])
        assert got_TD.shape == want_TD.shape
        error_T = (got_TD - want_TD).abs().amax(dim=1) / want_TD.abs().amax(dim=1)
        assert float(error_T.max()) < TOLERANCE, (rid, int(error_T.argmax()))


def mixed(engine: Engine, target: Target, starts: Sequence[list[int]]) -> MixedDrafts:
    """Drafts over what transformers says behind these prompts."""
    return MixedDrafts(
        {rid: [*ids, *target.greedy(ids, NUM_NEW)] for rid, ids in enumerate(starts)},
        vocab_size=target.vocab_size,
        max_model_len=engine.limits.max_model_len,
    )


def run_in_chunks(
    engine: Engine, target: Target, starts: Sequence[list[int]], budget: int
) -> Rounds:
    """Decode with drafts of all kinds, prompts cut to ``budget`` tokens a step, and check rows."""
    drafts = mixed(engine, target, starts)
    rounds = Rounds(engine)
    rounds.add(*[make_admission(i, ids, max_new_tokens=NUM_NEW) for i, ids in enumerate(starts)])
    while len(rounds.finish) < len(starts):
        rounds.step(drafts, prefill_budget=budget)
    check_rows(rounds, target)
    return rounds


@pytest.mark.parametrize("budget", [5, 48])
def test_chunked_prefill_and_refused_drafts(engine: Engine, tiny: Target, budget: int) -> None:
    starts = [prompt(length, 300 * budget + length) for length in (1, 44, 7, 16, 17)]
    rounds = run_in_chunks(engine, tiny, starts, budget)
    assert rounds.num_cached == 0
    num_chunks = sum(not rows.prefill_done for item in rounds.committed.values() for rows in item)
    assert num_chunks >= sum(map(len, starts)) / budget - len(starts)


def check_crowd(rounds: Rounds, target: Target) -> None:
    """Twice the requests that the KV holds at their end: each says and sends the same."""
    starts = [prompt(6, 500 + seed) for seed in range(16)]
    rounds.run([make_admission(i, ids, max_new_tokens=58) for i, ids in enumerate(starts)])
    for rid, ids in enumerate(starts):
        assert len(rounds.ids[rid]) == rounds.engine.limits.max_model_len
        assert target.reference.greedy_ties(ids, rounds.emitted(rid)) <= 1
    check_rows(rounds, target)


def test_more_requests_than_kv(engine: Engine, tiny: Target) -> None:
    """KV is promised in full: who finds none waits, and nobody loses any."""
    rounds = Rounds(engine)
    check_crowd(rounds, tiny)
    assert rounds.num_overloaded > 0
    assert rounds.num_preempted == 0


def test_preempted_requests_go_on(overcommitted: Engine, tiny: Target) -> None:
    """More was promised than there is: who loses his KV is told so, and admitted again with what
    he has emitted says the rest."""
    rounds = Rounds(overcommitted)
    check_crowd(rounds, tiny)
    assert rounds.num_preempted > 0
    assert rounds.num_reported_preempted == rounds.num_preempted


def test_a_second_turn_finds_its_prefix(engine: Engine, tiny: Target) -> None:
    """Prompt and answer of the first turn are not computed again, and their rows come all the
    same."""
    first = Rounds(engine)
    first.run([make_admission(0, prompt(20, 700), max_new_tokens=16)])
    assert first.num_cached == 0
    known = [*first.ids[0], *prompt(5, 701)]
    second = Rounds(engine)
    second.run([make_admission(1, known, max_new_tokens=6)])
    # Of the first turn all but the last token has been computed: whole blocks of that are found.
    block = engine.limits.kv_block_tokens
    assert second.num_cached == 35 // block * block >= 32, "part of it is the answer's"
    check_rows(second, tiny)
    again = Rounds(engine)
    again.run([make_admission(2, known, max_new_tokens=6)])
    assert again.num_cached >= second.num_cached
    assert again.emitted(2) == second.emitted(1)
    check_rows(again, tiny)


def test_a_hit_leaves_something_to_compute(engine: Engine, tiny: Target) -> None:
    """A whole prompt is known, to the block: its last token is computed for the logits."""
    block = engine.limits.kv_block_tokens
    ids = prompt(block + 1, 710)
    for rid, (length, num_cached) in enumerate(((block, 0), (block, 0), (block + 1, block))):
        rounds = Rounds(engine)
        rounds.run([make_admission(rid, ids[:length], max_new_tokens=4)])
        assert rounds.num_cached == num_cached
        check_rows(rounds, tiny)


def test_another_prefix_is_no_hit(wide: Engine, tiny: Target) -> None:
    """A block behind another one than before is other keys, values and rows."""
    block = wide.limits.kv_block_tokens
    a, b, c, d = (prompt(block, seed) for seed in range(720, 724))
    for rid, (start, num_cached) in enumerate((([*a, *b], 0), ([*c, *d], 0), ([*a, *d], block))):
        rounds = Rounds(wide)
        rounds.run([make_admission(rid, [*start, 1, 2], max_new_tokens=4)])
        assert rounds.num_cached == num_cached
        check_rows(rounds, tiny)


def test_one_prompt_four_times_at_once(engine: Engine, tiny: Target) -> None:
    """Cut into chunks: whoever finds what of the others, all rows are right."""
    ids = prompt(engine.limits.kv_block_tokens + 9, 730)
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, ids, max_new_tokens=4) for rid in range(4)])
    while len(rounds.finish) < 4:
        rounds.step(prefill_budget=11)
    assert len({tuple(text) for text in rounds.ids.values()}) == 1
    check_rows(rounds, tiny)


@pytest.mark.slow
@pytest.mark.model
def test_embedded(smollm2: Engine, embedded: Target) -> None:
    """The shipped drafter's projection under chunks, refused drafts and second turns."""
    starts = chat_prompts(embedded.reference, 16)
    rounds = run_in_chunks(smollm2, embedded, starts, 37)
    second = Rounds(smollm2)
    more = embedded.reference.chat("And why is that?")
    second.run(
        [
            make_admission(rid, [*ids, *more], max_new_tokens=8)
            for rid, ids in itertools.islice(rounds.ids.items(), 8)
        ]
    )
    # An engine need not remember what its last step for a request computed.
    block, last = smollm2.limits.kv_block_tokens, {r: rounds.committed[r][-1] for r in second.ids}
    least = sum((rows.first_position + 1) // block * block for rows in last.values())
    most = sum((len(rounds.ids[rid]) - 1) // block * block for rid in second.ids)
    assert 0 < least <= second.num_cached <= most
    check_rows(second, embedded)

"""Numbers that are not finite end the one request that has them, and nobody meets them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch

from tests.frames import Row, make_admission, make_sampling, make_step
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import prompt
from tests.verifier_service.vllm.v0_32.conftest import worker_of
from verifier_service.engine import Engine

POISON: Final = 207
"""A token whose embedding is broken while `poisoned`."""


@contextmanager
def poisoned(engine: Engine) -> Iterator[None]:
    """The target makes NaN of `POISON`, and of all that attends to it."""

    def hook(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((args[0] == POISON)[:, None], float("nan"))

    handle = worker_of(engine).model_runner.model.model.embed_tokens.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def clean(length: int, seed: int) -> list[int]:
    return [token if token != POISON else 1 for token in prompt(length, seed)]


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_a_poisoned_request_is_alone(engine: Engine, tiny: Target, mode: str) -> None:
    """In its prefill, beside one in prefill and one that decodes; its KV is not found later."""
    sampling = make_sampling(
        temperature=float(mode != "greedy"), mode="coupled" if mode == "greedy" else mode, seed=5
    )
    bad = [*clean(39, 800), POISON]
    rounds = Rounds(engine)
    rounds.add(make_admission(0, clean(9, 801), sampling=sampling))
    rounds.step()
    with poisoned(engine):
        rounds.add(make_admission(1, bad, sampling=sampling))
        rounds.add(make_admission(2, clean(7, 802)))
        rounds.step(lambda rid, ids: Draft(ids=[3, 4]))
        assert rounds.refused == {1: "DSparkError"}
        assert rounds.decoding == {0, 2}
        rounds.run()
    assert len(rounds.emitted(0)) == 8
    assert rounds.emitted(2) == tiny.greedy(clean(7, 802), 8)
    again = Rounds(engine)
    again.run([make_admission(1, bad)])
    assert again.num_cached == 0
    assert again.emitted(1) == tiny.greedy(bad, 8)


def test_a_draft_that_poisons(engine: Engine, tiny: Target) -> None:
    """While it decodes: the rows behind the draft are NaN."""
    rounds = Rounds(engine)
    rounds.add(*[make_admission(rid, clean(20, 810 + rid), max_new_tokens=20) for rid in range(3)])
    rounds.step()
    with poisoned(engine):
        row = Row(rid=1, ids=rounds.ids[1], draft_ids=[POISON, 4])
        result = engine.step(make_step([row])).result
        assert [(failure.rid, failure.code) for failure in result.failures] == [(1, "DSparkError")]
        assert not result.rid.tolist()
    while len(rounds.finish) < 2:
        rounds.step(rids=sorted(rounds.decoding - {1}))
    for rid in (0, 2):
        assert rounds.emitted(rid) == tiny.greedy(clean(20, 810 + rid), 20)


def test_blocks_are_clean_when_used_again(engine: Engine, tiny: Target) -> None:
    """NaN is left in KV blocks of requests that ended; masked positions must not let it through."""
    bad = [make_admission(rid, [*clean(60, 820 + rid), POISON]) for rid in range(8)]
    with poisoned(engine):
        result = engine.step(make_step(admissions=tuple(bad))).result
        failures = list(result.failures)
        while result.pending_prefill_tokens:
            result = engine.step(make_step()).result
            failures += result.failures
    assert {(failure.rid, failure.code) for failure in failures} == {
        (rid, "DSparkError") for rid in range(8)
    }
    # All of the KV, and more: whatever block was poisoned is used, up to its middle.
    rounds = Rounds(engine)
    rounds.run([make_admission(rid, clean(40, 840 + rid), max_new_tokens=9) for rid in range(32)])
    for rid in range(32):
        assert rounds.emitted(rid) == tiny.greedy(clean(40, 840 + rid), 9)

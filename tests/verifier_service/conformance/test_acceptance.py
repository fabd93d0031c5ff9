"""A drafter drafts as well behind a prefix that was found as behind one that was computed."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.wire import Admission, Step
from deploy.offline.opening import open_drafting
from deploy.offline.rounds import Answer, LocalPair, Prompt
from tests.deploy.prompts import PROMPTS
from tests.verifier_service.conformance.targets import Target
from verifier_service.engine import Engine, EngineLimits, StepOutcome, StepShape

NUM_PROMPTS = 16
NUM_NEW = 32


class Counted:
    """An engine whose prefix hits are counted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_cached = 0

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def check(self, admission: Admission) -> None:
        self._engine.check(admission)

    def step(self, step: Step) -> StepOutcome:
        outcome = self._engine.step(step)
        self.num_cached += outcome.result.num_cached_tokens
        return outcome

    def release_all(self) -> None:
        self._engine.release_all()

    def measure_step(self, shape: StepShape) -> float:
        return self._engine.measure_step(shape)


def answer(engine: Counted, target: Target, prompts: list[Prompt]) -> tuple[list[Any], float]:
    """Texts of these prompts decoded by the whole pair, and tokens per round."""
    drafter = open_drafting(target.drafter, target.folder, device="cpu", calibrated=False)
    pair = LocalPair(engine, drafter)
    rounds, answers = [], {}
    for event in pair.play(
        prompts, temperature=0.0, mode="coupled", max_new_tokens=NUM_NEW, concurrency=8, seed=1
    ):
        if isinstance(event, Answer):
            answers[event.prompt] = event.token_ids
        else:
            rounds.append(event)
    assert pair.num_lost == 0
    num_emitted = sum(item.num_emitted for item in rounds)
    return [answers[n] for n in range(len(prompts))], num_emitted / len(rounds)


@pytest.mark.slow
@pytest.mark.model
def test_cold_equals_warm(smollm2: Engine, embedded: Target) -> None:
    """The same prompts twice: answers and accepted lengths of the second run are the first's."""
    # Without a chat template: no common beginning that would make the first run warm.
    texts = [f"{n}) {' '.join(PROMPTS[n::NUM_PROMPTS])}" for n in range(NUM_PROMPTS)]
    encoded = [embedded.reference.tokenizer(text)["input_ids"] for text in texts]
    prompts = [Prompt(ids=tuple(ids), source="own", domain="chat") for ids in encoded]
    engine = Counted(smollm2)
    said, cold = answer(engine, embedded, prompts)
    assert engine.num_cached == 0
    again, warm = answer(engine, embedded, prompts)
    block = engine.limits.kv_block_tokens
    assert engine.num_cached == sum((len(ids) - 1) // block * block for ids in encoded) > 0
    different = sum(one != other for one, other in zip(said, again, strict=True))
    assert different <= 1, "near-ties are rare: this many means that something is off"
    assert cold > 1.5, "the drafter is of no use"
    assert warm == pytest.approx(cold, rel=0.01)

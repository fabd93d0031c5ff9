"""The embedded target: real weights, real prompts, the same text as transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.verifier_service.test_torch_model import Runner
from tests.verifier_service.torch_targets import (
    Lane,
    admission,
    load_reference,
    make_engine,
    reference_logits,
)

pytestmark = pytest.mark.model

NUM_NEW = 24
NEAR_TIE = 1e-3
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "A train leaves the station at 3 pm and travels 60 miles per hour. After two hours it",
)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return load_reference(smollm2_dir)


def near_ties(reference: Any, start: Sequence[int], text: Sequence[int]) -> int:
    """Near-ties of a greedy text; fails where it leaves the target's argmax by more than one."""
    laws = reference_logits(reference, [*start, *text[:-1]])[len(start) - 1 :]
    ties = 0
    for place, (law, token) in enumerate(zip(laws, text, strict=True)):
        best = law.topk(2).values
        if token != int(law.argmax()):
            assert float(best[0] - law[token]) < NEAR_TIE, f"token {place} is not greedy"
            ties += 1
    return ties


def test_greedy_text_equals_transformers(smollm2_dir: Path, reference: Any) -> None:
    """Three prompts at once, with garbage drafts and with right ones: every token is the argmax of
    transformers behind the same prefix, near-ties of the top two aside."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    starts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    vocab_size = reference.config.vocab_size
    engine = make_engine(smollm2_dir, kv_tokens=1024)
    plain, drafted = Lane(engine), Lane(engine)
    plain.run([admission(rid, ids, NUM_NEW) for rid, ids in enumerate(starts)])

    def drafter(rid: int, ids: Sequence[int]) -> list[int]:
        """Right for two tokens, then garbage."""
        done = len(ids) - len(starts[rid])
        rng = np.random.default_rng(len(ids))
        right = plain.emitted(rid, len(starts[rid]))[done : done + 2]
        return [*right, *rng.integers(0, vocab_size, 3).tolist()]

    drafted.run([admission(rid, ids, NUM_NEW) for rid, ids in enumerate(starts)], drafter)
    ties = 0
    for rid, ids in enumerate(starts):
        for lane in (plain, drafted):
            ties += near_ties(reference, ids, lane.emitted(rid, len(ids)))
        if plain.emitted(rid, len(ids)) != drafted.emitted(rid, len(ids)):
            assert ties, "texts differ without a near-tie"
    assert ties <= 2, "near-ties are rare: this many means that something is off"
    assert min(drafted.accepted.values()) >= NUM_NEW / 3


def test_logits_equal_transformers(smollm2_dir: Path, reference: Any) -> None:
    """Transformers' own two attention kernels differ by 5e-4 from fp64 on this model."""
    runner = Runner(smollm2_dir)
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(" ".join(PROMPTS))["input_ids"]
    (logits,) = runner.logits([runner.start(ids, len(ids))])
    assert float((logits - reference_logits(reference, ids)).abs().max()) < 1e-3

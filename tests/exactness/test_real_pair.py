"""Chi-square on the embedded target's own laws: served tokens are drawn from p, drafted or not.

The laws are SmolLM2's at three places of a real text; the functions are those that serve. Each
test has a twin that must fail: a target off by 2% of its mass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from tests.frames import make_sampling
from verifier_service.acceptance import SparseQ, VerifyRow, accept

pytestmark = pytest.mark.model

NUM_DRAWS = 24_000
BATCH = 200
PREFIX = "The best way to spend a rainy afternoon is to"


@pytest.fixture(scope="module")
def prefix_and_laws(smollm2_dir: Path) -> tuple[list[int], tuple[int, int], Tensor]:
    """Prefix ids, a draft of two likely tokens, and the raw logits [3, V] after each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(smollm2_dir)(PREFIX)["input_ids"]
    with torch.inference_mode():
        draft: list[int] = []
        for _ in range(2):
            draft.append(int(model(torch.tensor([ids + draft])).logits[0, -1].argmax()))
        logits = model(torch.tensor([ids + draft])).logits[0, -3:]
    return ids, (draft[0], draft[1]), logits


def p_value(laws: Tensor, draws: list[np.ndarray]) -> float:
    """Least p-value, corrected for their number, of the tokens drawn from each of the laws."""
    values = []
    for law, tokens in zip(laws, draws, strict=True):
        p = law.double().softmax(0).numpy()
        order = np.argsort(-p)
        cells = order[: int((p * len(tokens) >= 20).sum())]  # the rest is one cell
        observed = np.array([(tokens == cell).sum() for cell in cells], float)
        expected = p[cells] * len(tokens)
        values.append(
            chisquare(
                np.append(observed, len(tokens) - observed.sum()),
                np.append(expected, len(tokens) - expected.sum()),
            ).pvalue
        )
    return float(min(values) * len(values))


def run(
    prefix_and_laws: tuple[list[int], tuple[int, int], Tensor],
    mode: str,
    *,
    law_served: Tensor | None = None,
    seed: int = 0,
) -> list[np.ndarray]:
    """Tokens emitted at the first place, and at later ones where the drafts before survived."""
    ids, draft, laws = prefix_and_laws
    laws = laws if law_served is None else law_served
    q = None
    if mode == "rejection":  # a plausible sparse q that is not p, drawn from as a drafter would
        q_probs, q_ids = (laws.softmax(1) ** 0.7)[:2].topk(64, dim=1)
        q = SparseQ(
            ids=q_ids.numpy().astype(np.int32),
            probs=(q_probs / q_probs.sum(1, keepdim=True)).numpy(),
        )
    places: list[list[int]] = [[], [], []]
    rng = np.random.default_rng(seed)
    for start in range(0, NUM_DRAWS, BATCH):
        rows = []
        for n in range(start, start + BATCH):
            drafted, q_row = draft, None
            if q is not None:
                # One draft only: the law after another first token is not at hand.
                probs = q.probs[0].astype(np.float64)
                token = int(rng.choice(q.ids[0], p=probs / probs.sum()))
                drafted, q_row = (token,), SparseQ(ids=q.ids[:1], probs=q.probs[:1])
            rows.append(
                VerifyRow(
                    sampling=make_sampling(temperature=1.0, seed=seed + n, mode=mode),
                    ids=ids,
                    num_prompt=len(ids),
                    draft_ids=drafted,
                    q=q_row,
                )
            )
        for verdict in accept(laws[: len(rows[0].draft_ids) + 1].repeat(len(rows), 1), rows):
            reached = len(verdict.token_ids) if q is None else 1
            for place in range(reached):
                places[place].append(verdict.token_ids[place])
    return [np.array(tokens) for tokens in places if tokens]


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_tokens_follow_the_targets_law(
    prefix_and_laws: tuple[list[int], tuple[int, int], Tensor], mode: str
) -> None:
    draws = run(prefix_and_laws, mode)
    assert len(draws) == (3 if mode == "coupled" else 1)
    assert p_value(prefix_and_laws[2][: len(draws)], draws) > 1e-3


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_bias_of_two_percent_is_caught(
    prefix_and_laws: tuple[list[int], tuple[int, int], Tensor], mode: str
) -> None:
    laws = prefix_and_laws[2]
    biased = 0.98 * laws.double().softmax(1)
    biased[torch.arange(len(laws)), laws.argmax(1)] += 0.02
    draws = run(prefix_and_laws, mode, law_served=biased.log().float())
    assert p_value(laws[: len(draws)], draws) < 1e-4

"""Sampling parameters against a slow reference that takes them one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.exactness.tiny import sampling
from verifier_service.likeliest import argmax, likeliest
from verifier_service.logits import VerifyRow, process

PROMPT, OUTPUT, DRAFTS = (3, 5, 5, 8), (8, 2, 2), (5, 2, 11)


def reference(
    logits: list[float], s: Any, prompt: tuple[int, ...], output: tuple[int, ...]
) -> dict[int, float]:
    """The law of one row as {id: probability}, ids that are out absent."""
    values = [float(v) for v in logits]
    for token, bias in zip(s.bias_ids.tolist(), s.bias_values.tolist(), strict=True):
        values[token] += bias
    counts = Counter(output)
    for token in set(prompt) | set(output):
        value = values[token]
        values[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
    for token, count in counts.items():
        values[token] -= s.frequency_penalty * count + s.presence_penalty
    if s.temperature == 0:
        return {max(range(len(values)), key=lambda v: (values[v], -v)): 1.0}
    peak = max(values)
    mass = {v: math.exp((x - peak) / s.temperature) for v, x in enumerate(values)}
    mass = {v: m for v, m in mass.items() if m >= s.min_p}
    if s.top_k:
        least = sorted(mass.values(), reverse=True)[: s.top_k][-1]
        mass = {v: m for v, m in mass.items() if m >= least}
    if s.top_p < 1:
        total, seen, least = math.fsum(mass.values()), 0.0, 0.0
        for m in sorted(mass.values(), reverse=True):
            seen, least = seen + m, m
            if seen >= s.top_p * total:
                break
        mass = {v: m for v, m in mass.items() if m >= least}
    total = math.fsum(mass.values())
    return {v: m / total for v, m in mass.items()}


def verify_row(**changes: Any) -> VerifyRow:
    return VerifyRow(
        sampling=sampling(**changes),
        ids=PROMPT + OUTPUT,
        num_prompt=len(PROMPT),
        draft_ids=DRAFTS,
        q=None,
    )


def logits_for(vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.as_tensor(rng.normal(size=(len(DRAFTS) + 1, vocab_size)) * spread)


BIAS = {
    "bias_ids": np.array([5, 0, 9], np.int32),
    "bias_values": np.array([2.5, -100.0, 1.0], np.float32),
}
SHAPES: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 400},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1e-4, "top_p": 0.95},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 300, "top_p": 0.99, "min_p": 1e-6},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "presence_penalty": -0.5},
    BIAS,
    {**BIAS, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "top_k": 9, "top_p": 0.9},
]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize(("vocab_size", "spread"), [(13, 2.0), (1500, 3.0), (1500, 0.3)])
def test_law_equals_reference(
    changes: dict[str, Any], temperature: float, vocab_size: int, spread: float
) -> None:
    row = verify_row(temperature=temperature, **changes)
    logits = logits_for(vocab_size, spread)
    law = process(logits, [row])
    for j in range(row.num_laws):
        wanted = reference(logits[j].tolist(), row.sampling, PROMPT, OUTPUT + DRAFTS[:j])
        if temperature == 0:
            assert {int(argmax(law)[j])} == wanted.keys()
            continue
        probs = law[j].softmax(0)
        assert set(probs.nonzero()[:, 0].tolist()) == wanted.keys()
        for token, probability in wanted.items():
            assert float(probs[token]) == pytest.approx(probability, rel=1e-9)


def test_mixed_batch_equals_single_rows() -> None:
    rows = [verify_row(temperature=0.3 + 0.2 * n, **changes) for n, changes in enumerate(SHAPES)]
    rows.append(verify_row(temperature=0.0, **BIAS))
    logits = torch.cat([logits_for(1500, 2.0, seed=n) for n in range(len(rows))])
    batch = process(logits, rows).split([row.num_laws for row in rows])
    for n, row in enumerate(rows):
        assert torch.equal(batch[n], process(logits_for(1500, 2.0, seed=n), [row]))


def test_argument_is_never_written_to() -> None:
    logits = logits_for(50, 2.0)
    before = logits.clone()
    process(logits, [verify_row(temperature=0.5, top_k=3, repetition_penalty=1.5, **BIAS)])
    assert torch.equal(logits, before)


def test_nothing_asked_nothing_copied() -> None:
    logits = logits_for(50, 2.0).float()
    assert process(logits, [verify_row()]) is logits
    assert process(logits.bfloat16(), [verify_row()]).dtype == torch.float32


def test_ties_at_the_border_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    for changes in ({"top_k": 2}, {"top_p": 0.5}):
        row = VerifyRow(sampling=sampling(**changes), ids=(0,), num_prompt=1, draft_ids=(), q=None)
        assert process(logits, [row])[0].isfinite().tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("vocab_size", [5, 256, 257, 700, 4100, 16400, 20011])
def test_likeliest_holds_the_top(vocab_size: int) -> None:
    law = torch.as_tensor(np.random.default_rng(vocab_size).normal(size=(3, vocab_size)) * 2)
    law[1] = law[1].round()  # many ties
    law[2, 100:] = -math.inf
    top = likeliest(law, 256)
    for n in range(3):
        at = slice(top.bounds[n], top.bounds[n + 1])
        ids, finite = top.ids[at], int(law[n].isfinite().sum())
        assert (top.rows[at] == n).all()
        assert len(ids) >= min(256, finite)
        assert (np.diff(ids) > 0).all()
        rest = law[n].clone()
        rest[torch.as_tensor(ids)] = -math.inf
        assert rest.max() < top.log_weights[at].min()
        mass = float((rest - law[n].max()).exp().sum())
        assert mass <= top.rest_bounds[n] * (1 + 1e-12)
        assert not top.complete[n] or mass == 0
    assert top.complete[2]  # 100 finite tokens
    assert not top.complete[0] or vocab_size <= 256
    assert likeliest(law[1:2], 256).ids.tolist() == top.ids[top.rows == 1].tolist()


def test_argmax_takes_the_lowest_id() -> None:
    law = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert argmax(law.to(dtype)).tolist() == [1]

"""Acceptance: verdicts of mixed batches, cuts, refusals of bad drafts and parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster.errors import BadSamplingParameter, DSparkError, FrameError, TokenOutOfVocabulary
from cluster.noise import KEYED, Stream, gumbel
from cluster.wire import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from tests.exactness.tiny import Injected, sampling
from tests.verifier_service.test_logits import SHAPES, reference
from verifier_service import coupled
from verifier_service.acceptance import (
    RowVerdict,
    SparseQ,
    VerifyRow,
    accept,
    check_draft,
    check_sampling,
    truncate,
)


def row(drafts: tuple[int, ...] = (), q: SparseQ | None = None, **changes: Any) -> VerifyRow:
    return VerifyRow(
        sampling=sampling(**changes), ids=(4, 1, 6), num_prompt=2, draft_ids=drafts, q=q
    )


def uniforms(**values: float) -> Injected:
    """The same number wherever a stream is asked (seed 0, anchor 2)."""
    return Injected({Stream[name]: np.full((1, 99, 99), value) for name, value in values.items()})


def peaked(*ids: int, vocab_size: int = 9) -> torch.Tensor:
    logits = torch.zeros(len(ids), vocab_size)
    logits[torch.arange(len(ids)), list(ids)] = 5.0
    return logits


def test_greedy_accepts_the_matching_prefix() -> None:
    logits = peaked(3, 7, 2, 8)
    for drafts, emitted in {
        (3, 7, 2): (3, 7, 2, 8),
        (3, 5, 2): (3, 7),
        (1, 7, 2): (3,),
    }.items():
        (verdict,) = accept(logits, [row(drafts, temperature=0.0)])
        assert verdict.token_ids == emitted
        assert verdict.num_accepted == len(emitted) - 1


def test_greedy_tie_takes_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0]])
    assert accept(logits, [row(temperature=0.0)])[0].token_ids == (1,)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("changes", SHAPES)
def test_tokens_follow_the_reference_law(
    changes: dict[str, Any], temperature: float, mode: str
) -> None:
    """The bonus token, from the same keyed numbers, by the slow law of test_logits."""
    logits = torch.as_tensor(np.random.default_rng(1).normal(size=(40, 13)) * 2)
    rows = [row(temperature=temperature, mode=mode, seed=n, **changes) for n in range(40)]
    for n, verdict in enumerate(accept(logits, rows)):
        law = reference(logits[n].tolist(), rows[n].sampling, (4, 1), (6,))
        ids, probs = np.array(sorted(law)), np.array([law[v] for v in sorted(law)])
        seed = np.array([n], np.uint64)
        if mode == "coupled" or temperature == 0:
            noise = gumbel(KEYED.uniform(Stream.GUMBEL, seed, 3, ids))
            wanted = ids[(np.log(probs) + noise).argmax()]
        else:
            bonus = KEYED.uniform(Stream.BONUS, seed, 2, 1)
            wanted = ids[np.searchsorted(probs.cumsum() / probs.sum(), bonus[0])]
        assert verdict.token_ids == (int(wanted),)


def test_mixed_batch_equals_single_rows() -> None:
    rng = np.random.default_rng(2)
    q = SparseQ(
        ids=np.array([[5, 1], [2, 7]], np.int32), probs=np.array([[0.5, 0.5]] * 2, np.float32)
    )
    rows = [
        row((5, 2), temperature=0.0),
        row((5, 2), q, mode="rejection", seed=5),
        row((), seed=6, temperature=0.7),
        row((1, 2, 3), mode="rejection", seed=7, top_p=0.8),
        row((8,), temperature=0.0, repetition_penalty=2.0, logprobs=True),
        row((3, 3), seed=9, presence_penalty=1.0, logprobs=True),
    ] * 3
    logits = torch.as_tensor(rng.normal(size=(sum(r.num_laws for r in rows), 9)))
    verdicts = accept(logits, rows)
    start = 0
    for verdict, one in zip(verdicts, rows, strict=True):
        assert accept(logits[start : start + one.num_laws], [one]) == [verdict]
        start += one.num_laws
    assert accept(logits[:0], []) == []


def test_acceptance_ratio_is_strict_at_both_ends() -> None:
    """p = 0 is a refusal whatever the uniform; p >= q survives whatever the uniform."""
    logits = torch.tensor([[0.0, -math.inf, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    q = SparseQ(ids=np.array([[1, 0]], np.int32), probs=np.array([[0.5, 0.5]], np.float32))
    low = uniforms(ACCEPT=2.0**-53, RESIDUAL=0.5, BONUS=0.5)
    high = uniforms(ACCEPT=1 - 2.0**-53, RESIDUAL=0.5, BONUS=0.5)
    (refused,) = accept(logits, [row((1,), q, mode="rejection")], randomness=low)
    assert (refused.num_accepted, refused.token_ids) == (0, (2,))
    (kept,) = accept(logits, [row((0,), q, mode="rejection")], randomness=high)
    assert kept.token_ids[0] == 0
    assert kept.num_accepted == 1


def test_residual_leaves_out_what_q_overcharged() -> None:
    """p = (.5, .3, .2), q = (.8, .2, 0): the residual is (0, 1/3, 2/3); absent from q means 0."""
    logits = torch.tensor([[0.5, 0.3, 0.2]] * 2, dtype=torch.float64).log()
    q = SparseQ(ids=np.array([[0, 1]], np.int32), probs=np.array([[0.8, 0.2]], np.float32))
    for uniform, token in ((1e-9, 1), (0.33, 1), (0.34, 2), (1 - 1e-9, 2)):
        randomness = uniforms(ACCEPT=0.9, RESIDUAL=uniform, BONUS=0.5)
        (verdict,) = accept(logits, [row((0,), q, mode="rejection")], randomness=randomness)
        assert verdict.token_ids == (token,)


def test_empty_residual_falls_back_to_p() -> None:
    """fp32 p may sum to a little less than one: q = p / sum p exceeds it everywhere, and a refusal
    (of probability 1e-8) leaves nothing to draw from but p."""
    candidates = (torch.randn(2, 3, generator=torch.manual_seed(n)) for n in range(100))
    logits = next(c for c in candidates if float(c.softmax(1)[0].double().sum()) < 1)
    p = logits.softmax(1)[0]
    q = SparseQ(ids=np.arange(3, dtype=np.int32)[None], probs=p.numpy()[None])
    for uniform, token in ((1e-9, 0), (float(p[0] + p[1] / 2), 1), (1 - 1e-9, 2)):
        randomness = uniforms(ACCEPT=1 - 2.0**-53, RESIDUAL=uniform, BONUS=0.5)
        (verdict,) = accept(logits, [row((0,), q, mode="rejection")], randomness=randomness)
        assert verdict.token_ids == (token,)


def test_coupled_rest_category_is_exactly_p() -> None:
    """A law so flat that tokens without noise of their own win often: still p (chi-square)."""
    num, vocab_size, num_bins = 12_000, 1500, 50
    law = torch.as_tensor(np.random.default_rng(3).normal(size=vocab_size) * 0.7)
    p = law.softmax(0).numpy()
    taken = coupled.likeliest(law[None], coupled.NUM_CANDIDATES).ids
    assert 0.3 < 1 - p[taken].sum() < 0.7, "one side was hardly used: nothing was tested"
    seeds, positions = np.arange(num, dtype=np.uint64), np.full(num, 5)
    chosen = np.concatenate(
        [
            coupled.choose(law.expand(2000, -1), seeds[at], positions[at], KEYED)
            for at in np.split(np.arange(num), 6)
        ]
    )
    bins = np.arange(vocab_size) % num_bins
    counts = np.bincount(bins[chosen], minlength=num_bins)
    assert chisquare(counts, num * np.bincount(bins, p)).pvalue > 1e-3
    singled, share = np.isin(chosen, taken).sum(), p[taken].sum()
    assert chisquare([singled, num - singled], [num * share, num * (1 - share)]).pvalue > 1e-3


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"mode": "rejection"}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error(changes: dict[str, Any], bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 3] = bad
    with pytest.raises(DSparkError, match="not finite"):
        accept(logits, [row((), **changes) for _ in range(3)])


def test_logprobs_are_the_models_own() -> None:
    """Raw log-softmax, whatever temperature, filter or penalty shaped the draw."""
    logits = torch.as_tensor(np.random.default_rng(4).normal(size=(3, 9)))
    raw = logits.log_softmax(1)
    asked = row((5, 1), temperature=0.4, top_k=2, presence_penalty=2.0, logprobs=True)
    (verdict,) = accept(logits, [asked])
    for j, (token, logprob) in enumerate(zip(verdict.token_ids, verdict.logprobs, strict=True)):
        assert logprob == pytest.approx(float(raw[j, token]))
    (silent,) = accept(logits, [row((5, 1), temperature=0.4)])
    assert set(silent.logprobs) == {0.0}
    assert len(silent.logprobs) == len(silent.token_ids)


@pytest.mark.parametrize(
    ("stop_ids", "remaining", "kept", "accepted", "finish"),
    [
        ({9}, 10, (4, 5, 6, 7), 3, FINISH_NONE),
        ({5}, 10, (4, 5), 2, FINISH_STOP),
        ({7}, 10, (4, 5, 6, 7), 3, FINISH_STOP),
        ({4, 7}, 10, (4,), 1, FINISH_STOP),
        ({9}, 4, (4, 5, 6, 7), 3, FINISH_LENGTH),
        ({9}, 2, (4, 5), 2, FINISH_LENGTH),
        ({5}, 2, (4, 5), 2, FINISH_STOP),
        ({6}, 2, (4, 5), 2, FINISH_LENGTH),
    ],
)
def test_truncate(
    stop_ids: set[int], remaining: int, kept: tuple[int, ...], accepted: int, finish: int
) -> None:
    verdict = RowVerdict(num_accepted=3, token_ids=(4, 5, 6, 7), logprobs=(-0.4, -0.5, -0.6, -0.7))
    cut, code = truncate(verdict, stop_ids=frozenset(stop_ids), remaining=remaining)
    assert (cut.token_ids, cut.num_accepted, code) == (kept, accepted, finish)
    assert cut.logprobs == verdict.logprobs[: len(kept)]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.nan}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"mode": "typical"}, "mode"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_bad_parameter_is_named(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(BadSamplingParameter, match=name) as caught:
        check_sampling(sampling(**changes), 100)
    assert caught.value.hint


def test_bad_bias() -> None:
    def biased(ids: list[int], values: list[float]) -> None:
        check_sampling(
            sampling(bias_ids=np.array(ids, np.int32), bias_values=np.array(values, np.float32)),
            100,
        )

    biased([0, 99], [-100.0, 100.0])
    for outside in (-1, 100):
        with pytest.raises(TokenOutOfVocabulary, match=str(outside)):
            biased([outside], [1.0])
    for ids, values in (([1, 1], [1.0, 2.0]), ([1], []), ([1], [101.0]), ([1], [math.nan])):
        with pytest.raises(BadSamplingParameter, match="logit_bias"):
            biased(ids, values)


GOOD_Q = SparseQ(
    ids=np.array([[3, 5], [5, 9]], np.int32),
    probs=np.array([[0.25, 0.75], [1.0, 0.0]], np.float32),
)


@pytest.mark.parametrize(
    ("drafts", "ids", "probs", "message"),
    [
        ((3, 10), None, None, "vocabulary"),
        ((-1, 5), None, None, "vocabulary"),
        ((3,), None, None, "draft tokens"),
        ((3, 9), None, None, "no mass"),
        ((3, 4), None, None, "no mass"),
        ((3, 5), [[3, 3], [5, 9]], None, "repeats"),
        ((3, 5), [[3, 10], [5, 9]], None, "vocabulary"),
        ((3, 5), None, [[0.25, 0.7], [1.0, 0.0]], "distribution"),
        ((3, 5), None, [[1.25, -0.25], [1.0, 0.0]], "distribution"),
        ((3, 5), None, [[np.nan, 1.0], [1.0, 0.0]], "distribution"),
    ],
)
def test_bad_draft_is_a_frame_error(
    drafts: tuple[int, ...], ids: Any, probs: Any, message: str
) -> None:
    q = dataclasses.replace(
        GOOD_Q,
        ids=GOOD_Q.ids if ids is None else np.array(ids, np.int32),
        probs=GOOD_Q.probs if probs is None else np.array(probs, np.float32),
    )
    with pytest.raises(FrameError, match=message):
        check_draft(drafts, q, 10)


def test_good_draft_passes() -> None:
    check_draft((3, 5), GOOD_Q, 10)
    check_draft((3, 5), None, 10)
    check_draft((), None, 10)
    check_draft((), SparseQ(ids=GOOD_Q.ids[:0], probs=GOOD_Q.probs[:0]), 10)

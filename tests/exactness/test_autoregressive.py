"""Served tokens follow the target's law, whatever an autoregressive drafter proposed.

The drafts are the production engine's, the judge is the production acceptance; the target is a
table. Each mode has a twin with a target off by 2% of its mass that must fail.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from cluster import digest
from cluster.wire import Commit, Open
from drafter_service.drafter import Work
from drafter_service.sampling import Block
from tests.autoregressive import make_engine, make_model, make_spec
from tests.drafters import LANE
from tests.frames import make_sampling
from verifier_service.acceptance import SparseQ, VerifyRow, accept

NUM_TOKENS = 5
NUM_ROUNDS = 12_000
BATCH = 500
CONTEXT = [0, 3, 1, 4, 2]


def target() -> np.ndarray:
    """p[last id, next id]."""
    return np.random.default_rng(5).dirichlet(np.ones(NUM_TOKENS), size=NUM_TOKENS)


def draft(mode: str, seeds: range) -> tuple[Block, list[dict[str, object]]]:
    """One block behind the same context for each seed, all drawn from the drafter's own law."""
    model = make_model(make_spec(vocab_size=5, draft_vocab_size=5, gamma=2), seed=7)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.2)  # a law with some entropy
    engine = make_engine(model, max_sessions=len(seeds), max_session_tokens=64 * len(seeds))
    rows = np.random.default_rng(1).standard_normal((len(CONTEXT) - 1, 32)).astype(np.float32)
    work = []
    settings: list[dict[str, object]] = []
    for rid, seed in enumerate(seeds):
        settings.append({"temperature": 1.0, "mode": mode, "seed": seed})
        opened = Open(
            lane_id=LANE,
            rid=rid,
            epoch=0,
            first_id=CONTEXT[0],
            sampling=make_sampling(**settings[-1]),
        )
        commit = Commit(
            lane_id=LANE,
            rid=np.array([rid], np.int64),
            epoch=np.array([0], np.int32),
            first_position=np.array([0], np.int32),
            num_rows=np.array([len(rows)], np.int32),
            digest=np.array([digest.of(CONTEXT)], np.uint64),
            want_draft=np.array([1], np.uint8),
            ids=np.array(CONTEXT[1:], np.int32),
            features=rows,
        )
        work += [Work(owner=1, frame=opened), Work(owner=1, frame=commit)]
    outcome = engine.run(work, 0.0)
    assert outcome.block is not None
    assert [d.rid for d in outcome.drafted] == list(range(len(seeds)))
    return outcome.block, settings


def emitted(mode: str, p: np.ndarray) -> list[tuple[int, ...]]:
    """Tokens of `NUM_ROUNDS` rounds over target ``p``."""
    tokens: list[tuple[int, ...]] = []
    for first in range(0, NUM_ROUNDS, BATCH):
        block, settings = draft(mode, range(first, first + BATCH))
        verify, last = [], []
        for row, setting in enumerate(settings):
            drafts = tuple(block.ids[row].tolist())
            q = None
            if mode == "rejection":
                q = SparseQ(ids=block.q_ids[row], probs=block.q_probs[row])
            verify.append(
                VerifyRow(
                    sampling=make_sampling(**setting),
                    ids=tuple(CONTEXT),
                    num_prompt=1,
                    draft_ids=drafts,
                    q=q,
                )
            )
            last += [CONTEXT[-1], *drafts]
        tokens += [v.token_ids for v in accept(torch.as_tensor(np.log(p[last])), verify)]
    return tokens


def p_value(tokens: list[tuple[int, ...]], p: np.ndarray) -> float:
    """Least of two: first tokens, and second tokens given the first, against ``p``."""
    firsts = np.bincount([ids[0] for ids in tokens], minlength=NUM_TOKENS)
    values = [chisquare(firsts, firsts.sum() * p[CONTEXT[-1]]).pvalue]
    pairs = np.array([ids[:2] for ids in tokens if len(ids) > 1])
    for x in range(NUM_TOKENS):
        seconds = np.bincount(pairs[pairs[:, 0] == x, 1], minlength=NUM_TOKENS)
        if seconds.sum() * p[x].min() >= 5:
            values.append(chisquare(seconds, seconds.sum() * p[x]).pvalue)
    assert len(values) >= 3, "too few rounds went on past their first token"
    return float(min(values) * len(values))


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_drafts_change_nothing_but_speed(mode: str) -> None:
    tokens = emitted(mode, target())
    assert p_value(tokens, target()) > 1e-3
    assert max(map(len, tokens)) == 3


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_a_bias_of_two_percent_is_caught(mode: str) -> None:
    biased = 0.98 * target()
    biased[np.arange(NUM_TOKENS), target().argmin(1)] += 0.02
    assert p_value(emitted(mode, biased), target()) < 1e-4


def test_shipped_q_covers_what_was_drawn_and_is_not_one_hot() -> None:
    block, _ = draft("rejection", range(50))
    assert block.q_probs.shape == (50, 2, 5)
    assert (block.q_probs.max(-1) < 0.95).all()
    assert len(set(map(tuple, block.ids.tolist()))) > 5

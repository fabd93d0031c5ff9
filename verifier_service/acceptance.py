"""Acceptance: which drafts survive and what is emitted (DESIGN 3.11 and 5).

One call serves a whole verify step, requests of all kinds mixed:

* greedy (temperature 0): the emitted tokens are the argmaxes, lowest id on a tie;
* ``coupled``: the argmaxes of perturbed logits (`verifier_service.coupled`);
* ``rejection``: speculative sampling (`verifier_service.rejection`).

In the first two a draft survives iff it equals the token that would have been chosen anyway. A
draft that the target's law rules out is a refusal like any other, never an error.

Shape legend: T flat rows of all requests (draft length + 1 each, requests in order), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.noise import KEYED, Randomness
from cluster.sampling import check_sampling
from cluster.sparse import SparseQ, check_draft
from cluster.wire import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from verifier_service import coupled, rejection
from verifier_service.likeliest import argmax
from verifier_service.logits import VerifyRow, process, reshapes

__all__ = [
    "RowVerdict",
    "SparseQ",
    "VerifyRow",
    "accept",
    "check_draft",
    "check_sampling",
    "truncate",
]


@dataclass(frozen=True, kw_only=True)
class RowVerdict:
    """What a row emits: the accepted drafts and one more token."""

    num_accepted: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token under the raw logits: the model's own log-softmax, before bias, penalties,
    temperature and filters. Zeros for requests that did not ask."""


def accept(
    logits_TV: Tensor, rows: Sequence[VerifyRow], *, randomness: Randomness = KEYED
) -> list[RowVerdict]:
    """Judge all rows of a verify step.

    Args:
        logits_TV: raw target logits, any float dtype and device; flat row j of a request is the
            law of the token after its anchor and its first j drafts. Not written to.
        rows: parameters and drafts that have passed `check_sampling` and `check_draft`.
        randomness: where uniforms come from.

    Raises:
        DSparkError: logits that are NaN or infinite where a token was to be drawn.
    """
    starts = np.concatenate([[0], np.cumsum([row.num_laws for row in rows])]).astype(np.int64)
    assert logits_TV.shape[0] == starts[-1], (logits_TV.shape, starts[-1])
    tokens_T = np.empty(starts[-1], np.int64)
    accepted = np.full(len(rows), -1)
    for judge, members in _by_kind(rows).items():
        flat = _flat(starts, members)
        subset = [rows[i] for i in members]
        logits = logits_TV
        if len(flat) < len(logits_TV):
            logits = logits_TV[torch.as_tensor(flat, device=logits_TV.device)]
        if judge == "rejection":
            counts, finals = rejection.verify(process(logits, subset), subset, randomness)
            for i, count, final in zip(members, counts, finals, strict=True):
                accepted[i] = count
                tokens_T[starts[i] : starts[i] + count] = rows[i].draft_ids[:count]
                tokens_T[starts[i] + count] = final
        else:
            tokens_T[flat] = _choose(judge, logits, subset, randomness)
    tokens = tokens_T.tolist()
    matched = [
        int(count) if count >= 0 else _matching(row.draft_ids, tokens, start)
        for row, count, start in zip(rows, accepted, starts.tolist(), strict=False)
    ]
    logprobs = _logprobs(logits_TV, rows, matched, starts, tokens_T)
    return [
        RowVerdict(
            num_accepted=count,
            token_ids=tuple(tokens[start : start + count + 1]),
            logprobs=logprobs.get(i, (0.0,) * (count + 1)),
        )
        for i, (count, start) in enumerate(zip(matched, starts.tolist(), strict=False))
    ]


def truncate(
    verdict: RowVerdict, *, stop_ids: frozenset[int], remaining: int
) -> tuple[RowVerdict, int]:
    """Cut a verdict at the first stop id (kept, as its last token) or at ``remaining`` tokens.

    Returns:
        The verdict and its finish code (`cluster.wire.FINISH_REASONS`). A stop id on the last
        allowed place is a stop.
    """
    assert remaining >= 1, remaining
    finish = FINISH_NONE
    keep = len(verdict.token_ids)
    if keep >= remaining:
        keep, finish = remaining, FINISH_LENGTH
    for place, token in enumerate(verdict.token_ids[:keep]):
        if token in stop_ids:
            keep, finish = place + 1, FINISH_STOP
            break
    return replace(
        verdict,
        num_accepted=min(verdict.num_accepted, keep),
        token_ids=verdict.token_ids[:keep],
        logprobs=verdict.logprobs[:keep],
    ), finish


def _by_kind(rows: Sequence[VerifyRow]) -> dict[str, list[int]]:
    """Row numbers by how they are judged."""
    kinds: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if not row.greedy:
            kind = row.sampling.mode
        else:
            kind = "reshaped" if reshapes(row.sampling) else "greedy"
        kinds.setdefault(kind, []).append(i)
    return kinds


def _flat(starts: NDArray[np.int64], members: list[int]) -> NDArray[np.int64]:
    """Flat row numbers of these requests, in order."""
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in members])


def _choose(
    kind: str, logits: Tensor, rows: Sequence[VerifyRow], randomness: Randomness
) -> NDArray[np.int64]:
    """The token that each flat row would emit, for the kinds where no draft can change it."""
    if kind == "greedy":  # the raw logits as they are: no copy, no softmax
        return argmax(logits)
    law = process(logits, rows)
    if kind == "reshaped":
        return argmax(law)
    assert kind == "coupled", kind
    num = [row.num_laws for row in rows]
    seeds = np.repeat(np.array([row.sampling.seed for row in rows], np.uint64), num)
    positions = np.concatenate([len(row.ids) + np.arange(row.num_laws) for row in rows])
    return coupled.choose(law, seeds, positions, randomness)


def _matching(draft_ids: tuple[int, ...], tokens: list[int], start: int) -> int:
    """Leading drafts that equal the tokens chosen without them."""
    for count, draft in enumerate(draft_ids):
        if draft != tokens[start + count]:
            return count
    return len(draft_ids)


def _logprobs(
    logits_TV: Tensor,
    rows: Sequence[VerifyRow],
    matched: Sequence[int],
    starts: NDArray[np.int64],
    tokens_T: NDArray[np.int64],
) -> dict[int, tuple[float, ...]]:
    """Raw log-softmax at the emitted tokens of the requests that asked."""
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs]
    if not asked:
        return {}
    flat = np.concatenate([np.arange(starts[i], starts[i] + matched[i] + 1) for i in asked])
    at, ids = (torch.as_tensor(index, device=logits_TV.device) for index in (flat, tokens_T[flat]))
    raw = logits_TV[at]
    raw = raw if raw.dtype == torch.float64 else raw.float()
    values = raw.log_softmax(dim=1).gather(1, ids[:, None])[:, 0].tolist()
    found, place = {}, 0
    for i in asked:
        found[i] = tuple(values[place : place + matched[i] + 1])
        place += matched[i] + 1
    return found

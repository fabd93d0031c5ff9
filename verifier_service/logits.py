"""From raw logits to the law that tokens are drawn from: the request's sampling parameters.

Order: logit bias; repetition, presence, frequency penalty; temperature; min-p, top-k, top-p (top-p
on what the other two leave, renormalised). Repetition looks at prompt and output, presence and
frequency at output only; for later rows of a verify block their state is advanced over the draft
prefix, since that row only counts if the whole prefix survived. Filters are thresholds: tokens
tied with the last one kept are kept too, so that no sort order decides.

Shape legend: N flat verify rows (each request has draft length + 1 of them), M rows of one
request, V vocabulary, U distinct tokens that a penalty touches, C tokens looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.sparse import SparseQ
from cluster.wire import Sampling
from verifier_service.likeliest import likeliest

_LOOKED_AT: Final = 256
"""Filters look at this many likeliest tokens (and some more) before they sort a whole row."""


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """One request's row of a verify step: what its laws and its random numbers depend on."""

    sampling: Sampling
    ids: Sequence[int]
    """All committed ids; the last one is the anchor."""
    num_prompt: int
    draft_ids: tuple[int, ...]
    q: SparseQ | None
    """The law that the draft was drawn from; None for a deterministic (one-hot) draft."""

    @property
    def num_laws(self) -> int:
        """Flat rows of logits that belong to this request."""
        return len(self.draft_ids) + 1

    @property
    def greedy(self) -> bool:
        """Temperature 0, in either mode."""
        return self.sampling.temperature == 0


def reshapes(sampling: Sampling) -> bool:
    """Do these parameters change the logits before temperature (so that argmax may move)?"""
    return (
        len(sampling.bias_ids) > 0
        or sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )


def process(logits_NV: Tensor, rows: Sequence[VerifyRow]) -> Tensor:
    """Unnormalised log laws [N, V] of these rows, at least fp32; -inf is out.

    The argument is never written to; it is returned itself when nothing is asked for. A greedy
    request gets bias and penalties only: the rest does not move its argmax.
    """
    law_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if any(reshapes(row.sampling) for row in rows):
        law_NV = law_NV.clone() if law_NV is logits_NV else law_NV
        start = 0
        for row in rows:
            _reshape(law_NV[start : start + row.num_laws], row)
            start += row.num_laws
    temperatures_N = _per_law(rows, lambda s: s.temperature or 1.0)
    if (temperatures_N != 1).any():
        law_NV = law_NV / torch.as_tensor(temperatures_N).to(law_NV)[:, None]
    return _filter(law_NV, rows)


def _reshape(law_MV: Tensor, row: VerifyRow) -> None:
    """Bias and penalties of one request, in place."""
    sampling = row.sampling
    if len(sampling.bias_ids):
        bias_ids = torch.as_tensor(sampling.bias_ids.astype(np.int64), device=law_MV.device)
        law_MV[:, bias_ids] += torch.as_tensor(sampling.bias_values.copy()).to(law_MV)
    repetition, presence = sampling.repetition_penalty, sampling.presence_penalty
    frequency = sampling.frequency_penalty
    if repetition == 1 and presence == 0 and frequency == 0:
        return
    tokens_U, seen_MU, counts_MU = _history(row)
    touched = torch.as_tensor(tokens_U, device=law_MV.device)
    values_MU = law_MV[:, touched]
    repeated_MU = torch.where(values_MU > 0, values_MU / repetition, values_MU * repetition)
    seen = torch.as_tensor(seen_MU, device=law_MV.device)
    charge_MU = torch.as_tensor(frequency * counts_MU + presence * (counts_MU > 0))
    law_MV[:, touched] = torch.where(seen, repeated_MU, values_MU) - charge_MU.to(law_MV)


def _history(row: VerifyRow) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Tokens [U]; was each seen before law m [M, U]; how often in the output before it [M, U]."""
    num_ids, num_draft = len(row.ids), len(row.draft_ids)
    history = np.concatenate([np.asarray(row.ids, np.int64), np.asarray(row.draft_ids, np.int64)])
    tokens_U, place = np.unique(history, return_inverse=True)
    drafted_MU = np.zeros((num_draft + 1, len(tokens_U)), np.int64)
    drafted_MU[np.arange(1, num_draft + 1), place[num_ids:]] = 1
    drafted_MU = drafted_MU.cumsum(axis=0)
    committed_U = np.bincount(place[:num_ids], minlength=len(tokens_U))
    output_U = np.bincount(place[row.num_prompt : num_ids], minlength=len(tokens_U))
    return tokens_U, committed_U + drafted_MU > 0, output_U + drafted_MU


def _filter(law_NV: Tensor, rows: Sequence[VerifyRow]) -> Tensor:
    """Min-p, top-k and top-p as one threshold per row."""
    asks_N = _per_law(rows, lambda s: s.temperature > 0 and _filters(s, law_NV.shape[1])) > 0
    if not asks_N.any():
        return law_NV
    row_N = np.repeat(np.arange(len(rows)), [row.num_laws for row in rows])
    asking = np.flatnonzero(asks_N)
    subset = law_NV[torch.as_tensor(asking, device=law_NV.device)]
    top = likeliest(subset, _LOOKED_AT)
    total = 1 / subset.softmax(dim=1).amax(dim=1).double().cpu().numpy()  # mass over exp(peak)
    least_N = np.full(len(law_NV), -math.inf)
    for i, n in enumerate(asking):
        sampling = rows[row_N[n]].sampling
        ordered = np.sort(top.log_weights[top.bounds[i] : top.bounds[i + 1]])[::-1]
        least = _threshold(ordered, sampling, total[i], complete=bool(top.complete[i]))
        if least is None:  # a flat row: look at all of it
            ordered = np.sort(subset[i].cpu().numpy())[::-1].astype(np.float64)
            least = _threshold(ordered, sampling, total[i], complete=True)
        least_N[n] = least
    return law_NV.masked_fill(law_NV < torch.as_tensor(least_N).to(law_NV)[:, None], -math.inf)


def _filters(sampling: Sampling, vocab_size: int) -> bool:
    return sampling.min_p > 0 or 0 < sampling.top_k < vocab_size or sampling.top_p < 1


def _threshold(
    ordered_C: NDArray[np.float64], sampling: Sampling, total: float, *, complete: bool
) -> float | None:
    """Log weight of the last token kept, -inf for all.

    Args:
        ordered_C: falling log weights of the likeliest tokens.
        total: mass of the whole row over exp(its peak).
        complete: nothing of the row is missing from ``ordered_C``.

    Returns:
        None if the tokens looked at do not tell.
    """
    peak, least = ordered_C[0], -math.inf
    if sampling.min_p > 0:
        least = peak + math.log(sampling.min_p)
    if 0 < sampling.top_k <= len(ordered_C):
        least = max(least, ordered_C[sampling.top_k - 1])
    elif sampling.top_k and not complete:
        return None
    if sampling.top_p < 1:
        kept_C = ordered_C[ordered_C >= least]
        mass_C = np.exp(kept_C - peak).cumsum()
        if complete or len(kept_C) < len(ordered_C):
            total = mass_C[-1]
        elif least > -math.inf:
            return None  # tokens not looked at may pass the other filters too
        place = int(np.searchsorted(mass_C, sampling.top_p * total))
        if place == len(kept_C):
            return None
        least = max(least, kept_C[place])
    return least


def _per_law(rows: Sequence[VerifyRow], value: Callable[[Sampling], float]) -> NDArray[np.float64]:
    """One number per request, repeated over its flat rows [N]."""
    return np.repeat(
        np.array([value(row.sampling) for row in rows], np.float64),
        [row.num_laws for row in rows],
    )

"""Rejection mode: speculative sampling with the draft's own law q (paper section 2.1, DESIGN 5).

Draft k survives with probability min(1, p(x_k) / q(x_k)); in place of the first one that does
not, a token is drawn from norm(max(p - q, 0)); after a full prefix the bonus comes from p.

Shape legend: R requests, N flat rows, V vocabulary, T draft tokens of all requests, K width of q.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.noise import Randomness, Stream
from cluster.sparse import SparseQ
from verifier_service.coupled import draw
from verifier_service.likeliest import require_finite
from verifier_service.logits import VerifyRow


def verify(
    law_NV: Tensor, rows: Sequence[VerifyRow], randomness: Randomness
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Accepted counts [R] and the token after the accepted prefix [R].

    Args:
        law_NV: unnormalised log laws of the target, ``len(draft_ids) + 1`` flat rows per request.
    """
    num_draft_R = np.array([len(row.draft_ids) for row in rows])
    start_R = np.concatenate([[0], np.cumsum(num_draft_R + 1)[:-1]])
    seeds_R = np.array([row.sampling.seed for row in rows], np.uint64)
    anchors_R = np.array([len(row.ids) - 1 for row in rows])
    probs_NV = law_NV.softmax(dim=1)
    require_finite(probs_NV[:, 0].double().cpu().numpy())  # one bad entry spoils its whole row

    row_T = np.repeat(np.arange(len(rows)), num_draft_R)
    step_T = np.arange(len(row_T)) - np.repeat(np.cumsum(num_draft_R) - num_draft_R, num_draft_R)
    ids_T = np.array([token for row in rows for token in row.draft_ids], np.int64)
    p_T = _at(probs_NV, start_R[row_T] + step_T, ids_T)
    q_T = np.concatenate([_drafted(row) for row in rows]) if len(ids_T) else np.empty(0)
    uniform_T = randomness.uniform(Stream.ACCEPT, seeds_R[row_T], anchors_R[row_T], step_T + 1)
    survives_T = uniform_T * q_T < p_T  # p = 0 never does, p >= q always does
    accepted_R = _leading(survives_T, num_draft_R)

    final = torch.as_tensor(start_R + accepted_R, device=law_NV.device)
    weight_RV = probs_NV[final].double()
    refused_R = accepted_R < num_draft_R
    for r in np.flatnonzero(refused_R).tolist():
        _subtract(weight_RV[r], rows[r], int(accepted_R[r]))
    uniform_R = np.empty(len(rows))
    for stream, at in ((Stream.RESIDUAL, refused_R), (Stream.BONUS, ~refused_R)):
        uniform_R[at] = randomness.uniform(stream, seeds_R[at], anchors_R[at], accepted_R[at] + 1)
    return accepted_R, draw(weight_RV, uniform_R)


def _at(
    probs_NV: Tensor, rows_T: NDArray[np.int64], ids_T: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Target probabilities [T] of single tokens, fp64."""
    rows, ids = (torch.as_tensor(index, device=probs_NV.device) for index in (rows_T, ids_T))
    return np.asarray(probs_NV[rows, ids].double().cpu().numpy())


def _normalised(q: SparseQ) -> NDArray[np.float64]:
    """[n, K] in fp64, rows summing to one as the drafter's draw has them."""
    probs = q.probs.astype(np.float64)
    normalised: NDArray[np.float64] = probs / probs.sum(axis=1, keepdims=True)
    return normalised


def _drafted(row: VerifyRow) -> NDArray[np.float64]:
    """q(x_k) of each draft token [n]; 1 for a deterministic draft."""
    if row.q is None or not row.draft_ids:
        return np.ones(len(row.draft_ids))
    hit = row.q.ids == np.array(row.draft_ids)[:, None]
    probs: NDArray[np.float64] = (_normalised(row.q) * hit).sum(axis=1)
    return probs


def _leading(survives_T: NDArray[np.bool_], num_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many in a row survive from the start, per request."""
    grid = np.zeros((len(num_R), int(num_R.max(initial=0)) + 1), np.bool_)
    grid[np.arange(grid.shape[1]) < num_R[:, None]] = survives_T
    return np.asarray(
        grid.argmin(axis=1)
    )  # the last column is False: there is always a first False


def _subtract(weight_V: Tensor, row: VerifyRow, k: int) -> None:
    """Turn p into max(p - q, 0) of the refused draft k (counted from 0), in place.

    Where nothing is left (p equals q up to rounding, and the refusal was rounding too) p stays.
    """
    if row.q is None:
        ids, probs = np.array([row.draft_ids[k]]), np.ones(1)
    else:
        ids, probs = row.q.ids[k].astype(np.int64), _normalised(row.q)[k]
    at = torch.as_tensor(ids, device=weight_V.device)
    before = weight_V[at]
    weight_V[at] = (before - torch.as_tensor(probs, device=weight_V.device)).clamp(min=0)
    if not float(weight_V.sum()) > 0:
        weight_V[at] = before

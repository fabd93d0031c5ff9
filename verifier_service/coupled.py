"""Coupled mode: a token is the argmax of perturbed logits (DESIGN 3.11).

``y = argmax_v(log p_v + G_v)`` is a draw from p when G is Gumbel noise; keyed by (seed, position,
token id) it is a function of seed and context alone. Noise for the whole vocabulary is dear, so
it is formed for the likeliest tokens; all others together are one category of location log(rest
mass) with a key of its own, and if that category wins, a keyed uniform says which of them. The
largest of independent Gumbel variables is one at the log of their summed masses, so this is p
exactly, whatever set is singled out, as long as no noise had a say in it.

Shape legend: N flat rows, V vocabulary, M candidate tokens of all rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.noise import Randomness, Stream, gumbel
from verifier_service.likeliest import likeliest

NUM_CANDIDATES: Final = 256
"""Tokens with noise of their own, at least. Part of what a seed means: with another value the
texts are others (and as exact)."""


def choose(
    law_NV: Tensor,
    seeds_N: NDArray[np.uint64],
    positions_N: NDArray[np.int64],
    randomness: Randomness,
) -> NDArray[np.int64]:
    """One token id per row, drawn from ``softmax(law)``.

    Args:
        law_NV: unnormalised log probabilities, -inf for tokens that are out.
        seeds_N: request seeds.
        positions_N: positions of the tokens being chosen.
    """
    top = likeliest(law_NV, NUM_CANDIDATES)
    row_M = top.rows
    uniform_M = randomness.uniform(Stream.GUMBEL, seeds_N[row_M], positions_N[row_M], top.ids)
    score_M = top.log_weights - top.peaks[row_M] + gumbel(uniform_M)
    best_N = np.maximum.reduceat(score_M, top.bounds[:-1])
    winners = np.flatnonzero(score_M == best_N[row_M])
    first_N = np.searchsorted(row_M[winners], np.arange(len(law_NV)))  # equal scores: lowest id
    chosen_N = top.ids[winners[first_N]]

    noise_N = gumbel(randomness.uniform(Stream.REST, seeds_N, positions_N, 0))
    with np.errstate(divide="ignore"):  # nothing left out: log 0 = -inf never wins
        near = np.flatnonzero(np.log(top.rest_bounds) + noise_N > best_N)
    for n in near:  # rows that the rest may win: only these need its mass itself
        weight_V = (law_NV[n] - law_NV[n].max()).exp_()
        taken = top.ids[top.bounds[n] : top.bounds[n + 1]]
        weight_V[torch.as_tensor(taken, device=law_NV.device)] = 0
        mass = float(weight_V.sum(dtype=torch.float64))
        if mass > 0 and np.log(mass) + noise_N[n] > best_N[n]:
            one = slice(n, n + 1)
            uniform = randomness.uniform(Stream.REST_DRAW, seeds_N[one], positions_N[one], 0)
            chosen_N[n] = draw(weight_V[None], uniform)[0]
    return chosen_N


def draw(weight_NV: Tensor, uniform_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """Inverse CDF in id order over unnormalised weights; a weight of 0 is never drawn."""
    cdf_NV = weight_NV.double().cumsum(dim=1)
    point_N = torch.as_tensor(uniform_N, device=weight_NV.device) * cdf_NV[:, -1]
    ids_N1 = torch.searchsorted(cdf_NV, point_N[:, None], right=True)
    return np.asarray(ids_N1[:, 0].cpu().numpy())

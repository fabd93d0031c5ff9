"""The estimator behind the live profile: from executed steps to tiers and costs. Pure.

An extended Kalman filter on the logarithm of the step time. Its state, all near 0 at start:

    g          log of the machine's speed of today, a random walk
    u [4]      the costs of `StepCosts`, in prior standard deviations
    d [K]      relative deviation of each tier from the table measured at start

    log T = g + log(sum_i w_i prior_i (1 + d_i) + sum_j cost_j feature_j)

u and d decay towards 0 within `_MEMORY` steps, so what is not seen any more shrinks to the prior
and uncertainty never grows past it; neighbouring tiers are correlated, so that a tier that is seen
takes its neighbours along and noise invents no stair between them.

Robust: an error counts as at most `_CLIP` of its standard deviations, whose size follows the noise
of the machine. So a freak step moves the table by a percent or two. Errors that are clipped again
and again to one side are no noise but a machine that has changed: then g, and only g, is set free.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.isotonic import isotonic
from cluster.step_costs import StepCosts
from router.step_load import StepLoad

F64 = NDArray[np.float64]

_NUM_COSTS: Final = 4
_FIRST_TIER: Final = 1 + _NUM_COSTS

_MEMORY: Final = 2000.0
"""Steps after which a tier that is not seen any more has forgotten most of what it learnt."""
_TIER_STD: Final = 0.05
"""Relative; how wrong a measured tier usually is. Small against `_SPEED_STD`: what one tier shows
is taken for the machine's speed until others show that it is not."""
_TIER_REACH: Final = 0.5
"""Distance in log(tokens) over which tiers err alike."""
_COST_STD: Final = 0.15
"""Relative; of measured costs ..."""
_UNKNOWN_SHARE: Final = 0.05
"""... and at least this share of a small step, at the features of `_USUAL`, for costs that the
start could not tell from none."""
_USUAL: Final = (8.0, 4000.0, 16000.0, 64.0)
"""Rows, context, pairs and prompt tokens of a step of everyday."""
_SPEED_STD: Final = 0.3
_SPEED_WALK: Final = 0.15
"""Standard deviation of a step's change in g, in units of the noise: what a machine shows in its
noise it also does to its speed. Following that closely costs 5% more error in steady load."""
_MAX_SPEED_STD: Final = 1.0

_CLIP: Final = 2.5
_LEAST_NOISE: Final = 0.01
_MOST_NOISE: Final = 0.5
_NOISE_GAIN: Final = 0.02
_MEAN_TO_STD: Final = 1.25
"""Standard deviation over mean absolute deviation, of normal noise."""
_TURN_GAIN: Final = 0.2
_TURNED: Final = 0.6
"""Mean clipped error, in units of the clip, past which the machine has changed."""
_SET_FREE: Final = 0.05


class StepTimeFilter:
    """Tiers, costs and speed of one verifier.

    Args:
        tokens: [K] rising batch sizes of the tiers.
        tier_s: [K] their seconds, never falling.
        costs: measured at start.
        noise: relative spread of equal steps, as measured at start.
    """

    def __init__(self, tokens: F64, tier_s: F64, costs: StepCosts, noise: float) -> None:
        self._tokens = tokens
        self._token_list: list[float] = tokens.tolist()
        self._prior_s = tier_s
        self._prior_costs = np.array(
            [costs.row_s, costs.context_s, costs.pair_s, costs.prefill_s], np.float64
        )
        self._least_costs = _least_costs(tokens, tier_s)
        share_s = _UNKNOWN_SHARE * float(tier_s[0])
        self._cost_std = np.maximum(
            _COST_STD * np.abs(self._prior_costs), share_s / np.array(_USUAL)
        )
        self._least_state = (self._least_costs - self._prior_costs) / self._cost_std
        """Of u: a cost that would be negative does not dig itself in."""
        self._noise = min(max(noise, _LEAST_NOISE), _MOST_NOISE)
        self._last_error = 0.0
        self._turn = 0.0
        """Running mean of the clipped errors, in units of the clip: -1..1."""
        size = _FIRST_TIER + len(tokens)
        self._state = np.zeros(size)
        self._covariance = _prior_covariance(tokens)
        keep = np.full(size, math.exp(-1.0 / _MEMORY))
        keep[0] = 1.0
        self._keep = keep
        self._keep_pairs = np.outer(keep, keep)
        self._return = self._covariance * (1.0 - self._keep_pairs)
        self._return[0, 0] = 0.0
        self._refresh()

    @property
    def scale(self) -> float:
        """How many times slower the machine is than at start."""
        return math.exp(float(self._state[0]))

    @property
    def noise(self) -> float:
        """Relative standard deviation of a step's time about its prediction."""
        return self._noise

    def update(self, load: StepLoad, step_s: float, *, context_term: bool) -> None:
        """Learn from one executed step."""
        features = np.array([load.num_rows, load.sum_context, load.pairs, load.num_prefill])
        if not context_term:
            features[1:3] = 0.0
        lower, weight = self._weights(load.num_tokens)
        body_s, slope = self._linear(lower, weight, features)
        self._state *= self._keep
        self._covariance *= self._keep_pairs
        self._covariance += self._return
        self._covariance[0, 0] += (_SPEED_WALK * self._noise) ** 2
        gain_D = self._covariance @ slope
        explained = float(slope @ gain_D)
        variance = explained + self._noise**2
        error = math.log(step_s / body_s) - float(self._state[0])
        # A table that is doubted may be far off, a single step must not say so.
        doubt = min(max(abs(self._turn) / _TURNED, 0.0), 1.0)
        bound = _CLIP * math.sqrt(self._noise**2 + doubt * explained)
        counted = min(max(error, -bound), bound)
        self._state += gain_D * (counted / variance)
        costs = self._state[1:_FIRST_TIER]
        np.maximum(costs, self._least_state, out=costs)
        self._covariance -= gain_D[:, None] * (gain_D / variance)
        self._watch(error, counted / bound)
        self._refresh()

    def _watch(self, error: float, clipped: float) -> None:
        """Follow the noise, and notice when it is none.

        Noise is how much errors differ from one step to the next: a bias that lasts is no noise.
        """
        mean = self._noise / _MEAN_TO_STD
        apart = abs(error - self._last_error) / math.sqrt(2)
        mean += _NOISE_GAIN * (min(apart, 4 * mean) - mean)
        self._last_error = error
        self._noise = min(max(_MEAN_TO_STD * mean, _LEAST_NOISE), _MOST_NOISE)
        self._turn += _TURN_GAIN * (clipped - self._turn)
        if abs(self._turn) > _TURNED:
            self._covariance[0, 0] += _SET_FREE**2
        self._covariance[0, 0] = min(self._covariance[0, 0], _MAX_SPEED_STD**2)

    def _weights(self, num_tokens: int) -> tuple[int, float]:
        """Between which tiers so many tokens lie: the lower one and the share of the upper."""
        tokens = self._token_list
        if num_tokens <= tokens[0] or len(tokens) == 1:
            return 0, 0.0
        upper = min(int(np.searchsorted(self._tokens, num_tokens)), len(tokens) - 1)
        low = tokens[upper - 1]
        return upper - 1, (num_tokens - low) / (tokens[upper] - low)

    def _linear(self, lower: int, weight: float, features: F64) -> tuple[float, F64]:
        """Step time without the speed, and its logarithm's derivative by the state."""
        slope = np.zeros(len(self._state))
        tier = _FIRST_TIER + lower
        last = len(self._prior_s) - 1
        if weight > 1.0:  # behind the last tier: along the line through first and last
            beyond = (weight - 1.0) * (self._tokens[last] - self._tokens[last - 1])
            share = beyond / (self._tokens[last] - self._tokens[0])
            slope[_FIRST_TIER + last] = (1.0 + share) * self._prior_s[last]
            slope[_FIRST_TIER] -= share * self._prior_s[0]
        else:
            slope[tier] = (1.0 - weight) * self._prior_s[lower]
            if weight:
                slope[tier + 1] = weight * self._prior_s[lower + 1]
        tiers_s = float(slope[_FIRST_TIER:] @ (1.0 + self._state[_FIRST_TIER:]))
        costs = self._prior_costs + self._cost_std * self._state[1:_FIRST_TIER]
        body_s = tiers_s + float(costs @ features)
        slope[1:_FIRST_TIER] = self._cost_std * features
        body_s = max(body_s, 0.05 * float(self._prior_s[0]))
        slope /= body_s
        slope[0] = 1.0
        return body_s, slope

    def _refresh(self) -> None:
        """What predictions read."""
        tiers_s = self._prior_s * np.maximum(1.0 + self._state[_FIRST_TIER:], 0.1)
        if (tiers_s[1:] < tiers_s[:-1]).any():
            tiers_s = np.array(isotonic(tiers_s.tolist()))
        costs = self._prior_costs + self._cost_std * self._state[1:_FIRST_TIER]
        costs = np.maximum(costs, self._least_costs)  # exactly, in spite of rounding
        scale = self.scale
        self.tiers_s: F64 = scale * tiers_s
        """[K] seconds of each tier today, never falling."""
        self.costs_s: list[float] = (scale * costs).tolist()
        """Today's cost of a row, a position of context, a pair and a prompt token."""


def _prior_covariance(tokens: F64) -> F64:
    size = _FIRST_TIER + len(tokens)
    covariance = np.eye(size)
    covariance[0, 0] = _SPEED_STD**2
    apart = np.abs(np.log(tokens)[:, None] - np.log(tokens))
    covariance[_FIRST_TIER:, _FIRST_TIER:] = _TIER_STD**2 * np.exp(-apart / _TIER_REACH)
    return covariance


def _least_costs(tokens: F64, tier_s: F64) -> F64:
    """No cost is negative but that of a prompt token against a verify token, and that saves no
    more than nearly all a token costs."""
    per_token_s = float((tier_s[-1] - tier_s[0]) / max(tokens[-1] - tokens[0], 1.0))
    return np.array([0.0, 0.0, 0.0, -0.9 * per_token_s])

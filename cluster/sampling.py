"""The domain of sampling parameters, checked at ingress and again at the engine."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from cluster.errors import BadSamplingParameter, TokenOutOfVocabulary
from cluster.wire import MAX_BIASES, MAX_TOP_K, Sampling

MODES: Final = ("coupled", "rejection")
REGIMES: Final = ("greedy", *MODES)
"""Rules by which drafts are accepted, which is what a confidence is about (DESIGN section 5)."""
MIN_TEMPERATURE: Final = 1e-6
"""Below it logits over temperature leave fp32; 0 itself is greedy."""
MAX_TEMPERATURE: Final = 10.0
"""Above it nothing but noise is left to accept: no drafter is judged there. Requests may be."""
MAX_LOGIT_BIAS: Final = 100.0
MAX_REPETITION_PENALTY: Final = 100.0


def regime_of(sampling: Sampling) -> str:
    """Which of `REGIMES` a request's drafts are judged in; temperature 0 is greedy in any mode."""
    return "greedy" if sampling.temperature == 0 else sampling.mode


def plain_sampling(temperature: float, *, mode: str, seed: int) -> Sampling:
    """The whole law at a temperature: no truncation, penalties or biases."""
    return Sampling(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
        seed=seed,
        mode=mode,
        logprobs=False,
    )


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Refuse parameters outside their domain, whatever else the request is.

    What passes also fits a frame: a request that could not be sent would take the step of all
    others down with it.

    Raises:
        BadSamplingParameter: names the parameter, with its domain as the hint.
        TokenOutOfVocabulary: a logit bias for an id that the model does not have.
    """
    temperature = sampling.temperature
    _require(
        temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf,
        "temperature",
        temperature,
        f"0 for greedy, or finite and at least {MIN_TEMPERATURE}",
    )
    _require(
        0 <= sampling.top_k <= MAX_TOP_K,
        "top_k",
        sampling.top_k,
        f"0 for all, or a count up to {MAX_TOP_K}",
    )
    _require(0 < sampling.top_p <= 1, "top_p", sampling.top_p, "in (0, 1]; 1 keeps everything")
    _require(0 <= sampling.min_p <= 1, "min_p", sampling.min_p, "in [0, 1]; 0 keeps everything")
    _require(
        1 / MAX_REPETITION_PENALTY <= sampling.repetition_penalty <= MAX_REPETITION_PENALTY,
        "repetition_penalty",
        sampling.repetition_penalty,
        f"in [{1 / MAX_REPETITION_PENALTY}, {MAX_REPETITION_PENALTY:g}]; 1 changes nothing",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _require(-2 <= value <= 2, name, value, "in [-2, 2]; 0 changes nothing")
    _require(sampling.mode in MODES, "mode", sampling.mode, f"one of {', '.join(MODES)}")
    _require(0 <= sampling.seed < 1 << 64, "seed", sampling.seed, "in 0..2**64-1")
    _check_bias(sampling, vocab_size)


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    ids, values = sampling.bias_ids, sampling.bias_values
    if ids.shape != values.shape or len(np.unique(ids)) != len(ids):
        raise BadSamplingParameter(
            f"logit_bias has {len(ids)} ids and {len(values)} values",
            hint="one value per id, each id once",
        )
    if len(ids) > MAX_BIASES:
        raise BadSamplingParameter(f"logit_bias has {len(ids)} ids", hint=f"at most {MAX_BIASES}")
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise TokenOutOfVocabulary(
            f"logit_bias for token id {unknown[0]}", hint=f"ids are in 0..{vocab_size - 1}"
        )
    outside = values[~(np.abs(values) <= MAX_LOGIT_BIAS)]
    if outside.size:
        raise BadSamplingParameter(
            f"logit_bias value {outside[0]}", hint=f"in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
        )


def _require(holds: bool, name: str, value: object, domain: str) -> None:
    if not holds:
        raise BadSamplingParameter(f"{name} {value!r} is out of range", hint=domain)

"""What a seed makes of transformers' laws: each token of a text held against it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from cluster.noise import KEYED
from cluster.wire import Sampling
from tests.deploy.reference import NEAR_TIE
from tests.verifier_service.conformance.targets import Target
from verifier_service.coupled import choose
from verifier_service.logits import VerifyRow, process


def near_ties(target: Target, ids: Sequence[int], num_prompt: int, sampling: Sampling) -> int:
    """Tokens of a greedy or coupled text that its law and its seed do not give, but nearly do.

    Args:
        ids: prompt and text.

    Raises:
        AssertionError: a token that they would not give if its logit were `NEAR_TIE` higher and
            the winner's as much lower.
    """
    logits = target.reference.logits(tuple(ids[:num_prompt]), tuple(ids[num_prompt:]))
    ties = 0
    for place in range(num_prompt, len(ids)):
        row = VerifyRow(
            sampling=sampling, ids=ids[:place], num_prompt=num_prompt, draft_ids=(), q=None
        )
        raw_1V = logits[place - num_prompt][None]
        wanted = _token(raw_1V, row)
        if wanted != ids[place]:
            nudged_1V = raw_1V.clone()
            nudged_1V[0, ids[place]] += NEAR_TIE
            nudged_1V[0, wanted] -= NEAR_TIE
            assert _token(nudged_1V, row) == ids[place], f"position {place}: not {wanted}"
            ties += 1
    return ties


def _token(logits_1V: Tensor, row: VerifyRow) -> int:
    law_1V = process(logits_1V, [row])
    if row.greedy:
        return int(law_1V[0].argmax())
    seeds = np.array([row.sampling.seed], np.uint64)
    return int(choose(law_1V, seeds, np.array([len(row.ids)]), KEYED)[0])

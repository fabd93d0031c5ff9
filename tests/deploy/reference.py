"""The plain target, by transformers: what every served token is held against.

A token is right if it has the highest score of its position, given the emitted prefix. Wide and
narrow matrix products differ in their last bits, so a token within `NEAR_TIE` of the highest is
admitted, counted, and the comparison goes on from the prefix with that token in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cluster.noise import KEYED, Stream, gumbel
from verifier_service.coupled import choose

NEAR_TIE: Final = 1e-3


class ReferenceTarget:
    """transformers' own model and nothing of ours, but for the keyed noise of coupled mode."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.logits = cache(self._logits)

    def chat(self, prompt: str) -> list[int]:
        """Prompt ids of one user message."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def greedy_ties(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """Near-ties among greedy tokens.

        Raises:
            AssertionError: a token that is not the target's.
        """
        laws = self.logits(tuple(prompt), tuple(output))
        ties = 0
        for place, token in enumerate(output):
            law = laws[place]
            if token != int(law.argmax()):
                gap = float(law.max() - law[token])
                assert gap <= NEAR_TIE, f"token {place} is {token}, {gap:.4f} below the highest"
                ties += 1
        return ties

    def coupled_ties(self, prompt: Sequence[int], output: Sequence[int], seed: int) -> int:
        """Near-ties among tokens sampled at temperature 1 with this seed.

        Raises:
            AssertionError: a token that seed and prefix do not give.
        """
        laws = self.logits(tuple(prompt), tuple(output))
        positions = len(prompt) + np.arange(len(output))
        seeds = np.full(len(output), seed, np.uint64)
        expected = choose(laws, seeds, positions, KEYED)
        ties = 0
        for place in np.flatnonzero(expected != np.asarray(output)):
            pair = np.array([expected[place], output[place]])
            noise = gumbel(KEYED.uniform(Stream.GUMBEL, seeds[:1], positions[place], pair))
            best, got = laws[place, torch.as_tensor(pair)].double().numpy() + noise
            assert abs(best - got) <= NEAR_TIE, f"token {place}: {got:.4f} instead of {best:.4f}"
            ties += 1
        return ties

    @torch.inference_mode()
    def _logits(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
        """Logits [len(output), vocabulary] that the emitted tokens were drawn from."""
        ids = torch.tensor([prompt + output[:-1]])
        logits: Tensor = self.model(ids, logits_to_keep=len(output)).logits[0]
        return logits

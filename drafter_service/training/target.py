"""The target as training sees it: frozen weights, hidden states of one sequence, its head.

Shape legend: N positions of one sequence, D hidden size, V target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cluster.errors import CheckpointError, ModelNotFound


class Target:
    """A Llama- or Qwen3-type causal language model from a Hugging Face folder, in fp32.

    Raises:
        ModelNotFound: no such folder.
        CheckpointError: the folder does not hold a model of a supported kind.
    """

    def __init__(self, path: Path, *, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        if not (path / "config.json").is_file():
            raise ModelNotFound(f"no target model at {path}", hint="pass a Hugging Face folder")
        try:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot load the target at {path}: {error}") from error
        if model.config.model_type not in ("llama", "qwen3"):
            raise CheckpointError(
                f"target model_type {model.config.model_type!r} is not supported",
                hint="llama and qwen3 are",
            )
        self.path = path
        self.device = torch.device(device)
        self._model = model.eval().requires_grad_(False).to(self.device)

    @property
    def config(self) -> Any:
        """The transformers configuration."""
        return self._model.config

    @property
    def embedding(self) -> Tensor:
        """[V, D]"""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def head(self) -> Tensor:
        """[V, D]"""
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def layer(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, by their names inside the layer."""
        state: dict[str, Tensor] = self._model.model.layers[index].state_dict()
        return state

    @property
    def final_norm(self) -> Tensor:
        weight: Tensor = self._model.model.norm.weight
        return weight

    @torch.no_grad()
    def hidden_states(
        self, ids_N: Tensor, target_layer_ids: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Tapped layer outputs, each [N, D], and the last hidden state after the final norm."""
        out = self._model.model(
            ids_N[None].to(self.device), output_hidden_states=True, use_cache=False
        )
        taps = [out.hidden_states[layer + 1][0] for layer in target_layer_ids]
        return taps, out.last_hidden_state[0]

    @torch.no_grad()
    def hidden_states_of(
        self, sequences: Sequence[Sequence[int]], target_layer_ids: Sequence[int]
    ) -> list[tuple[Tensor, Tensor]]:
        """Of several sequences in one forward: (tapped outputs side by side, last hidden state).

        Padding goes behind each sequence, where no position of it looks.
        """
        longest = max(map(len, sequences))
        ids_SL = torch.tensor([[*ids, *(0,) * (longest - len(ids))] for ids in sequences])
        out = self._model.model(ids_SL.to(self.device), output_hidden_states=True, use_cache=False)
        return [
            (
                torch.cat(
                    [out.hidden_states[layer + 1][row, : len(ids)] for layer in target_layer_ids],
                    dim=-1,
                ),
                out.last_hidden_state[row, : len(ids)],
            )
            for row, ids in enumerate(sequences)
        ]

    @torch.no_grad()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits [N, V] of normed hidden states."""
        return functional.linear(hidden_ND.to(self.device), self.head)

    def special_ids(self) -> tuple[int, ...]:
        """Ids that text never contains but a reply may: tokenizer specials and end tokens."""
        return special_ids(self.path)


def special_ids(path: Path) -> tuple[int, ...]:
    """Special and end-of-text ids named by a model folder's tokenizer and configuration files."""
    found: set[int] = set()
    tokenizer = path / "tokenizer.json"
    if tokenizer.is_file():
        added = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", [])
        found.update(token["id"] for token in added if token.get("special"))
    for name in ("config.json", "generation_config.json"):
        if not (path / name).is_file():
            continue
        config = json.loads((path / name).read_text(encoding="utf-8"))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = config.get(key)
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))

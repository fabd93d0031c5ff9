"""LoRA adapters made by hand: the folder as peft writes it, and the weights they come to."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

_MODULES: Final = (
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
)
"""Parts of fused layers and whole ones."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank changes of some layers: ``W + B A alpha / rank``."""

    rank: int
    alpha: int
    changes: dict[str, tuple[Tensor, Tensor]]
    """A [rank, in] and B [out, rank] by the layer's name in transformers' model."""

    def merged(self, model: Any) -> Any:
        """A copy of transformers' model with the changes in its weights."""
        model = copy.deepcopy(model)
        with torch.no_grad():
            for name, (a, b) in self.changes.items():
                model.get_submodule(name).weight += b @ a * (self.alpha / self.rank)
        return model

    def save(self, folder: Path) -> Path:
        """Write it as peft does."""
        folder.mkdir()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.changes}),
            "bias": "none",
            "lora_dropout": 0.0,
            "modules_to_save": None,
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for name, (a, b) in self.changes.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        save_file(tensors, folder / "adapter_model.safetensors")
        return folder


def random_lora(model: Any, *, seed: int, rank: int) -> Lora:
    """Changes large enough that no text stays as it was."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name, module in model.named_modules():
        if name.endswith(_MODULES):
            num_out, num_in = module.weight.shape
            changes[name] = (
                torch.randn(rank, num_in, generator=generator) * 0.2,
                torch.randn(num_out, rank, generator=generator) * 0.4 / rank**0.5,
            )
    return Lora(rank=rank, alpha=2 * rank, changes=changes)

"""What the suite runs on: a tiny random target that both engines load, and the embedded one.

Shape legend: T positions, D hidden size, F raw feature width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig

from cluster.autoregressive_config import autoregressive_config
from tests import autoregressive
from tests.conftest import REPO
from tests.deploy.prompts import PROMPTS
from tests.deploy.reference import ReferenceTarget
from tests.verifier_service.torch_targets import VOCAB_SIZE, save_llama
from verifier_service.projection import Projects, load_feature_projection

MAX_POSITIONS: Final = 128
_HIDDEN: Final = 128
_LAYERS: Final = 4
_TAPS: Final = (0, 1, 2)
_EVAL_PROMPTS: Final = REPO.parent / "shared" / "data" / "prompts" / "eval.jsonl"
_LONGEST_PROMPT: Final = 120


@dataclass(frozen=True, kw_only=True)
class Target:
    """A target folder, a drafter whose projection fits it, and what they should compute."""

    folder: Path
    drafter: Path
    reference: ReferenceTarget
    projection: Projects

    @property
    def vocab_size(self) -> int:
        return int(self.reference.model.config.vocab_size)

    @torch.inference_mode()
    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """The greedy continuation by transformers; no token ends it."""
        fed = torch.tensor([list(ids)])
        settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        said = self.reference.model.generate(
            fed, attention_mask=torch.ones_like(fed), generation_config=settings
        )
        continuation: list[int] = said[0, len(ids) :].tolist()
        assert len(continuation) == num_tokens, "the model's own settings end it"
        return continuation

    @torch.inference_mode()
    def features(self, ids: Sequence[int]) -> Tensor:
        """[T, D], the projected rows of all positions, from transformers' hidden states.

        No tap may be the last layer: transformers reports that one after the final norm.
        """
        hidden = self.reference.model(torch.tensor([list(ids)]), output_hidden_states=True)
        taps = [hidden.hidden_states[layer + 1][0] for layer in self.projection.target_layer_ids]
        return self.projection(torch.cat(taps, dim=1))


def open_target(folder: Path, drafter: Path) -> Target:
    """The folders, with transformers' model of the target in fp32."""
    reference = ReferenceTarget(folder)
    reference.model.generation_config.eos_token_id = None
    return Target(
        folder=folder,
        drafter=drafter,
        reference=reference,
        projection=load_feature_projection(
            drafter, folder, device=torch.device("cpu"), dtype=torch.float32
        ),
    )


def write_tiny(folder: Path) -> Target:
    """A four-layer random Llama, and a drafter that is nothing but a projection.

    Heads are 32 wide: the least that vLLM's attention has on a CPU. The final norm's scale makes
    laws sharp: the likeliest of the 211 tokens often has half of the mass.
    """
    target, drafter = folder / "target", folder / "drafter"
    model = save_llama(
        target,
        hidden_size=_HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        max_position_embeddings=MAX_POSITIONS,
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0)
    model.save_pretrained(target)
    _write_tokenizer(target)
    _write_projection(drafter)
    return open_target(target, drafter)


def _write_tokenizer(folder: Path) -> None:
    """One word per id: engines that insist on a tokenizer get one."""
    words = {f"t{index}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _write_projection(folder: Path) -> None:
    """An autoregressive drafter's ``fc`` and no more: rows are a mix of all taps, without a norm
    that would hide their size."""
    spec = autoregressive.make_spec(
        hidden_size=_HIDDEN,
        target_hidden_size=_HIDDEN,
        num_target_layers=_LAYERS,
        target_layer_ids=_TAPS,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        head_dim=_HIDDEN // 4,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(autoregressive_config(spec)))
    generator = torch.Generator().manual_seed(5)
    fc = torch.randn(_HIDDEN, spec.feature_width, generator=generator) / spec.feature_width**0.5
    save_file({"fc.weight": fc}, folder / "model.safetensors")


def chat_prompts(reference: ReferenceTarget, number: int) -> list[list[int]]:
    """Ids of ``number`` user messages: evaluation prompts where a checkout has them, else ours."""
    texts: Sequence[str] = PROMPTS
    if _EVAL_PROMPTS.is_file():
        rows = map(json.loads, _EVAL_PROMPTS.read_text().splitlines())
        texts = [row["turns"][0] for row in rows]
    prompts = [ids for text in texts if len(ids := reference.chat(text)) <= _LONGEST_PROMPT]
    assert len(prompts) >= number, len(prompts)
    return prompts[:: len(prompts) // number][:number]

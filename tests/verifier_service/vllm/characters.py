"""A tokenizer of single characters and a few joined ones, so that a random target writes JSON."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from tests.verifier_service.torch_targets import VOCAB_SIZE

END: Final = 0
"""The id of the end of text."""
_JOINED: Final = ('{"', '":', '": ', '",', '"}', "true", "false", "null", "ab", "abc", "12", "{}")
_TOKENS: Final = ("<end>", *string.printable[:95], *_JOINED)
TEXTS: Final = (*_TOKENS, *(f"<{index}>" for index in range(len(_TOKENS), VOCAB_SIZE)))
"""By id."""


def decode(ids: Sequence[int]) -> str:
    """The text of ids; an end at the end is left out."""
    ids = list(ids)
    return "".join(TEXTS[token] for token in (ids[:-1] if ids[-1:] == [END] else ids))


def encode(text: str) -> list[int]:
    """One id per character."""
    return [TEXTS.index(character) for character in text]


def write_tokenizer(folder: Path) -> None:
    """Put it into a target's folder."""
    vocabulary = {text: index for index, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<end>",
        "eos_token": "<end>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

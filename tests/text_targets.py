"""A tiny random target with a tokenizer and a chat template: text in, text out, in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.drafter_service.training.conftest import write_target

VOCAB = 100
"""Letters, digits and punctuation, one id each, and three specials."""
_SPECIAL = ("<pad>", "<start>", "<end>")


def write_text_target(folder: Path, *, seed: int = 3) -> Path:
    """A character-level model folder; id 2 ends a reply."""
    write_target(folder, seed=seed, vocab_size=VOCAB)
    characters = [chr(code) for code in range(32, 127)] + ["\n", "\t"]
    vocabulary = {word: index for index, word in enumerate([*_SPECIAL, *characters])}
    assert len(vocabulary) == VOCAB
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<start>{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>{% endif %}"
    )
    config = {"chat_template": template, "eos_token": "<end>", "bos_token": "<start>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_prompts(path: Path, num: int) -> Path:
    """Short questions, some as turns."""
    rows: list[dict[str, object]] = []
    for number in range(num):
        text = f"What is {number} + {number * 3 % 7}?"
        if number % 4 == 3:
            rows.append({"id": number, "source": "chat", "turns": [text, "And then?"]})
        else:
            rows.append({"id": number, "source": "math", "prompt": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

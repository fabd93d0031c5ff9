"""Prompts through a chat template, with limits; files as such: `tests.cluster.test_prompt_file`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cluster.errors import PromptTooLong
from deploy.offline.prompts import load_prompts
from deploy.text_model import TextModel, load_text_model

WORDS = ["user", "one", "two", "three", "?"]


@pytest.fixture
def text(tmp_path: Path) -> TextModel:
    """A target of five words whose template says ``user`` first."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / "target"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": 5, "max_position_embeddings": 64, "eos_token_id": 4})
    )
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return load_text_model(folder)


def write(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def test_both_forms_pass_through_the_chat_template(text: TextModel, tmp_path: Path) -> None:
    path = write(
        tmp_path / "set.jsonl",
        {"prompt": "one two", "source": "a", "domain": "math"},
        {"turns": ["three", "one"], "license": "MIT"},
    )
    first, second = load_prompts(path, text)
    assert (first.ids, first.source, first.domain) == ((0, 1, 2), "a", "math")
    assert (second.ids, second.source, second.domain) == ((0, 3), "set", "all")


def test_the_limit_is_of_each_source(text: TextModel, tmp_path: Path) -> None:
    records = [{"prompt": word, "source": s} for s in "ab" for word in ("one", "two", "three")]
    prompts = load_prompts(write(tmp_path / "p.jsonl", *records), text, limit_per_source=2)
    assert [(p.source, p.ids[1]) for p in prompts] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_the_line_of_a_prompt_that_is_too_long_is_named(text: TextModel, tmp_path: Path) -> None:
    """63 ids leave room for one more, 64 do not; the template adds one."""
    path = write(tmp_path / "p.jsonl", {"prompt": "one " * 62}, {"prompt": "one " * 63})
    with pytest.raises(PromptTooLong, match="line 2: 64 tokens"):
        load_prompts(path, text)
    path = write(tmp_path / "p.jsonl", {"prompt": "one " * 62})
    assert len(load_prompts(path, text)[0].ids) == 63

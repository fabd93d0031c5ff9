"""Prompt files: both forms, labels, and every way to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import PromptFileError
from cluster.prompt_file import TextPrompt, read_prompts


def test_prompts_and_first_turns_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "one", "source": "a", "domain": "math", "id": 7}\n\n'
        '{"turns": ["two", "later"]}\n{"prompt": "one"}\n'
    )
    assert read_prompts(path) == [
        TextPrompt(text="one", source="a", domain="math", where=f"{path}, line 1"),
        TextPrompt(text="two", source="set", domain="all", where=f"{path}, line 3"),
        TextPrompt(text="one", source="set", domain="all", where=f"{path}, line 4"),
    ]


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    """A byte order mark and CRLF, as other systems write; U+2028 and U+0085 inside a string."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf" + '{"prompt": "one\u2028two\x85three"}\r\n{"prompt": "two"}\r\n'.encode()
    )
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028two\x85three", "two"]


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_holds_no_prompts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(PromptFileError, match="holds no prompts") as caught:
        read_prompts(path)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"text": "one"}', "no prompt"),
        ('{"prompt": "  "}', "no prompt"),
        ('{"prompt": 3}', "no prompt"),
        ('{"turns": []}', "no prompt"),
        ('{"turns": [3]}', "no prompt"),
        ('{"prompt": "one", "source": 3}', "source is 3"),
        ('{"prompt": "one", "domain": ""}', "domain is ''"),
        (r'{"prompt": "one", "domain": "a\u001b[31m"}', "domain is"),
        (r'{"prompt": "one", "source": "\ud800"}', "source is"),
        (r'{"prompt": "one \ud800"}', "the text is not Unicode"),
        ("[" * 100_000, "not JSON: nested too deeply"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n' + line + "\n")
    with pytest.raises(PromptFileError, match=f"line 2: {what}") as caught:
        read_prompts(path)
    assert caught.value.hint


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptFileError, match="cannot read"):
        read_prompts(tmp_path / "p")

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import DatasetError
from drafter_service.training.prompts import TextPrompt, load_prompts


def test_prompts_and_first_turns_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one", "source": "a", "id": 7}\n\n'
        '{"turns": ["two", "later"], "source": "b"}\n{"prompt": "one", "source": "c"}\n'
    )
    assert load_prompts(path) == [
        TextPrompt(text="one", source="a"),
        TextPrompt(text="two", source="b"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt"', r":2 is not JSON"),
        ('["a"]\n', "1 is not a JSON object"),
        ('{"text": "a"}\n', "1 has no text"),
        ('{"prompt": "  "}\n', "1 has no text"),
        ('{"prompt": 3}\n', "1 has no text"),
        ('{"turns": []}\n', "1 has no text"),
    ],
)
def test_what_is_no_prompt_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DatasetError, match=message) as caught:
        load_prompts(path)
    assert caught.value.hint


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no prompt file"):
        load_prompts(tmp_path / "none.jsonl")
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match="cannot read"):
        load_prompts(tmp_path / "p")

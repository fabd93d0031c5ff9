"""JSON of strangers: every way to be wrong is a ValueError."""

from __future__ import annotations

import pytest

from cluster.json_text import parse_json


def test_values() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\xff", "[" * 100_000, '{"a":' * 100_000])
def test_mistakes(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)

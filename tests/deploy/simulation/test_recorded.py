"""Recorded traffic as users bring it: every mistake names its line, in words."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from deploy.simulation.recorded import recorded_requests

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AT = "2023-11-16 18:00:00.0000000"


def json_line(timestamp: str = "1", prompt: str = "3", output: str = "4") -> str:
    values = f'"timestamp": {timestamp}, "input_length": {prompt}, "output_length": {output}'
    return f"{{{values}}}\n"


def read(tmp_path: Path, text: str) -> list[tuple[float, int, int]]:
    path = tmp_path / "trace"
    path.write_text(text)
    return recorded_requests(path)


def test_both_formats_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    later = AT.replace("18:00", "18:01")
    rows = read(tmp_path, f"{HEAD}{later},5,6\n{AT},3,0\n")
    assert [row[1:] for row in rows] == [(3, 0), (5, 6)]
    assert rows[1][0] - rows[0][0] == 60.0
    rows = read(tmp_path, json_line("2000", "5.0") + "\n" + json_line())
    assert rows == [(0.001, 3, 4), (2.0, 5, 4)]
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(json_line().encode()))
    assert recorded_requests(path) == [(0.001, 3, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no column TIMESTAMP"),
        ("hello\n", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (HEAD, "holds no request"),
        (f"{HEAD}yesterday,1,2\n", "line 2: TIMESTAMP 'yesterday' is no time"),
        (f"{HEAD}{AT},1,2\n{AT},1\n", "line 3: GeneratedTokens '' is no number of tokens"),
        (f"{HEAD}{AT},-1,2\n", "line 2: ContextTokens '-1' is no number of tokens"),
        (f"{HEAD}{AT},1.5,2\n", "line 2: ContextTokens '1.5' is no number of tokens"),
        (f"{HEAD}{AT},{'9' * 30},2\n", "line 2: ContextTokens '999"),
        ("{nope\n", "line 1: not JSON"),
        (json_line() + "[1]\n", "line 2: no object"),
        ('{"timestamp": 1}\n', "line 1: no input_length"),
        (json_line("NaN"), "line 1: timestamp 'nan' is no number of milliseconds"),
        (json_line("1e400"), "line 1: timestamp 'inf' is no number of milliseconds"),
        (json_line('"a"'), "line 1: timestamp 'a' is no number of milliseconds"),
        (json_line(prompt="3.5"), "line 1: input_length '3.5' is no number of tokens"),
        (json_line(prompt="1e400"), "line 1: input_length 'inf' is no number of tokens"),
        (json_line(prompt="true"), "line 1: input_length 'True' is no number of tokens"),
        (json_line(output="-3"), "line 1: output_length '-3' is no number of tokens"),
        (json_line(output="null"), "line 1: output_length 'None' is no number of tokens"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert said in caught.value.message
    assert "Error(" not in caught.value.message
    assert "TIMESTAMP,ContextTokens,GeneratedTokens" in caught.value.hint


def test_files_that_cannot_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    whole = gzip.compress(json_line().encode() * 100)
    broken = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xff\xff\xff\xff"
    for data in (b"hello", whole[: len(whole) // 2], broken):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            recorded_requests(path)
    (tmp_path / "trace").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        recorded_requests(tmp_path / "trace")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        recorded_requests(tmp_path)

"""`dspark bench` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.cli import main
from tests.dspark.fake_server import FakeDSpark


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "What is 2 + 2?", "domain": "math"}, {"prompt": "Hi", "domain": "chat"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(address: str, prompts: Path, *more: str) -> list[str]:
    return ["bench", "--address", address, "--prompts", str(prompts), "--warm-up", "0", *more]


def test_report_tables_and_picture(
    fake: FakeDSpark,
    address: str,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "report.json"
    flags = ["--users", "2", "--requests", "8", "--temperature", "0", "0.7", "--max-tokens", "9"]
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    flags += ["--adapter", "sql", "--json-schema", str(schema)]
    flags += ["--mode", "coupled", "rejection", "--target-tokens-per-s", "1", "--tier", "batch"]
    assert main(command(address, prompts, *flags, "--json", str(out))) == 0
    shown = capsys.readouterr().out
    for words in ("tokens/s in all", "time to first token", "target rate attained", "math"):
        assert words in shown
    report = json.loads(out.read_text())
    assert report["figures"]["requests"]["completed"] == 8
    assert report["figures"]["slo"]["attained"] == 1.0
    assert report["load"]["users"] == 2
    assert report["load"]["prompts"] == "prompts.jsonl", "no path of this machine"
    assert report["load"]["temperatures"] == [0.0, 0.7]
    assert report["server"]["scheduling"]["policy"] == "adaptive"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {request.sampling.mode for request in fake.requests} == {1, 2}
    assert {request.tier for request in fake.requests} == {"batch"}
    assert {request.adapter for request in fake.requests} == {"sql"}
    assert {request.constraint.json_schema for request in fake.requests} == {'{"type": "object"}'}
    assert report["load"]["json_schema"] == '{"type": "object"}'
    assert main(command(address, prompts, *flags, "--json", str(out))) == 0, "a report may go"


def test_plain_open_loop(
    fake: FakeDSpark, address: str, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--rate", "80", "--duration", "0.4", "--no-draft", "--raw", "--limit-per-source", "1"]
    assert main(command(address, prompts, *flags)) == 0
    assert "80 requests/s" in capsys.readouterr().out
    assert {(r.text, r.draft) for r in fake.requests} == {("What is 2 + 2?", False)}
    assert not any(r.HasField("constraint") or r.adapter for r in fake.requests)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--users", "0"], "users: 0"),
        (["--users", "1", "--max-tokens", "0"], "max tokens 0"),
        (["--users", "1", "--limit-per-source", "0"], "--limit-per-source"),
        (["--users", "1", "--target-tokens-per-s", "-1"], "tokens/s"),
        (["--users", "1", "--json-schema", "/no/such"], "cannot read /no/such"),
        (["--users", "1", "--adapter", "a b"], "no name of an adapter"),
    ],
)
def test_mistakes_are_a_line(
    fake: FakeDSpark,
    address: str,
    prompts: Path,
    flags: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(address, prompts, *flags)) == 2
    assert named in capsys.readouterr().err
    assert not fake.requests


def test_nothing_else_is_written_over(
    fake: FakeDSpark,
    address: str,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine.json").write_text('{"rows": []}')
    flags = ["--users", "1", "--json", str(tmp_path / "mine.json")]
    assert main(command(address, prompts, *flags)) == 2
    assert "no report" in capsys.readouterr().err
    assert not fake.requests

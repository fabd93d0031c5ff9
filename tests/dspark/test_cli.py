"""The `dspark` command: output, exit status, one clear line for every mistake."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
from pathlib import Path

import pytest

from cluster import model_store
from cluster.errors import Overloaded
from drafter_service.calibration.fitting import MIN_PROMPTS, MIN_ROUNDS
from dspark.cli import main
from tests.dspark.fake_server import WORDS, FakeDSpark


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_generate_streams_the_answer(
    fake: FakeDSpark, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["generate", "Hi", "--address", address, "--max-tokens", "7", "--seed", "3"]
    command += ["--target-tokens-per-s", "9", "--tier", "batch"]
    assert main([*command, "--temperature", "0.5", "--stop", "x", "--no-draft", "--usage"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "".join(WORDS) + "\n"
    assert "3 new tokens" in captured.err
    request = fake.requests[0]
    assert request.chat.messages[0].content == "Hi"
    assert (request.max_tokens, request.sampling.seed, request.draft) == (7, 3, False)
    assert request.sampling.temperature == 0.5
    assert (request.target_tokens_per_s, request.tier) == (9.0, "batch")
    assert list(request.stop) == ["x"]


def test_generate_binds_the_answer(fake: FakeDSpark, address: str, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.ebnf"
    schema.write_text('{"type": "object"}')
    grammar.write_text("root ::= x")
    command = ["generate", "Hi", "--address", address]
    for flags in (
        ["--json-schema", str(schema), "--adapter", "sql"],
        ["--json-object"],
        ["--regex", "a+"],
        ["--choice", "yes", "--choice", "no"],
        ["--grammar", str(grammar)],
        [],
    ):
        assert main([*command, *flags]) == 0
    sent = [request.constraint for request in fake.requests]
    assert [(c.json_schema, c.json_object) for c in sent[:2]] == [
        ('{"type": "object"}', False), ("", True),
    ]  # fmt: skip
    assert (sent[2].regex, list(sent[3].choice.texts)) == ("a+", ["yes", "no"])
    assert sent[4].grammar == "root ::= x"
    assert not fake.requests[5].HasField("constraint")
    assert [request.adapter for request in fake.requests] == ["sql", "", "", "", "", ""]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--json-schema", "/no/such"], "cannot read /no/such"),
        (["--grammar", "/"], "cannot read /"),
    ],
)
def test_a_form_that_cannot_be_read_is_a_line(
    fake: FakeDSpark,
    address: str,
    flags: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "Hi", "--address", address, *flags]) == 2
    assert named in capsys.readouterr().err
    assert not fake.requests


def test_generate_takes_one_form(
    fake: FakeDSpark, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "Hi", "--address", address, "--regex", "a", "--choice", "a"])
    assert "not allowed with" in capsys.readouterr().err
    assert not fake.requests


def test_generate_raw_from_standard_input(
    fake: FakeDSpark, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Once upon"))
    assert main(["generate", "-", "--raw", "--address", address]) == 0
    assert fake.requests[0].text == "Once upon"
    assert not fake.requests[0].HasField("draft")


def test_an_error_is_a_line_and_a_hint(
    fake: FakeDSpark, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.error = Overloaded("queue full", retry_after_s=3)
    assert main(["generate", "Hi", "--address", address]) == 2
    assert capsys.readouterr().err == "error: queue full\nhint: retry in 3.0 s\n"


def test_no_server_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--address", "127.0.0.1:9"]) == 2
    error = capsys.readouterr().err
    assert "127.0.0.1:9" in error
    assert "dspark serve" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["serve", "demo"])
@pytest.mark.parametrize(
    ("yaml", "named"),
    [
        ("router:\n  max_queue: 1\n", "router.max_queue: unknown key"),
        ("model:\n  target: no-such-model\n", "no model 'no-such-model'"),
    ],
)
def test_a_wrong_configuration_stops_before_anything_starts(
    command: str, yaml: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(yaml)
    assert main([command, "--config", str(tmp_path / "c.yaml")]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert "hint:" in captured.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--port", "70000"], "--port"),
        (["demo", "--max-tokens", "0"], "--max-tokens"),
        (["demo", "--concurrency", "0"], "--concurrency"),
        (["serve", "--config", "/no/such/file"], "/no/such/file"),
    ],
)
def test_a_wrong_flag_is_named(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "calibrate", "eval"])
def test_help_says_what_every_flag_is_and_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"dspark.commands.{command}").add_arguments(parser)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for action in parser._actions:
        assert action.help, action.option_strings
        if isinstance(action.default, int | float) and action.default is not False:
            assert f"default: {action.default}" in shown or "by default" in action.help
    assert "None" not in shown


def test_help_of_calibrate_says_the_least_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"at least {MIN_PROMPTS} prompts" in shown
    assert f"{MIN_ROUNDS} rounds in each regime" in shown


def test_models_list_and_fetch_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    assert main(["models", "list"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["models", "fetch", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_models_fetch_of_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "nonesuch"]) == 2
    assert all(name in capsys.readouterr().err for name in model_store.EMBEDDED)


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sevre"])
    assert caught.value.code == 2
    assert "generate" in capsys.readouterr().err


def test_a_file_error_that_nobody_thought_of_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/some/file")

    monkeypatch.setattr("dspark.commands.models.run", run)
    assert main(["models", "list"]) == 2
    assert capsys.readouterr().err == "error: /some/file: Permission denied\n"


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "localhost",
        "http://localhost:9000",
        "a:b",
        "::1:90",
    ],
)
def test_an_address_that_is_none_is_refused(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scheduling", "--address", address]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: no address: ")
    assert "hint: HOST:PORT" in shown

"""`dspark calibrate` on a tiny pair: figures on the screen, files beside the checkpoint."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest

from deploy.offline.rounds import LocalPair
from drafter_service.calibration.calibration_file import load_calibration
from dspark.cli import main
from tests.deploy.random_drafter import write_random_drafter
from tests.text_targets import write_prompts, write_text_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    write_text_target(folder / "target")
    write_random_drafter(folder / "drafter", folder / "target")
    write_prompts(folder / "prompts.jsonl", 24)
    return folder


def calibrate(pair: Path, *words: str, drafter: str | None = None) -> int:
    return main(
        [
            "calibrate",
            *("--target", str(pair / "target"), "--drafter", drafter or str(pair / "drafter")),
            *("--prompts", str(pair / "prompts.jsonl"), "--threads", "1", *words),
        ]
    )


def test_calibrates_and_applies(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    own = tmp_path / "pair"
    assert calibrate(own, "--limit", "20", "--max-new-tokens", "16") == 0
    out = capsys.readouterr().out
    for words in ("greedy:", "coupled:", "rejection:", "20 prompts", "pooled AUC", str(own)):
        assert words in out, words
    calibration = load_calibration(own / "drafter")
    assert calibration is not None
    for regime in calibration.regimes.values():
        assert regime.judgement is not None
        assert regime.judgement.num_prompts == 20
        # Drafts of random weights are rejected: what was 1/2 must become almost nothing.
        before, after = regime.judgement.before.ece[0], regime.judgement.after.ece[0]
        assert before is not None
        assert after is not None
        assert after < 0.1 < before
    assert (own / "drafter" / "reliability.png").read_bytes().startswith(b"\x89PNG")

    texts = own / "again"
    shutil.copytree(own, texts)
    assert calibrate(texts, "--limit", "20", "--max-new-tokens", "16") == 0
    again = load_calibration(texts / "drafter")
    assert again == calibration, "raw confidence was collected, though a calibration was there"


def test_flags_reach_the_rounds(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def play(self: LocalPair, prompts: list[object], **settings: object) -> list[object]:
        asked.append((len(prompts), settings))
        return []

    def open_pair(*folders: Path, kv_tokens: int, **settings: bool) -> LocalPair:
        room.append(kv_tokens)
        return real(*folders, kv_tokens=kv_tokens, **settings)

    real, room = LocalPair.open, list[int]()
    monkeypatch.setattr(LocalPair, "play", play)
    monkeypatch.setattr(LocalPair, "open", open_pair)
    words = ("--limit", "5", "--max-new-tokens", "9", "--seed", "3", "--concurrency", "4")
    assert calibrate(pair, *words) == 2
    assert room == [4 * 2 * 16], "four requests of 26 or 27 tokens, in blocks of 16"
    (num, settings), *rest = asked
    assert not rest, "nothing to fit: it stops at the first regime"
    assert (num, settings["temperature"], settings["mode"]) == (5, 0.0, "coupled")
    assert (settings["max_new_tokens"], settings["seed"], settings["concurrency"]) == (9, 3, 4)


def test_the_sampled_regimes_run_at_the_temperature(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pair / "drafter", tmp_path / "drafter")
    real, asked = LocalPair.play, []

    def play(self: LocalPair, prompts: list[object], **settings: object) -> object:
        asked.append((settings["temperature"], settings["mode"]))
        return real(self, prompts, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalPair, "play", play)
    words = ("--max-new-tokens", "14", "--temperature", "0.7")
    assert calibrate(pair, *words, drafter=str(tmp_path / "drafter")) == 0
    assert asked == [(0.0, "coupled"), (0.7, "coupled"), (0.7, "rejection")]
    calibration = load_calibration(tmp_path / "drafter")
    assert calibration is not None
    judged = [regime.judgement for regime in calibration.regimes.values()]
    assert [judgement and judgement.temperature for judgement in judged] == [0.0, 0.7, 0.7]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--limit", "0"), "--limit"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--concurrency", "0"), "--concurrency"),
        (("--temperature", "0"), "--temperature"),
        (("--temperature", "nan"), "--temperature"),
        (("--temperature", "1e-9"), "--temperature"),
        (("--temperature", "5000"), "--temperature"),
        (("--threads", "-1"), "--threads"),
        (("--threads", "100000000"), "--threads"),
        (("--limit", "4"), "too few"),
        (("--max-new-tokens", "1"), "--max-new-tokens"),
    ],
)
def test_a_wrong_flag_is_named_and_writes_nothing(
    pair: Path, words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(pair, *words) == 2
    assert named in capsys.readouterr().err
    names = {path.name for path in (pair / "drafter").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_a_checkpoint_that_cannot_be_written_is_found_before_the_rounds(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def play(self: LocalPair, prompts: list[object], **settings: object) -> list[object]:
        raise AssertionError("too late")

    def refuse(dir: Path) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalPair, "play", play)
    checkpoint = tmp_path / "drafter"
    shutil.copytree(pair / "drafter", checkpoint)
    (checkpoint / "reliability.png").mkdir()
    assert calibrate(pair, drafter=str(checkpoint)) == 2
    assert "reliability.png is a folder" in capsys.readouterr().err
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert calibrate(pair, drafter=str(checkpoint)) == 2
    assert f"cannot write to {checkpoint}: Permission denied" in capsys.readouterr().err


def test_prompt_lookup_has_nothing_to_calibrate(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(pair, drafter="ngram") == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_a_checkpoint_rewritten_meanwhile_is_left_alone(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = tmp_path / "drafter"
    shutil.copytree(pair / "drafter", checkpoint)
    real = LocalPair.play

    def play(self: LocalPair, prompts: list[object], **settings: object) -> object:
        if settings["mode"] == "rejection":
            write_random_drafter(checkpoint, pair / "target", seed=1)
        return real(self, prompts, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalPair, "play", play)
    assert calibrate(pair, "--max-new-tokens", "14", drafter=str(checkpoint)) == 2
    assert "rewritten" in capsys.readouterr().err
    assert not (checkpoint / "calibration.json").exists()


def test_help_asks_for_held_out_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "held out" in capsys.readouterr().out


def test_a_prompt_file_without_prompts(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    assert calibrate(pair, "--prompts", str(tmp_path / "none.jsonl")) == 2
    assert "line 1: no prompt" in capsys.readouterr().err

"""`dspark export`: what it prints, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_service.loading import load_drafter, save_drafter
from dspark.cli import main
from tests.drafters import make_model, make_spec, write_target


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Folders of a drafter and its target."""
    model = make_model(make_spec(draft_vocab_size=20))
    save_drafter(model, tmp_path / "drafter")
    target = write_target(tmp_path / "target", model)
    (target / "tokenizer.json").write_text("{}")
    return str(tmp_path / "drafter"), str(target)


def test_there_and_back(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, target = pair
    there, back = tmp_path / "there", tmp_path / "back"
    command = ["export", drafter, "--target", target, "--format", "speculators"]
    assert main([*command, "--output", str(there), "--verifier", "owner/name"]) == 0
    printed = capsys.readouterr().out
    assert "note: draft ids were renumbered" in printed
    assert f"drafter written to {there} in the speculators format\n" in printed
    assert '"owner/name"' in (there / "config.json").read_text()
    command = ["export", str(there), "--target", target, "--format", "deepspec"]
    assert main([*command, "--output", str(back)]) == 0
    assert load_drafter(back, Path(target)).spec == load_drafter(Path(drafter), Path(target)).spec
    assert main([*command, "--output", str(back)]) == 2
    assert "hint: --force" in capsys.readouterr().err
    assert main([*command, "--output", str(back), "--force"]) == 0


def test_mistakes(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, target = pair
    out = ["--output", str(tmp_path / "out")]
    to = ["--format", "speculators", *out]
    back = ["--format", "deepspec", *out]
    for words, named in [
        ([drafter, "--target", "nonesuch", *to], "no model 'nonesuch'"),
        (["nonesuch", "--target", target, *to], "no drafter 'nonesuch'"),
        (["ngram", "--target", target, *to], "'ngram' has no weights to export"),
        (["default", "--target", target, *to], "no drafter is shipped"),
        (["smollm2-135m", "--target", target, *to], "was made for 49152, target"),
        ([drafter, "--target", target, *back, "--verifier", "x"], "--verifier: only"),
    ]:
        assert main(["export", *words]) == 2
        assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

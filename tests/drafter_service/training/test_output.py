"""Where the drafter goes: never over something else, and always somewhere."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from drafter_service.loading import load_drafter
from drafter_service.training.config import Schedule, TrainConfig
from drafter_service.training.trainer import StepReport, train

MakeConfig = Callable[..., TrainConfig]


class Killed(BaseException):
    """Stands for a signal."""


@pytest.mark.parametrize("name", ["target", "work", "start_from"])
def test_the_output_may_be_no_other_folder_of_the_run(
    make_config: MakeConfig, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} and output are the same folder"):
        make_config(**{name: tmp_path / "d", "output": tmp_path / "x" / ".." / "d"})


@pytest.mark.parametrize("content", ["config.json", "notes.txt", "a model", "a file"])
def test_nothing_but_a_drafter_is_written_over(
    make_config: MakeConfig, tmp_path: Path, content: str
) -> None:
    output = tmp_path / "output"
    config = make_config(output=output)
    if content == "a model":
        shutil.copytree(config.target, output)
    elif content == "a file":
        output.write_text("precious")
    else:
        output.mkdir()
        (output / content).write_text("{}")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    with pytest.raises(ConfigError, match="output"):
        train(config)
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_an_earlier_drafter_may_be_replaced(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(work=tmp_path / "1"))
    config = make_config(work=tmp_path / "2", seed=5)
    first = (config.output / "model.safetensors").read_bytes()
    train(config)
    assert (config.output / "model.safetensors").read_bytes() != first


def test_a_run_that_goes_on_elsewhere_writes_its_drafter_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Even if no later evaluation beats the best one, which went to the old place."""
    schedule = Schedule(
        num_steps=8,
        sequences_per_step=3,
        anchors_per_sequence=5,
        learning_rate=3e-3,
        evaluate_every=2,
        checkpoint_every=2,
    )
    config = make_config(schedule=schedule)

    def kill_at_6(report: StepReport) -> None:
        if report.steps_done == 6:
            raise Killed

    with pytest.raises(Killed):
        train(config, kill_at_6)
    moved = dataclasses.replace(config, output=tmp_path / "elsewhere")
    train(moved)
    load_drafter(moved.output, config.target)
    finished = dataclasses.replace(config, output=tmp_path / "third")
    train(finished)  # nothing left to do but this
    load_drafter(finished.output, config.target)

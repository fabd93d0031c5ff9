from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_service.loading import load_drafter
from drafter_service.training import arguments, command
from drafter_service.training.config import TrainConfig

PATHS = ["--target", "t", "--data", "d", "--work", "w", "--output", "o"]


def _parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_arguments(parser)
    return parser.parse_args(words)


def test_defaults_are_those_of_the_library() -> None:
    expected = TrainConfig(target=Path("t"), data=Path("d"), work=Path("w"), output=Path("o"))
    assert arguments.config_from(_parse(*PATHS)) == expected


def test_every_argument_reaches_the_configuration() -> None:
    config = arguments.config_from(
        _parse(
            *PATHS,
            *("--layers=2", "--gamma=4", "--head=gated", "--markov-rank=16", "--draft-vocab=99"),
            *("--taps", "1", "2", "--steps=7", "--sequences-per-step=3", "--anchors=5"),
            *("--learning-rate=0.5", "--evaluate-every=6", "--checkpoint-every=4"),
            *(
                "--ce-weight=0.3",
                "--distillation-weight=0.4",
                "--held-out=8",
                "--max-sequences=12",
                "--max-length=50",
            ),
            *("--seed=9", "--device=cuda", "--precision=bf16", "--compile", "--log-every=20"),
            *("--prefetch=3", "--budget-s=60"),
        )
    )
    shape, schedule = config.shape, config.schedule
    assert (shape.num_layers, shape.gamma, shape.head, shape.markov_rank) == (2, 4, "gated", 16)
    assert (shape.draft_vocab_size, shape.target_layer_ids) == (99, (1, 2))
    assert (schedule.num_steps, schedule.sequences_per_step) == (7, 3)
    assert (schedule.anchors_per_sequence, schedule.learning_rate) == (5, 0.5)
    assert (schedule.evaluate_every, schedule.checkpoint_every) == (6, 4)
    assert (config.num_held_out, config.max_sequences, config.max_length) == (8, 12, 50)
    assert (config.seed, config.device, config.precision) == (9, "cuda", "bf16")
    assert (config.compile_backend, config.log_every) == ("inductor", 20)
    assert (config.num_prefetch, config.time_budget_s) == (3, 60.0)
    assert (config.loss.cross_entropy, config.loss.distillation) == (0.3, 0.4)


def test_no_head_means_no_rank() -> None:
    config = arguments.config_from(_parse(*PATHS, "--head", "none"))
    assert config.shape.markov_rank == 0


def test_the_kind_reaches_the_configuration() -> None:
    assert arguments.config_from(_parse(*PATHS)).shape.kind == "dspark"
    assert arguments.config_from(_parse(*PATHS, "--kind=autoregressive")).shape.kind == (
        "autoregressive"
    )


def test_the_command_trains_and_says_where(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = _parse(
        *("--target", str(tiny / "target"), "--data", str(tiny / "data.jsonl")),
        *("--work", str(tmp_path / "w"), "--output", str(tmp_path / "o"), "--held-out", "4"),
        *("--steps", "2", "--evaluate-every", "1", "--gamma", "2", "--sequences-per-step", "2"),
    )
    assert command.run(arguments.config_from(args)) == 0
    out = capsys.readouterr().out
    assert "step 1: accepted length" in out
    assert str(tmp_path / "o") in out
    assert load_drafter(tmp_path / "o", tiny / "target").spec.gamma == 2
    assert (tmp_path / "w" / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_declaring_arguments_loads_no_torch() -> None:
    code = (
        "import sys, argparse; from drafter_service.training import arguments, command; "
        "arguments.add_arguments(argparse.ArgumentParser()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

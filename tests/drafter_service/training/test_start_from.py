"""Going on from a drafter that exists: its weights, its vocabulary, and nothing by accident."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.errors import CheckpointError, ConfigError
from drafter_service.training.checkpoint import trainable
from drafter_service.training.config import DrafterKind, DrafterShape, TrainConfig
from drafter_service.training.run import prepare
from drafter_service.training.target import Target
from drafter_service.training.trainer import StepReport, train
from tests.drafter_service.training.conftest import VOCAB, write_target

MakeConfig = Callable[..., TrainConfig]

SHAPES: dict[DrafterKind, DrafterShape] = {
    "dspark": DrafterShape(gamma=3, markov_rank=8, draft_vocab_size=40),
    "autoregressive": DrafterShape(
        kind="autoregressive", gamma=2, head="none", markov_rank=0, draft_vocab_size=40
    ),
}


def other_data(config: TrainConfig, folder: Path) -> Path:
    """The same responses with every id moved: another draft vocabulary would be chosen."""
    rows = [json.loads(line) for line in config.data.read_text().splitlines()]
    for row in rows:
        row["response"] = [3 + (token + 20) % (VOCAB - 3) for token in row["response"]]
    path = folder / "other.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", SHAPES)
def test_weights_and_vocabulary_are_the_drafters(
    make_config: MakeConfig, tmp_path: Path, kind: DrafterKind
) -> None:
    first = make_config(shape=SHAPES[kind], work=tmp_path / "1", output=tmp_path / "first")
    train(first)
    again = dataclasses.replace(
        first,
        data=other_data(first, tmp_path),
        work=tmp_path / "2",
        output=tmp_path / "second",
        start_from=first.output,
    )
    fresh = prepare(dataclasses.replace(again, start_from=None, work=tmp_path / "3"))
    run = prepare(again)
    exported = run.architecture.load(first.output, target_of(again), again.shape)
    assert not torch.equal(fresh.model.d2t, exported.d2t)  # or the test would show nothing
    assert torch.equal(run.model.d2t, exported.d2t)
    assert torch.equal(run.t2d[exported.d2t], torch.arange(40))
    begun, found = trainable(run.model), trainable(exported)
    assert begun.keys() == found.keys() == trainable(fresh.model).keys()
    for name, weight in begun.items():
        assert torch.equal(weight, found[name]), name
        assert name.endswith("bias") or not torch.equal(weight, trainable(fresh.model)[name]), name
    train(again)
    assert (again.output / "model.safetensors").is_file()


def target_of(config: TrainConfig) -> Target:
    """The run's target, loaded anew."""
    return Target(config.target)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gamma": 2}, "gamma is 3, the run asks for 2"),
        ({"num_layers": 2}, "num_layers is 1, the run asks for 2"),
        ({"draft_vocab_size": 30}, "draft_vocab_size is 40, the run asks for 30"),
        ({"head": "gated"}, "head is vanilla, the run asks for gated"),
        ({"target_layer_ids": (0, 1)}, "target_layer_ids is"),
    ],
)
def test_another_shape_is_refused(
    make_config: MakeConfig, tmp_path: Path, change: dict[str, object], named: str
) -> None:
    first = make_config(shape=SHAPES["dspark"], output=tmp_path / "first")
    train(first)
    shape = dataclasses.replace(first.shape, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=named):
        prepare(
            dataclasses.replace(
                first, shape=shape, start_from=first.output, output=tmp_path / "second"
            )
        )


def test_another_kind_and_another_target_are_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    first = make_config(shape=SHAPES["dspark"], output=tmp_path / "first")
    train(first)
    on = dataclasses.replace(first, start_from=first.output, output=tmp_path / "second")
    with pytest.raises(CheckpointError):
        prepare(dataclasses.replace(on, shape=SHAPES["autoregressive"]))
    write_target(tmp_path / "wide", seed=1, vocab_size=2 * VOCAB)
    with pytest.raises(CheckpointError, match="vocab_size"):
        prepare(dataclasses.replace(on, target=tmp_path / "wide", work=tmp_path / "w"))


def test_a_killed_run_goes_on_and_another_start_is_another_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    first = make_config(shape=SHAPES["dspark"], work=tmp_path / "1", output=tmp_path / "first")
    train(first)
    on = dataclasses.replace(
        first, work=tmp_path / "2", output=tmp_path / "second", start_from=first.output
    )
    whole = train(dataclasses.replace(on, work=tmp_path / "3", output=tmp_path / "third"))

    class Killed(BaseException):
        pass

    def kill(report: StepReport) -> None:
        if report.steps_done == 6:
            raise Killed

    with pytest.raises(Killed):
        train(on, kill)
    assert train(on).to_json() == whole.to_json()
    with pytest.raises(CheckpointError, match="other settings"):
        train(dataclasses.replace(on, start_from=None))

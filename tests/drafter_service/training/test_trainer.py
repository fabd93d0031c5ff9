from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from cluster import tensor_file
from cluster.drafter_spec import HeadKind
from cluster.errors import (
    CheckpointError,
    ConfigError,
    DatasetError,
    ModelNotFound,
    StorageFull,
    TrainingDiverged,
)
from cluster.fingerprint import folder_fingerprint
from drafter_service.loading import load_drafter
from drafter_service.training import run as run_module
from drafter_service.training import trainer
from drafter_service.training.batches import Batches
from drafter_service.training.checkpoint import load_state
from drafter_service.training.config import DrafterShape, Schedule, TrainConfig
from drafter_service.training.dataset import load_records
from drafter_service.training.loss import block_output
from drafter_service.training.packing import Pack
from drafter_service.training.progress import LearningCurve
from drafter_service.training.trainer import StepReport, train
from tests.drafter_service.training.conftest import write_target

MakeConfig = Callable[..., TrainConfig]


class Killed(BaseException):
    """Stands for a signal: nothing in the trainer may catch it."""


def _kill_at(step: int) -> Callable[[StepReport], None]:
    def report(progress: StepReport) -> None:
        if progress.steps_done == step:
            raise Killed

    return report


def test_one_seed_gives_one_curve_and_another_seed_another(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    first = train(make_config(work=tmp_path / "1"))
    second = train(make_config(work=tmp_path / "2"))
    assert first.to_json() == second.to_json()
    assert len(first.steps) == 8
    assert [step for step, _ in first.evaluations] == [4, 8]
    third = train(make_config(work=tmp_path / "3", seed=1))
    assert third.steps[0].loss != first.steps[0].loss


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_killed_run_goes_on_to_the_same_curve(
    make_config: MakeConfig, tmp_path: Path, stop: int
) -> None:
    unbroken = train(make_config(work=tmp_path / "unbroken"))
    with pytest.raises(Killed):
        train(make_config(), _kill_at(stop))
    resumed: list[int] = []
    curve = train(make_config(), lambda progress: resumed.append(progress.steps_done))
    assert resumed[0] == stop - stop % 2 + 1  # from the last checkpoint, every second step
    assert curve.to_json() == unbroken.to_json()
    assert json.loads((tmp_path / "work" / "curve.json").read_text()) == curve.to_json()


def test_a_finished_run_is_not_trained_again(make_config: MakeConfig) -> None:
    curve = train(make_config())
    assert train(make_config(), _kill_at(1)).to_json() == curve.to_json()


def test_training_makes_drafts_that_the_target_accepts(make_config: MakeConfig) -> None:
    schedule = Schedule(
        num_steps=150,
        sequences_per_step=4,
        anchors_per_sequence=8,
        learning_rate=1e-2,
        evaluate_every=150,
        checkpoint_every=150,
    )
    config = make_config(schedule=schedule)
    run = trainer.prepare(config)
    trained_on = [run.batches._sequence(index) for index in range(8)]
    before = trainer.evaluate(run.model, trained_on, [True] * 8)
    train(config)
    model = load_drafter(config.output, config.target)
    after = trainer.evaluate(model, trained_on, [True] * 8)
    assert after.expected_length > before.expected_length + 0.5
    assert after.greedy_length is not None
    assert before.greedy_length is not None
    assert after.greedy_length > before.greedy_length + 0.5
    assert after.acceptance[0] > before.acceptance[0] + 0.2


def test_bf16_training_follows_fp32_and_keeps_its_weights_fp32(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    exact = train(make_config(work=tmp_path / "fp32"))
    rounded = train(make_config(work=tmp_path / "bf16", precision="bf16"))
    assert rounded.steps[0].loss != exact.steps[0].loss
    for a, b in zip(rounded.steps, exact.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=0.05)
    state = torch.load(tmp_path / "bf16" / "state.pt", weights_only=True)
    assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}


def _poison(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """From step ``at`` on, batches carry features that are not numbers."""
    clean = Batches.pack

    def pack(self: Batches, step: int) -> Pack:
        batch = clean(self, step)
        if step < at:
            return batch
        return dataclasses.replace(batch, features=batch.features * torch.nan)

    monkeypatch.setattr(Batches, "pack", pack)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _poison(patch, at=5)
        with pytest.raises(TrainingDiverged, match="step 5"):
            train(make_config())
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    assert state["steps_done"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    load_drafter(tmp_path / "drafter", make_config().target)  # the evaluation at step 4
    unbroken = train(make_config(work=tmp_path / "unbroken"))
    assert train(make_config()).to_json() == unbroken.to_json()


def test_a_full_disk_stops_and_keeps_the_last_checkpoint(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        train(make_config(), _kill_at(3))
    before = (tmp_path / "work" / "state.pt").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            train(make_config())
    assert (tmp_path / "work" / "state.pt").read_bytes() == before
    assert not list((tmp_path / "work").glob("*.part"))
    assert train(make_config()).steps[-1].step == 7


def test_a_disk_full_at_the_export_keeps_the_last_drafter_and_goes_on_later(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        train(make_config(), _kill_at(5))
    exported = tmp_path / "drafter"
    before = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert "model.safetensors" in before

    def full(tensors: object, metadata: object) -> bytes:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "save", full)
        patch.setattr(LearningCurve, "best", -1.0)  # every evaluation exports
        with pytest.raises(StorageFull, match="drafter"):
            train(make_config())
    assert {path.name: path.read_bytes() for path in exported.iterdir()} == before
    assert train(make_config()).steps[-1].step == 7


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_with_parameters_of_their_own_start_from_the_seed(
    make_config: MakeConfig, head: HeadKind
) -> None:
    config = make_config(shape=DrafterShape(gamma=2, head=head, markov_rank=4))
    torch.manual_seed(1)
    first = trainer.prepare(config).model
    torch.manual_seed(2)
    second = trainer.prepare(config).model
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_checkpoint_written_before_there_were_kinds_still_resumes(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    curve = train(make_config())
    identity = torch.load(tmp_path / "work" / "state.pt", weights_only=True)["identity"]
    # sha256 of the settings as the first release wrote them: no kind among them.
    config = make_config()
    shape = {k: v for k, v in dataclasses.asdict(config.shape).items() if k != "kind"}
    decides = {
        "shape": shape,
        "schedule": dataclasses.asdict(config.schedule),
        "loss": dataclasses.asdict(config.loss),
        "seed": 0,
        "held_out": 4,
        "sequences": None,
        "precision": "fp32",
        "target": folder_fingerprint(config.target),
        "data": run_module._digest(load_records(config.data, vocab_size=64, max_length=1024)),
    }
    expected = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    assert identity == expected
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    del state["elapsed_s"]
    torch.save(state, tmp_path / "work" / "state.pt")
    assert train(make_config()).to_json() == curve.to_json()


def test_a_damaged_checkpoint_is_named(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config())
    state = tmp_path / "work" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read"):
        train(make_config())


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": Schedule(num_steps=9)},
        {"shape": DrafterShape(gamma=2, markov_rank=8, draft_vocab_size=40)},
        {"precision": "bf16"},
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    make_config: MakeConfig, change: dict[str, Any]
) -> None:
    train(make_config())
    with pytest.raises(CheckpointError, match="other settings"):
        train(make_config(**change))


def test_work_of_another_target_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config())
    write_target(tmp_path / "other", seed=4)
    with pytest.raises(CheckpointError, match="differs in target"):
        train(make_config(target=tmp_path / "other"))


def test_data_of_another_target_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    write_target(tmp_path / "small", seed=4, vocab_size=32)
    with pytest.raises(DatasetError, match="vocabulary of 32"):
        train(make_config(target=tmp_path / "small", work=tmp_path / "w"))


def test_a_missing_target_and_an_empty_data_file_are_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ModelNotFound, match="no target model"):
        train(make_config(target=tmp_path / "none"))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(DatasetError, match="no usable record"):
        train(make_config(data=empty))


def test_taps_and_depth_must_exist_in_the_target(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="target_layer_ids"):
        train(make_config(shape=DrafterShape(target_layer_ids=(1, 4))))
    with pytest.raises(ConfigError, match="num_layers"):
        train(make_config(shape=DrafterShape(num_layers=5)))


def test_the_exported_drafter_computes_what_training_computed(make_config: MakeConfig) -> None:
    config = make_config(shape=DrafterShape(gamma=3, markov_rank=8, num_layers=2, head="gated"))
    train(config)
    run = trainer.prepare(config)
    load_state(config.work, identity=run.identity, model=run.model, optimiser=run.optimiser)
    exported = load_drafter(config.output, config.target)
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.bfloat16())
        batch = run.batches.pack(0)
        expected, found = block_output(run.model, batch), block_output(exported, batch)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.confidence, expected.confidence)
    assert exported.d2t.tolist() == run.model.d2t.tolist()
    assert exported.spec == run.model.spec


def test_every_head_trains(make_config: MakeConfig, tmp_path: Path) -> None:
    for head, rank in (("gated", 4), ("rnn", 4), ("none", 0)):
        shape = DrafterShape(gamma=2, head=head, markov_rank=rank)
        config = make_config(shape=shape, work=tmp_path / head, output=tmp_path / f"{head}-out")
        train(config)
        assert load_drafter(config.output, config.target).spec.head == head


def test_fewer_sequences_train_on_fewer_shards(make_config: MakeConfig, tmp_path: Path) -> None:
    run = trainer.prepare(make_config(max_sequences=5))
    assert len(run.batches._store) == 5
    assert len(run.held_out) == 4

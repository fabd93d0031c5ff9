"""What makes training faster changes nothing else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.errors import ConfigError, TrainingDiverged
from drafter_service.training import step as step_module
from drafter_service.training.batches import Batches
from drafter_service.training.config import Schedule, TrainConfig
from drafter_service.training.packing import Pack
from drafter_service.training.prefetch import Prefetch
from drafter_service.training.progress import LearningCurve
from drafter_service.training.ranks import Ranks
from drafter_service.training.trainer import StepReport, prepare, train

MakeConfig = Callable[..., TrainConfig]


def _same(found: LearningCurve, expected: LearningCurve, rel: float) -> None:
    for a, b in zip(found.steps, expected.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=rel)
        assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=10 * rel)


def test_looking_seldom_gives_the_same_curve(make_config: MakeConfig, tmp_path: Path) -> None:
    always = train(make_config(work=tmp_path / "1"))
    heard: list[int] = []
    seldom = train(
        make_config(work=tmp_path / "2", log_every=3),
        lambda report: heard.append(report.steps_done),
    )
    assert seldom.to_json() == always.to_json()
    assert heard == [2, 3, 4, 6, 8]  # every third, and where a checkpoint wants the numbers


def test_a_bad_loss_is_seen_late_but_never_saved(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(num_steps=8, sequences_per_step=3, checkpoint_every=3, evaluate_every=3)
    clean = step_module.objective

    def poisoned(*args: object) -> object:
        loss = clean(*args)  # type: ignore[arg-type]
        poisoned.calls += 1
        if poisoned.calls == 5:
            loss.total.mul_(torch.nan)
        return loss

    poisoned.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(step_module, "objective", poisoned)
    with pytest.raises(TrainingDiverged, match="at step 4"):
        train(make_config(schedule=schedule, log_every=100))
    state = torch.load(tmp_path / "work" / "state.pt", weights_only=True)
    assert state["steps_done"] == 3


def test_packs_made_ahead_are_the_same_packs(make_config: MakeConfig, tmp_path: Path) -> None:
    plain = train(make_config(work=tmp_path / "1"))
    threads: set[str] = set()
    made = Batches.pack

    def pack(self: Batches, step: int) -> Pack:
        threads.add(threading.current_thread().name)
        return made(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "pack", pack)
        ahead = train(make_config(work=tmp_path / "2", num_prefetch=3))
    assert ahead.to_json() == plain.to_json()
    assert all(name.startswith("packs") for name in threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("packs")]


def test_prefetching_goes_on_from_any_step(make_config: MakeConfig) -> None:
    batches = prepare(make_config(num_prefetch=2)).batches
    with Prefetch(batches, ahead=2, device=torch.device("cpu")) as packs:
        for step in (5, 6, 7):
            assert torch.equal(packs.get(step).anchors, batches.pack(step).anchors)


# Importing the inductor warns of torch's own use of what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_is_the_same_step(
    make_config: MakeConfig, tmp_path: Path, backend: str
) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    compiled: list[str] = []
    compile_ = torch.compile

    def watched(function: Callable[..., object], *, backend: str) -> object:
        compiled.append(backend)
        return compile_(function, backend=backend)

    plain = train(make_config(work=tmp_path / "1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", watched)
        fast = train(make_config(work=tmp_path / "2", compile_backend=backend))
    assert compiled == [backend]
    _same(fast, plain, rel=1e-4)


def test_the_ranks_of_a_step_share_its_blocks(make_config: MakeConfig) -> None:
    config = make_config()
    whole = prepare(config).batches.pack(2)
    parts = [
        Batches(
            prepare(config).batches._store,
            sequences_per_step=3,
            anchors_per_sequence=5,
            gamma=3,
            seed=config.seed,
            ranks=Ranks(rank=rank, num=2),
        ).pack(2)
        for rank in range(2)
    ]
    assert torch.equal(parts[0].anchors, whole.anchors[::2])
    assert torch.equal(parts[1].anchors, whole.anchors[1::2])
    assert torch.equal(parts[1].target_ids, whole.target_ids[1::2])
    with pytest.raises(ConfigError, match="for 4 ranks"):
        Batches(
            prepare(config).batches._store,
            sequences_per_step=3,
            anchors_per_sequence=5,
            gamma=3,
            seed=0,
            ranks=Ranks(rank=0, num=4),
        )


def test_a_budget_ends_a_run_with_everything_written(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    schedule = Schedule(
        num_steps=1000, sequences_per_step=3, evaluate_every=1000, checkpoint_every=1000
    )
    config = make_config(schedule=schedule, time_budget_s=5.0)
    now = iter(range(100))
    heard: list[StepReport] = []
    curve = train(config, heard.append, clock=lambda: float(next(now)))
    assert len(curve.steps) == 5  # the clock ticks once a step
    assert [step for step, _ in curve.evaluations] == [5]
    assert (config.output / "model.safetensors").is_file()
    assert (config.work / "curve.json").is_file()
    again = train(config, clock=lambda: float(next(now)))
    assert len(again.steps) == 5  # what is spent stays spent
    assert heard[-1].evaluation is not None


@pytest.mark.parametrize("bad", [{"log_every": 0}, {"num_prefetch": -1}, {"time_budget_s": 0.0}])
def test_impossible_values_are_refused(make_config: MakeConfig, bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        make_config(**bad)

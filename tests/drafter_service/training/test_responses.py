from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.errors import CheckpointError, ConfigError, DatasetError, StorageFull
from cluster.prompt_file import TextPrompt
from drafter_service.training.collection import (
    RESPONSES_AT_ONCE,
    CollectionProgress,
    collect,
)
from drafter_service.training.dataset import load_records
from drafter_service.training.responses import (
    Response,
    ResponseLog,
    ResponseSettings,
    ResponseTask,
    plan,
)
from drafter_service.training.shards import FeatureSequence, GeneratedFeatures

SETTINGS = ResponseSettings(
    temperatures=(0.0, 1.0), samples=2, max_new_tokens=6, max_length=40, seed=1
)
PROMPTS = [
    TextPrompt(text="a" * number, source=f"s{number % 2}", domain="all", where=f"line {number}")
    for number in range(1, 21)
]


def encode(text: str) -> tuple[int, ...]:
    return tuple(range(len(text)))


class Parrot:
    """Answers with the prompt's last id, a few times, then 9; out of order, as a batch does."""

    def __init__(self, *, fail_after: int | None = None) -> None:
        self.asked: list[ResponseTask] = []
        self._fail_after = fail_after

    def generate(self, tasks: Iterator[ResponseTask]) -> Iterator[Response]:
        held: list[ResponseTask] = []
        for task in tasks:
            self.asked.append(task)
            held.append(task)
            if len(held) == 3:
                yield self._answer(held.pop(1))
        for task in held:
            yield self._answer(task)

    def _answer(self, task: ResponseTask) -> Response:
        if self._fail_after is not None:
            if self._fail_after == 0:
                raise KeyboardInterrupt
            self._fail_after -= 1
        ids = (task.prompt[-1],) * (2 + task.seed % 3) + (9,)
        whole = torch.tensor([*task.prompt, *ids])
        features = FeatureSequence(
            ids=whole,
            num_prompt=len(task.prompt),
            features=whole[:, None].expand(-1, 4).bfloat16(),
            hidden=whole[:, None].expand(-1, 2).half(),
            log_normaliser=torch.zeros(len(whole)),
        )
        return Response(task=task, ids=ids, features=features)


def tasks_of(settings: ResponseSettings = SETTINGS) -> list[ResponseTask]:
    return plan(PROMPTS, encode, settings).tasks


def log_at(folder: Path, settings: ResponseSettings = SETTINGS) -> ResponseLog:
    return ResponseLog(folder / "responses.jsonl", target="t", settings=settings)


def test_a_plan_has_each_prompt_at_each_temperature_and_greedy_once() -> None:
    tasks = tasks_of()
    assert len(tasks) == len({task.seed for task in tasks}) == 20 * (1 + 2)
    assert {task.temperature for task in tasks} == {0.0, 1.0}
    assert sum(task.temperature == 0 for task in tasks) == 20
    assert all(task.max_new_tokens == 6 for task in tasks)
    by_prompt = {task.prompt: task.source for task in tasks}
    assert by_prompt == {encode(prompt.text): prompt.source for prompt in PROMPTS}
    assert all(0 <= task.seed < 1 << 63 for task in tasks)


def test_a_plan_depends_on_what_is_asked_and_not_on_where_it_stands() -> None:
    assert plan(PROMPTS[::-1], encode, SETTINGS).tasks == tasks_of()
    fewer = plan(PROMPTS[:5], encode, SETTINGS).tasks
    assert [task for task in tasks_of() if len(task.prompt) <= 5] == fewer
    other = plan(PROMPTS, encode, ResponseSettings(temperatures=(1.0,), seed=2)).tasks
    assert not {task.seed for task in other} & {task.seed for task in tasks_of()}


def test_the_start_of_a_plan_mixes_prompts_and_temperatures() -> None:
    start = tasks_of()[:15]
    assert {task.temperature for task in start} == {0.0, 1.0}
    assert len({task.prompt for task in start}) > 7


def test_long_prompts_get_less_room_or_are_left_out() -> None:
    settings = ResponseSettings(temperatures=(0.0,), max_new_tokens=6, max_length=20)
    room = {len(task.prompt): task.max_new_tokens for task in tasks_of(settings)}
    assert room == {n: min(6, 20 - n) for n in range(1, 19)}
    assert plan(PROMPTS, encode, settings).num_too_long == 2
    with pytest.raises(DatasetError, match="no prompt leaves room"):
        plan(PROMPTS[10:], encode, ResponseSettings(max_length=8))


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperatures": ts} for ts in ((), (-1.0,), (0.0, 1e-9), (float("nan"), 1.0), (11.0,))),
        {"samples": 0},
        {"max_new_tokens": 1},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ResponseSettings(**bad)  # type: ignore[arg-type]


def test_what_is_collected_is_training_data(tmp_path: Path) -> None:
    seen: list[CollectionProgress] = []
    collect(tasks_of(), Parrot(), log_at(tmp_path), report=seen.append)
    records = load_records(tmp_path / "responses.jsonl", vocab_size=64, max_length=40)
    assert len(records) == 60
    expected = {
        (task.prompt, (task.prompt[-1],) * (2 + task.seed % 3) + (9,), task.temperature)
        for task in tasks_of()
    }
    assert {(r.prompt, r.response, r.temperature) for r in records} == expected
    assert [p.num_done for p in seen] == list(range(1, 61))
    assert seen[-1].num_tokens == sum(len(record.response) for record in records)


def test_a_killed_collection_asks_only_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        collect(tasks_of(), Parrot(fail_after=RESPONSES_AT_ONCE + 5), log_at(tmp_path))
    log = log_at(tmp_path)
    done = set(log.done)
    assert len(done) == RESPONSES_AT_ONCE
    rest, seen = Parrot(), list[CollectionProgress]()
    collect(tasks_of(), rest, log, report=seen.append)
    assert not {task.seed for task in rest.asked} & done
    assert len(rest.asked) == 60 - RESPONSES_AT_ONCE
    assert seen[0].num_done == RESPONSES_AT_ONCE + 1
    whole = log_at(tmp_path / "unbroken")
    collect(tasks_of(), Parrot(), whole)
    assert sorted((tmp_path / "responses.jsonl").read_text().splitlines()) == sorted(
        whole.path.read_text().splitlines()
    )


def test_a_torn_last_line_is_cut_and_made_again(tmp_path: Path) -> None:
    collect(tasks_of(), Parrot(), log_at(tmp_path))
    path = tmp_path / "responses.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    log = log_at(tmp_path)
    assert len(log.done) == 59
    collect(tasks_of(), Parrot(), log)
    assert path.read_bytes() == whole


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    collect(tasks_of(), Parrot(), log_at(tmp_path))
    path = tmp_path / "responses.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], "{}\n", *lines[2:]]))
    with pytest.raises(DatasetError, match=r"responses\.jsonl:2 is damaged"):
        log_at(tmp_path)


def test_a_log_of_other_settings_or_another_target_is_refused(tmp_path: Path) -> None:
    collect(tasks_of(), Parrot(), log_at(tmp_path))
    with pytest.raises(CheckpointError, match="differs in temperatures"):
        log_at(tmp_path, ResponseSettings(temperatures=(0.5,), samples=2, max_new_tokens=6,
                                          max_length=40, seed=1))  # fmt: skip
    with pytest.raises(CheckpointError, match="differs in target"):
        ResponseLog(tmp_path / "responses.jsonl", target="u", settings=SETTINGS)
    (tmp_path / "responses.json").unlink()
    with pytest.raises(CheckpointError, match="not made by this tool"):
        log_at(tmp_path)


def test_settings_bind_with_the_first_response(tmp_path: Path) -> None:
    log_at(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "responses.json").write_text('{"target": "u"}')  # of a run that gave none
    collect(tasks_of(), Parrot(), log_at(tmp_path))
    assert len(log_at(tmp_path).done) == 60


def test_no_task_begins_after_the_budget(tmp_path: Path) -> None:
    now = iter(range(1000))
    parrot = Parrot()
    collect(tasks_of(), parrot, log_at(tmp_path), budget_s=10.0, clock=lambda: float(next(now)))
    assert len(parrot.asked) == 9  # the clock is asked at the start and before every task
    assert log_at(tmp_path).done == {task.seed for task in parrot.asked}


def test_features_come_before_the_lines_that_need_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = GeneratedFeatures(tmp_path / "f", target="t" * 64, target_layer_ids=(0, 2))
    collect(tasks_of(), Parrot(), log_at(tmp_path), features=kept)
    again = GeneratedFeatures(tmp_path / "f", target="t" * 64, target_layer_ids=(0, 2))
    records = load_records(tmp_path / "responses.jsonl", vocab_size=64, max_length=40)
    for record in records:
        found = again.find(record.ids)
        assert found is not None
        assert found.ids.tolist() == list(record.ids)
        assert found.num_prompt == len(record.prompt)
        assert found.features[:, 3].tolist() == list(record.ids)
    assert again.find((1, 2, 3, 4, 63)) is None
    other = GeneratedFeatures(tmp_path / "f", target="t" * 64, target_layer_ids=(0, 1))
    assert other.find(records[0].ids) is None


@pytest.mark.parametrize("with_features", [False, True])
def test_a_full_disk_keeps_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_features: bool
) -> None:
    collect(tasks_of()[:32], Parrot(), log_at(tmp_path))
    before = (tmp_path / "responses.jsonl").read_bytes()
    features = GeneratedFeatures(tmp_path / "f", target="t", target_layer_ids=(1,))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            collect(
                tasks_of(), Parrot(), log_at(tmp_path), features=features if with_features else None
            )
    assert (tmp_path / "responses.jsonl").read_bytes() == before
    assert not list((tmp_path / "f").rglob("*.safetensors"))
    collect(tasks_of(), Parrot(), log_at(tmp_path), features=features)
    assert len(log_at(tmp_path).done) == 60

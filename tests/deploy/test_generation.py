from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.errors import CheckpointError, ModelNotFound, PromptFileError, PromptTooLong
from deploy.generation import GenerationConfig, open_generator
from deploy.training import generate_responses
from drafter_service.training import trainer
from drafter_service.training.config import DrafterShape, Schedule, TrainConfig
from drafter_service.training.dataset import Record, load_records
from drafter_service.training.features import compute_features
from drafter_service.training.responses import Response, ResponseSettings, ResponseTask
from drafter_service.training.target import Target
from tests.text_targets import VOCAB, write_prompts, write_text_target

TAPS = (0, 2)
SMALL = GenerationConfig(max_requests=3, max_step_tokens=16, kv_tokens=160, max_model_len=64)
SETTINGS = ResponseSettings(temperatures=(0.0, 1.0), max_new_tokens=12, max_length=60)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_target(tmp_path_factory.mktemp("text") / "target")


def _tasks(num: int = 9) -> list[ResponseTask]:
    """Prompts of 3 to 22 ids, longer than a step at times."""
    return [
        ResponseTask(
            prompt=tuple(3 + (5 * number + i * i) % 90 for i in range(3 + 19 * number // num)),
            source="s",
            temperature=float(number % 2),
            max_new_tokens=6 + number % 5,
            seed=number,
        )
        for number in range(num)
    ]


def _generate(
    target: Path, tasks: Sequence[ResponseTask], config: GenerationConfig = SMALL
) -> dict[int, Response]:
    generator = open_generator(target, config, target_layer_ids=TAPS)
    return {response.task.seed: response for response in generator.generate(iter(tasks))}


@torch.no_grad()
def _greedy(target: Path, task: ResponseTask) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = list(task.prompt)
    while len(ids) < len(task.prompt) + task.max_new_tokens and ids[-1] != 2:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(task.prompt) :]


def test_every_task_is_answered_as_the_target_would(target: Path) -> None:
    tasks = _tasks()
    responses = _generate(target, tasks)
    assert responses.keys() == {task.seed for task in tasks}
    for task in tasks:
        ids = responses[task.seed].ids
        assert 1 <= len(ids) <= task.max_new_tokens
        assert 2 not in ids[:-1]
        if task.temperature == 0:
            assert list(ids) == _greedy(target, task)


def test_a_sampled_response_depends_on_its_task_and_not_on_the_batch(target: Path) -> None:
    tasks = _tasks()
    together = _generate(target, tasks)
    alone = _generate(target, tasks[::-1], dataclasses.replace(SMALL, max_requests=1))
    assert {s: r.ids for s, r in together.items()} == {s: r.ids for s, r in alone.items()}
    sampled = [task for task in tasks if task.temperature]
    other = _generate(target, [dataclasses.replace(task, seed=task.seed + 99) for task in sampled])
    assert any(other[t.seed + 99].ids != together[t.seed].ids for t in sampled)


def test_features_kept_on_the_way_are_those_of_a_second_forward(target: Path) -> None:
    trained = Target(target)
    for response in _generate(target, _tasks()).values():
        task, found = response.task, response.features
        assert found is not None
        record = Record(
            prompt=task.prompt, response=response.ids, temperature=task.temperature, source=""
        )
        [expected] = compute_features(trained, [record], TAPS)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.num_prompt == expected.num_prompt
        assert len(found) == len(found.features) == len(found.hidden) == len(found.log_normaliser)
        close = {"rtol": 2**-7, "atol": 1e-2}
        for name in ("features", "hidden", "log_normaliser"):
            a, b = getattr(found, name)[:-1].float(), getattr(expected, name)[:-1].float()
            torch.testing.assert_close(a, b, **close)


def test_a_task_past_the_limits_is_an_error_and_leaves_the_generator_usable(target: Path) -> None:
    generator = open_generator(target, SMALL)
    long = dataclasses.replace(_tasks(1)[0], prompt=(5,) * 64)
    with pytest.raises(PromptTooLong):
        list(generator.generate(iter([*_tasks(2), long])))
    answers = list(generator.generate(iter(_tasks(4))))
    assert len(answers) == 4
    assert all(answer.features is None for answer in answers)


def test_prompts_become_a_drafter_without_a_second_forward(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    generate_responses(
        target=target,
        prompts=write_prompts(tmp_path / "p.jsonl", 12),
        log=work / "responses.jsonl",
        settings=SETTINGS,
        generation=SMALL,
        features=work / trainer.GENERATED_FEATURES,
        taps=TAPS,
    )
    records = load_records(work / "responses.jsonl", vocab_size=VOCAB, max_length=60)
    assert len({record.prompt for record in records}) > 8
    assert all(record.prompt[0] == record.prompt[-1] == 1 for record in records)  # the template
    config = TrainConfig(
        target=target,
        data=work / "responses.jsonl",
        work=work,
        output=tmp_path / "out",
        shape=DrafterShape(gamma=2, markov_rank=4, target_layer_ids=TAPS),
        schedule=Schedule(num_steps=4, sequences_per_step=2, anchors_per_sequence=3),
        num_held_out=3,
        max_length=60,
    )
    monkeypatch.setattr(Target, "hidden_states_of", None)  # a second forward would fail
    fused = trainer.train(config)
    monkeypatch.undo()
    separate = trainer.train(dataclasses.replace(config, work=tmp_path / "separate"))
    for a, b in zip(fused.steps, separate.steps, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-2)


def test_bad_input_is_refused_before_the_target_is_loaded(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.training.open_generator", None)
    given = {
        "target": target,
        "prompts": write_prompts(tmp_path / "p.jsonl", 2),
        "log": tmp_path / "responses.jsonl",
        "settings": SETTINGS,
        "generation": SMALL,
    }
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PromptFileError, match="holds no prompt"):
        generate_responses(**{**given, "prompts": tmp_path / "empty.jsonl"})
    with pytest.raises(ModelNotFound, match="no target model"):
        generate_responses(**{**given, "target": tmp_path / "none"})
    (tmp_path / "responses.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="not made by this tool"):
        generate_responses(**given)

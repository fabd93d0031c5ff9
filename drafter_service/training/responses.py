"""Responses of the target itself: which ones are wanted, and the log that is filled with them.

A drafter learns best on text that its target would write (paper section 5.1). What to ask is a
plan, a pure function of the prompts and the settings. Answers are appended to a log in the format
of `dataset`, so a killed run goes on with what is missing. What computes them is a `Generator`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from cluster.atomic_file import append_lines, write_json
from cluster.errors import CheckpointError, ConfigError, DatasetError
from cluster.prompt_file import TextPrompt
from cluster.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from drafter_service.training.shards import FeatureSequence


@dataclass(frozen=True, kw_only=True)
class ResponseSettings:
    """How the target is asked."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    samples: int = 1
    """Responses per prompt and temperature; temperature 0 has only one to give."""
    max_new_tokens: int = 256
    max_length: int = 1024
    """Prompt and response together; longer prompts are left out."""
    seed: int = 0

    def __post_init__(self) -> None:
        sane = [t == 0 or MIN_TEMPERATURE <= t <= MAX_TEMPERATURE for t in self.temperatures]
        if not sane or not all(sane):
            raise ConfigError(
                f"temperatures {list(self.temperatures)} are out of range",
                hint=f"one or more, each 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
            )
        for name, least in (("samples", 1), ("max_new_tokens", 2)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class ResponseTask:
    """One response to be had."""

    prompt: tuple[int, ...]
    """Ids, the chat template applied, ending where the answer begins."""
    source: str
    temperature: float
    max_new_tokens: int
    seed: int
    """Of the sampling, below 2^63; it names the task: no other task of a plan has it."""


@dataclass(frozen=True, kw_only=True)
class ResponsePlan:
    """What to ask."""

    tasks: list[ResponseTask]
    num_too_long: int
    """Prompts left out because they leave no room for a response."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """A task done."""

    task: ResponseTask
    ids: tuple[int, ...]
    """The end token included where the target gave one."""
    features: FeatureSequence | None
    """What the target computed on the way, where that was asked for."""


class Generator(Protocol):
    """The target, decoding."""

    def generate(self, tasks: Iterator[ResponseTask]) -> Iterator[Response]:
        """Answer every task, in any order; tasks are taken as there is room for them.

        Raises:
            DSparkError: the target cannot serve a task.
        """
        ...


def plan(
    prompts: Sequence[TextPrompt],
    encode: Callable[[str], tuple[int, ...]],
    settings: ResponseSettings,
) -> ResponsePlan:
    """Every response wanted, in an order that mixes prompts and temperatures.

    A plan cut short anywhere is a fair sample of the whole one; the order is fixed by the seeds,
    which depend on a prompt's ids and not on its place in the file.

    Args:
        encode: chat template and tokenizer of the target.

    Raises:
        DatasetError: no prompt leaves room for a response.
    """
    tasks: dict[int, ResponseTask] = {}
    num_too_long = 0
    for prompt in prompts:
        ids = encode(prompt.text)
        room = min(settings.max_new_tokens, settings.max_length - len(ids))
        if room < 2:
            num_too_long += 1
            continue
        for temperature in settings.temperatures:
            for sample in range(settings.samples if temperature else 1):
                seed = _seed(ids, temperature, sample, settings.seed)
                tasks[seed] = ResponseTask(
                    prompt=ids,
                    source=prompt.source,
                    temperature=temperature,
                    max_new_tokens=room,
                    seed=seed,
                )
    if not tasks:
        raise DatasetError(
            f"no prompt leaves room for a response within {settings.max_length} tokens",
            hint="raise the maximal length",
        )
    return ResponsePlan(tasks=[tasks[seed] for seed in sorted(tasks)], num_too_long=num_too_long)


class ResponseLog:
    """An append-only file of responses beside a note of what it was made with.

    Args:
        path: of the log, ``.jsonl``; the note is the ``.json`` beside it, written with the first
            response: settings that gave none bind nobody.
        target: fingerprint of the target.
        settings: what all responses of the log share. Which prompts are asked may change.

    Raises:
        CheckpointError: the log was made by another target or with other settings.
        DatasetError: a line is damaged (a torn last one is cut off: it was never finished).
    """

    def __init__(self, path: Path, *, target: str, settings: ResponseSettings) -> None:
        self.path = path
        self._note = json.loads(json.dumps({"target": target, **asdict(settings)}))
        self._check_note()
        self.done: set[int] = set()
        """Seeds of the tasks whose responses are in the log."""
        self.num_tokens = 0
        """Response tokens in the log."""
        self._read()

    def append(self, responses: Sequence[Response]) -> None:
        """Add responses, synced to the disk.

        Raises:
            StorageFull: no room; what the log held before is still there.
        """
        if not self.done:
            write_json(self._note_path, self._note)
        append_lines(self.path, [_line(response) for response in responses])
        self.done.update(response.task.seed for response in responses)
        self.num_tokens += sum(len(response.ids) for response in responses)

    def missing(self, tasks: Iterable[ResponseTask]) -> list[ResponseTask]:
        """Those whose response is not here yet, in order."""
        return [task for task in tasks if task.seed not in self.done]

    @property
    def _note_path(self) -> Path:
        return self.path.with_suffix(".json")

    def _check_note(self) -> None:
        if not self.path.is_file():
            return
        if not self._note_path.is_file():
            raise CheckpointError(
                f"{self.path} was not made by this tool: {self._note_path.name} is missing",
                hint="train on it with --data, or choose another work folder",
            )
        found = json.loads(self._note_path.read_text(encoding="utf-8"))
        different = [name for name in self._note if found.get(name) != self._note[name]]
        if different:
            raise CheckpointError(
                f"{self.path} was made with other settings (differs in {', '.join(different)})",
                hint="choose another work folder, or delete this file and its .json",
            )

    def _read(self) -> None:
        if not self.path.is_file():
            return
        _cut_torn_line(self.path)
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    raw = json.loads(line)
                    self.done.add(int(raw["seed"]))
                    self.num_tokens += len(raw["response"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DatasetError(
                        f"{self.path}:{number} is damaged ({type(error).__name__}: {error})",
                        hint="delete the line; its response will be made again",
                    ) from error


def _seed(ids: tuple[int, ...], temperature: float, sample: int, seed: int) -> int:
    named = json.dumps([list(ids), temperature, sample, seed])
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1


def _line(response: Response) -> str:
    task = response.task
    return json.dumps(
        {
            "prompt": task.prompt,
            "response": response.ids,
            "t": task.temperature,
            "source": task.source,
            "seed": task.seed,
        }
    )


def _cut_torn_line(path: Path) -> None:
    """Drop what follows the last line end: a kill or a full disk left it."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end < len(whole):
        with path.open("r+b") as file:
            file.truncate(end)

"""Prompt files: what a model is asked offline, for training, calibration and evaluation.

One JSON object a line: ``prompt`` (text), or ``turns`` (a list of texts, of which the first is
used), with optional labels ``source`` and ``domain``. Other keys are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.errors import PromptFileError
from cluster.json_text import parse_json

_FORMAT: Final = 'a line is {"prompt": "..."} or {"turns": ["...", ...]}'


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """One user message."""

    text: str
    source: str
    """Data set that it comes from; the file's name without one."""
    domain: str
    """Kind of task, e.g. math, code, chat; ``all`` without one."""
    where: str
    """File and line, for messages."""


def read_prompts(path: Path, *, limit_per_source: int | None = None) -> list[TextPrompt]:
    """All prompts of a file, in order.

    Args:
        limit_per_source: most prompts of a source, the first ones; None takes all.

    Raises:
        PromptFileError: no such file, a line that is no prompt, or none at all; names the line.
    """
    prompts = [_prompt(record, where, path.stem) for where, record in _records(path)]
    if not prompts:
        raise PromptFileError(f"{path} holds no prompts", hint=_FORMAT)
    taken: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        taken[prompt.source] += 1
        if limit_per_source is None or taken[prompt.source] <= limit_per_source:
            kept.append(prompt)
    return kept


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of the file, each with the place to name when it is wrong."""
    try:
        # Not splitlines: it also breaks at characters that JSON strings may hold, as U+2028.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptFileError(
            f"cannot read the prompt file {path}: {reason}", hint="pass a .jsonl file"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise PromptFileError(f"{where}: not JSON: {error}", hint=_FORMAT) from error
        if not isinstance(record, dict):
            raise PromptFileError(f"{where}: expected an object", hint=_FORMAT)
        yield where, record


def _prompt(record: dict[str, Any], where: str, stem: str) -> TextPrompt:
    text = record.get("prompt")
    if text is None:
        turns = record.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(text, str) or not text.strip():
        raise PromptFileError(f"{where}: no prompt", hint=_FORMAT)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: JSON can write it
        raise PromptFileError(f"{where}: the text is not Unicode", hint=_FORMAT) from error
    return TextPrompt(
        text=text,
        source=_label(record, "source", stem, where),
        domain=_label(record, "domain", "all", where),
        where=where,
    )


def _label(record: dict[str, Any], name: str, default: str, where: str) -> str:
    label = record.get(name, default)
    # Labels go to terminals and pictures as they are: no control characters.
    if not isinstance(label, str) or not label or not label.isprintable():
        raise PromptFileError(f"{where}: {name} is {label!r}, expected a word", hint=_FORMAT)
    return label

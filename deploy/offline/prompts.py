"""Prompts of an offline run: a JSONL file, through the target's chat template, as token ids."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import PromptFileError
from deploy.text_model import TextModel


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of an offline run."""

    ids: tuple[int, ...]
    source: str
    """Data set that it comes from."""
    domain: str
    """Kind of task, e.g. math, code, chat."""


def load_prompts(
    path: Path, text: TextModel, *, limit_per_source: int | None = None
) -> list[Prompt]:
    """Read one JSON object a line: ``prompt`` (text) or ``turns`` (of which the first is taken),
    with optional labels ``source`` and ``domain``.

    Args:
        text: the target's tokenizer and chat template; without a template the text is continued.
        limit_per_source: most prompts of a source, the first ones; None takes all.

    Raises:
        PromptFileError: no such file, a line that is no such object, or no prompts at all.
    """
    taken: Counter[str] = Counter()
    prompts = []
    for where, record in _records(path):
        source = _label(record, "source", path.stem, where)
        if limit_per_source is not None and taken[source] >= limit_per_source:
            continue
        taken[source] += 1
        words = _words(record, where)
        if text.chat_template is None:
            ids = text.encode(words)
        else:
            ids = text.encode_chat([{"role": "user", "content": words}])
        prompts.append(
            Prompt(ids=ids, source=source, domain=_label(record, "domain", "all", where))
        )
    if not prompts:
        raise PromptFileError(f"{path} holds no prompts", hint='one {"prompt": "..."} a line')
    return prompts


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of the file, each with the place to name when it is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PromptFileError(f"cannot read the prompt file {path}: {reason}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise PromptFileError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise PromptFileError(f"{path}, line {number}: expected an object")
        yield f"{path}, line {number}", record


def _words(record: dict[str, Any], where: str) -> str:
    words = record.get("prompt")
    if words is None:
        turns = record.get("turns")
        words = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(words, str) or not words.strip():
        raise PromptFileError(
            f"{where}: no prompt", hint="a text under 'prompt', or a list of texts under 'turns'"
        )
    return words


def _label(record: dict[str, Any], name: str, default: str, where: str) -> str:
    label = record.get(name, default)
    if not isinstance(label, str) or not label:
        raise PromptFileError(f"{where}: {name} is {label!r}, expected a word")
    return label

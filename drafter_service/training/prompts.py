"""Prompt files: what the target is asked, as text.

One JSON object per line: ``prompt`` (text), or ``turns`` (a list of texts, of which the first is
used); ``source`` is a free label, other keys are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import DatasetError


@dataclass(frozen=True, kw_only=True)
class TextPrompt:
    """One user message."""

    text: str
    source: str


def load_prompts(path: Path) -> list[TextPrompt]:
    """Read a prompt file, in order; a text that comes again is kept once.

    Raises:
        DatasetError: the file is missing, empty, or a line is not a prompt; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DatasetError(f"no prompt file at {path}", hint="pass a .jsonl file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}") from error
    prompts: dict[str, TextPrompt] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _parse(line, f"{path}:{number}")
            prompts.setdefault(prompt.text, prompt)
    if not prompts:
        raise DatasetError(f"{path} holds no prompt", hint=_FORMAT)
    return list(prompts.values())


def _parse(line: str, where: str) -> TextPrompt:
    try:
        raw: Any = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{where} is not JSON: {error}", hint=_FORMAT) from error
    if not isinstance(raw, dict):
        raise DatasetError(f"{where} is not a JSON object", hint=_FORMAT)
    text = raw.get("prompt")
    if text is None and isinstance(raw.get("turns"), list) and raw["turns"]:
        text = raw["turns"][0]
    if not isinstance(text, str) or not text.strip():
        raise DatasetError(f"{where} has no text in `prompt` or `turns`", hint=_FORMAT)
    return TextPrompt(text=text, source=str(raw.get("source", "")))


_FORMAT = 'a line is {"prompt": "..."} or {"turns": ["...", ...]}'

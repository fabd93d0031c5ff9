"""Prompts of an offline run: a JSONL file, through the target's chat template, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.errors import InvalidRequest, PromptFileError, PromptTooLong
from cluster.prompt_file import read_prompts
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
    """Read a prompt file (see `cluster.prompt_file`).

    Args:
        text: the target's tokenizer and chat template; without a template the text is continued.
        limit_per_source: most prompts of a source, the first ones; None takes all.

    Raises:
        PromptFileError: no such file, a line that is no prompt, or none at all.
        PromptTooLong: one leaves the target no room for an answer.
    """
    prompts = []
    for asked in read_prompts(path, limit_per_source=limit_per_source):
        ids = _ids(asked.text, text, asked.where)
        prompts.append(Prompt(ids=ids, source=asked.source, domain=asked.domain))
    return prompts


def prompt_ids(words: str, text: TextModel) -> tuple[int, ...]:
    """A user's message as the target reads it; a target without a chat template continues it.

    Raises:
        InvalidRequest: the template refuses it.
    """
    if text.chat_template is None:
        return text.encode(words)
    return text.encode_chat([{"role": "user", "content": words}])


def _ids(words: str, text: TextModel, where: str) -> tuple[int, ...]:
    try:
        ids = prompt_ids(words, text)
    except InvalidRequest as error:
        raise PromptFileError(f"{where}: {error.message}", hint=error.hint) from error
    if len(ids) >= text.max_positions:
        raise PromptTooLong(
            f"{where}: {len(ids)} tokens leave no room for one more",
            hint=f"the limit is {text.max_positions} with the answer; take the line out",
        )
    return ids

"""The text side of a target: tokenizer, chat template, end-of-sequence ids, limits.

Read from a Hugging Face folder without transformers or torch: a router replica needs neither.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from cluster.errors import CheckpointError, InvalidRequest, Unsupported
from cluster.json_text import parse_json

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """What turns requests into ids and ids into text."""

    tokenizer: Tokenizer
    chat_template: jinja2.Template | None
    special_tokens: Mapping[str, str]
    """``bos_token`` and the like, for the template."""
    eos_ids: tuple[int, ...]
    vocab_size: int
    """Rows of the target's head, what token ids are checked against."""
    max_positions: int

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of plain text, with the special tokens that the tokenizer adds by itself.

        Raises:
            InvalidRequest: the text is not Unicode.
        """
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation, ending where the assistant's answer begins.

        Raises:
            Unsupported: the model has no chat template.
            InvalidRequest: the template refuses these messages, or one is not Unicode.
        """
        if self.chat_template is None:
            raise Unsupported("this model has no chat template", hint="send text or token ids")
        try:
            text = self.chat_template.render(
                messages=list(messages), add_generation_prompt=True, **self.special_tokens
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError as error:  # JSON can spell half of a surrogate pair, UTF-8 cannot
            raise InvalidRequest("the text is not Unicode: half of a surrogate pair") from error


def load_text_model(folder: Path) -> TextModel:
    """Read the text side of the model in ``folder``.

    Raises:
        CheckpointError: a file is missing or lacks a field; names it.
    """
    config = _read(folder, "config.json", required=True)
    tokenizer_config = _read(folder, "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{folder / 'tokenizer.json'}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextModel(
        tokenizer=tokenizer,
        chat_template=_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
        eos_ids=load_eos_ids(folder),
        vocab_size=_positive(config, "vocab_size", folder),
        max_positions=_positive(config, "max_position_embeddings", folder),
    )


def load_eos_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer of the model in ``folder``: of its generation config, else its own.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    config = _read(folder, "config.json", required=True)
    generation = _read(folder, "generation_config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)


def _template(folder: Path, tokenizer_config: Mapping[str, Any]) -> jinja2.Template | None:
    """``chat_template.jinja``, else that of tokenizer_config.json (maybe a list of named ones)."""
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        source = {item["name"]: item["template"] for item in source}.get("default")
    if source is None:
        return None
    # The dialect that published templates are written in.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{folder}: chat template: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _positive(config: Mapping[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value <= 0:
        raise CheckpointError(f"{folder / 'config.json'}: {name} is {value!r}, expected a count")
    return value


def _read(folder: Path, name: str, *, required: bool = False) -> dict[str, Any]:
    path = folder / name
    if not path.is_file() and not required:
        return {}
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object")
    return value

"""Between Python values and `dspark.v1` messages: requests, chunks, usage."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypedDict

from cluster.api import dspark_v1_pb2 as pb
from cluster.errors import DSparkError, InvalidRequest
from cluster.json_text import parse_json
from dspark.constraint_options import constraint_of

_MODES: Final = {"coupled": pb.MODE_COUPLED, "rejection": pb.MODE_REJECTION}
_SAMPLING: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
)

_PLAIN: Final = (
    "max_tokens",
    "ignore_eos",
    "draft",
    "deadline_s",
    "stop",
    "stop_token_ids",
    "target_tokens_per_s",
    "tier",
    "adapter",
)


class Options(TypedDict, total=False):
    """Keyword options of `generate`. What is left out takes the server's default."""

    max_tokens: int
    """Most new tokens."""
    temperature: float
    """0, the default, is greedy."""
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    mode: str
    """``coupled`` or ``rejection``."""
    logprobs: bool
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    draft: bool
    """False: decode plainly."""
    deadline_s: float
    """Seconds after which the server ends the request with `DeadlineExceeded`."""
    target_tokens_per_s: float
    """New tokens per second that the request should get."""
    tier: str
    """``standard``, ``interactive`` or ``batch``: how much the request counts beside others."""
    json_schema: Mapping[str, Any] | str
    """The answer is JSON that fits this schema: a mapping, or its JSON text. This and the next four
    exclude each other; the server's engine may refuse a kind with `Unsupported`."""
    json_object: bool
    """The answer is any JSON object. False: nothing is asked."""
    regex: str
    """The whole answer matches this regular expression, in the dialect of the server's engine."""
    choice: Sequence[str]
    """The answer is one of these texts."""
    grammar: str
    """The answer follows this grammar, in EBNF."""
    adapter: str
    """Name of the target's LoRA adapter, as in the server's ``verifier.adapters``."""
    request_id: str


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost. Draft counts: sent by drafters, sent to the target, kept by it."""

    prompt_tokens: int
    completion_tokens: int
    rounds: int
    proposed: int
    verified: int
    accepted: int
    ttft_s: float
    total_s: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One round's output. The last one has ``finish_reason`` and ``usage``."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    usage: Usage | None


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a server serves."""

    model: str
    drafter: str
    max_model_len: int
    vocab_size: int
    verifiers: int
    drafters: int
    version: str
    metrics: dict[str, float] = field(default_factory=dict)


def build_request(
    prompt: str | None,
    messages: Sequence[Mapping[str, str]] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> pb.GenerateRequest:
    """Build a request from what a caller of `generate` gave.

    Raises:
        InvalidRequest: not exactly one of prompt, messages, token_ids; an unknown option or mode;
            a value that does not fit its field.
        BadConstraint: more than one constraint, or one of the wrong type.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise InvalidRequest("give exactly one of prompt, messages and token_ids")
    unknown = sorted(options.keys() - Options.__annotations__.keys())
    if unknown:
        raise InvalidRequest(
            f"unknown option {unknown[0]!r}", hint=f"known: {', '.join(Options.__annotations__)}"
        )
    mode = options.get("mode")
    if mode is not None and mode not in _MODES:
        raise InvalidRequest(f"mode {mode!r} is not one of {', '.join(_MODES)}")
    values: dict[str, Any] = dict(options)
    constraint = constraint_of(values)
    sampling = {name: values[name] for name in _SAMPLING if values.get(name) is not None}
    plain = {name: values[name] for name in _PLAIN if values.get(name) is not None}
    try:
        return pb.GenerateRequest(
            request_id=values.get("request_id") or uuid.uuid4().hex,
            text=prompt,
            chat=None if messages is None else pb.Chat(messages=[_message(m) for m in messages]),
            token_ids=None if token_ids is None else pb.TokenIds(ids=token_ids),
            sampling=pb.Sampling(
                mode=_MODES[mode] if mode else pb.MODE_UNSPECIFIED,
                logit_bias=values.get("logit_bias") or {},
                **sampling,
            ),
            constraint=constraint,
            **plain,
        )
    except (TypeError, ValueError, OverflowError) as error:
        odd = _misfit(pb.Sampling, sampling) or _misfit(pb.GenerateRequest, plain)
        raise InvalidRequest(f"{odd or 'a value'} does not fit the request: {error}") from error


def _misfit(message: Any, values: Mapping[str, Any]) -> str:
    """The first of these values that a message cannot hold, with its name; empty if it is none of
    them."""
    for name, value in values.items():
        try:
            message(**{name: value})
        except (TypeError, ValueError, OverflowError):
            return f"{name} {str(value)[:64]!r}"
    return ""


def _message(message: Mapping[str, str]) -> pb.Message:
    if message.keys() != {"role", "content"}:
        raise InvalidRequest(f"a message has role and content, got {sorted(message)}")
    return pb.Message(role=message["role"], content=message["content"])


def chunk_of(response: pb.GenerateResponse) -> Chunk:
    """Read one message of a stream."""
    return Chunk(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(response.logprobs),
        finish_reason=response.finish_reason,
        usage=_usage_of(response.usage) if response.finish_reason else None,
    )


def _usage_of(usage: pb.Usage) -> Usage:
    return Usage(**{name: getattr(usage, name) for name in Usage.__dataclass_fields__})


def model_of(response: pb.GetModelResponse) -> Model:
    """Read the answer to GetModel."""
    values = {name: getattr(response, name) for name in Model.__dataclass_fields__}
    return Model(**{**values, "metrics": dict(response.metrics)})


def scheduling_request(values: Mapping[str, str | float | bool]) -> pb.SetSchedulingRequest:
    """Ask for these values of ``router.scheduling``.

    Raises:
        InvalidRequest: a name or value that is no text, number or truth value.
    """
    texts: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float):
            raise InvalidRequest(f"scheduling: {name!r} cannot be {value!r}")
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return pb.SetSchedulingRequest(values=texts)


def profile_of(response: pb.GetProfileResponse) -> dict[str, Any]:
    """Read the answer to GetProfile."""
    profile = parse_json(response.json)
    if not isinstance(profile, dict):
        raise DSparkError("the server's profile is no object")
    return profile

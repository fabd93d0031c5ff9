"""From a `dspark.v1` request to the router's, and from its deltas back."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np

from cluster.api import dspark_v1_pb2 as pb
from cluster.config import RouterConfig
from cluster.constraints import KINDS, choice_text
from cluster.errors import (
    AuthError,
    BadConstraint,
    BadSamplingParameter,
    InvalidRequest,
    ModelNotFound,
    Unsupported,
)
from cluster.wire import Sampling
from deploy.text_model import TextModel
from router.request import Delta, GenerateRequest

MAX_REQUEST_ID_CHARS: Final = 128
_ROLES: Final = ("system", "user", "assistant")
_MODES: Final = {pb.MODE_COUPLED: "coupled", pb.MODE_REJECTION: "rejection"}


def check_call(metadata: Sequence[tuple[str, str]], *, token: str, application: str) -> None:
    """Refuse a call that does not carry the cluster's token, where there is one, or that names
    another application: Serve takes any name for its only one's.

    Raises:
        AuthError: no token, or another one.
        ModelNotFound: another application.
    """
    carried = dict(metadata)
    if token:
        _check_token(carried.get("authorization", ""), token)
    asked = carried.get("application", "")
    if asked not in ("", application):
        raise ModelNotFound(f"no application {asked[:64]!r} here", hint=f"there is {application}")


def _check_token(given: str, token: str) -> None:
    # compare_digest wants ASCII or bytes; a header may hold anything.
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise AuthError(
            "wrong token" if given else "no token", hint="set DSPARK_TOKEN to the server's token"
        )


def build_request(
    message: pb.GenerateRequest, text_model: TextModel, router: RouterConfig, new_id: str
) -> GenerateRequest:
    """Tokenize a request. Ranges and lengths are checked where it is admitted (`router.admission`).

    Args:
        new_id: the request's id if it names none.

    Raises:
        InvalidRequest: no input, an unknown role, or a value that the router's form cannot hold.
        BadConstraint: a constraint that is none.
        Unsupported: chat messages for a model without a chat template, or an unknown mode.
    """
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"request_id is longer than {MAX_REQUEST_ID_CHARS} characters")
    kind, constraint = _constraint(message)
    return GenerateRequest(
        request_id=message.request_id or new_id,
        ids=_prompt_ids(message, text_model),
        sampling=_sampling(message.sampling, router.default_mode),
        max_new_tokens=(
            message.max_tokens if message.HasField("max_tokens") else router.default_max_tokens
        ),
        stop_ids=tuple(message.stop_token_ids),
        stop_strings=tuple(message.stop),
        ignore_eos=message.ignore_eos,
        draft=message.draft if message.HasField("draft") else True,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        target_rate=_target_rate(message),
        tier=message.tier,
        constraint_kind=kind,
        constraint=constraint,
        adapter=message.adapter,
    )


def build_response(
    request: GenerateRequest, delta: Delta, *, ttft_s: float, total_s: float
) -> pb.GenerateResponse:
    """One delta as a message; usage goes with the last one."""
    response = pb.GenerateResponse(
        request_id=request.request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        finish_reason=delta.finish_reason,
    )
    if delta.finish_reason:
        usage = delta.usage
        response.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=usage.num_prompt_tokens,
                completion_tokens=usage.num_completion_tokens,
                rounds=usage.num_rounds,
                proposed=usage.num_proposed,
                verified=usage.num_verified,
                accepted=usage.num_accepted,
                ttft_s=ttft_s,
                total_s=total_s,
                seed=request.sampling.seed,
            )
        )
    return response


def _target_rate(message: pb.GenerateRequest) -> float:
    """Tokens/s; 0 inside means none, so that nobody may ask for it."""
    if not message.HasField("target_tokens_per_s"):
        return 0.0
    rate: float = message.target_tokens_per_s
    if not rate > 0:
        raise InvalidRequest(f"target_tokens_per_s {rate}", hint="over 0; absent for no target")
    return rate


def _constraint(message: pb.GenerateRequest) -> tuple[str, str]:
    """Kind and text, as `cluster.constraints` has them; both empty for none."""
    if not message.HasField("constraint"):
        return "", ""
    given = message.constraint
    kind = given.WhichOneof("kind")
    if kind is None:  # or one of a later release
        raise BadConstraint("constraint: of no known kind", hint=f"set one of {', '.join(KINDS)}")
    if kind == "json_object" and not given.json_object:
        raise BadConstraint("json_object: false", hint="true, or no constraint at all")
    texts = {
        "json_schema": given.json_schema,
        "json_object": "",
        "regex": given.regex,
        "choice": choice_text(given.choice.texts),
        "grammar": given.grammar,
    }
    return kind, texts[kind]


def _prompt_ids(message: pb.GenerateRequest, text_model: TextModel) -> tuple[int, ...]:
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("no input", hint="set one of text, token_ids and chat")
    if kind == "text":
        return text_model.encode(message.text)
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    return text_model.encode_chat(_messages(message.chat))


def _messages(chat: pb.Chat) -> list[dict[str, str]]:
    if not chat.messages:
        raise InvalidRequest("chat: no messages", hint="send at least one message")
    for i, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"chat.messages[{i}].role {message.role!r}", hint=f"one of {', '.join(_ROLES)}"
            )
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _sampling(message: pb.Sampling, default_mode: str) -> Sampling:
    if message.mode not in (pb.MODE_UNSPECIFIED, *_MODES):
        raise Unsupported(f"sampling.mode {message.mode}", hint="MODE_COUPLED or MODE_REJECTION")
    if message.top_k < 0:
        raise BadSamplingParameter(f"top_k {message.top_k} is out of range", hint="0 for all")
    bias = sorted(message.logit_bias.items())
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        bias_ids=np.array([token_id for token_id, _ in bias], np.int32),
        bias_values=np.array([value for _, value in bias], np.float32),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        mode=_MODES.get(message.mode, default_mode),
        logprobs=message.logprobs,
    )

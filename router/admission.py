"""Admission: what is refused at once, and the bounded queue of what is not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from cluster.adapter_name import check_adapter
from cluster.constraints import check_constraint
from cluster.errors import (
    BadConstraint,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    TokenOutOfVocabulary,
)
from cluster.sampling import check_sampling
from cluster.tiers import check_service
from router.request import GenerateRequest

MAX_ID_CHARS: Final = 256
MAX_STOP_CHARS: Final = 1024
MAX_STOP_IDS: Final = 1000
MAX_STOP_STRINGS: Final = 64
_LEAST_RETRY_S: Final = 0.1
_MOST_RETRY_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What the target model takes."""

    vocab_size: int
    max_model_len: int
    """Most positions of one request, prompt included."""
    eos_ids: tuple[int, ...]
    fingerprint: str
    """Of the target's checkpoint: verifiers that hold another one are not used."""


def check_request(request: GenerateRequest, limits: ModelLimits) -> int:
    """Refuse what can never be served.

    Returns:
        How many tokens it may emit: its own maximum, or what the context leaves it.

    Raises:
        PromptTooLong: no room for a single token.
        TokenOutOfVocabulary: a prompt or stop id that the model does not have.
        BadSamplingParameter: see `cluster.sampling.check_sampling`.
        BadConstraint: see `cluster.constraints.check_constraint`.
        UnknownAdapter: a name that no adapter can have.
        InvalidRequest: anything else that is out of range.
    """
    check_sampling(request.sampling, limits.vocab_size)
    if not 1 <= len(request.request_id) <= MAX_ID_CHARS:
        raise InvalidRequest(
            f"request id of {len(request.request_id)} characters", hint=f"1 to {MAX_ID_CHARS}"
        )
    if not request.ids:
        raise InvalidRequest("the prompt is empty", hint="send at least one token")
    for name, ids in (("prompt", request.ids), ("stop", request.stop_ids)):
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise TokenOutOfVocabulary(
                    f"{name} id {token}", hint=f"ids are in 0..{limits.vocab_size - 1}"
                )
    room = limits.max_model_len - len(request.ids)
    if room < 1:
        raise PromptTooLong(
            f"prompt of {len(request.ids)} tokens",
            hint=f"at most {limits.max_model_len - 1} leave room for an answer",
        )
    if request.max_new_tokens < 1:
        raise InvalidRequest(f"max_tokens {request.max_new_tokens}", hint="at least 1")
    if request.deadline_s is not None and not 0 < request.deadline_s < math.inf:
        raise InvalidRequest(
            f"deadline of {request.deadline_s} s", hint="must be over 0 and finite"
        )
    check_service(request.target_rate, request.tier)
    check_adapter(request.adapter)
    _check_constraint(request)
    if len(request.stop_ids) > MAX_STOP_IDS or len(request.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"{len(request.stop_ids)} stop ids and {len(request.stop_strings)} stop strings",
            hint=f"at most {MAX_STOP_IDS} and {MAX_STOP_STRINGS}",
        )
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in request.stop_strings):
        raise InvalidRequest(
            "a stop string of bad length", hint=f"1 to {MAX_STOP_CHARS} characters"
        )
    return min(request.max_new_tokens, room)


def _check_constraint(request: GenerateRequest) -> None:
    check_constraint(request.constraint_kind, request.constraint)
    if request.constraint_kind and request.ignore_eos:
        raise BadConstraint(
            f"{request.constraint_kind} with ignore_eos: nothing else ends such an answer",
            hint="leave one of them out",
        )


class Sized(Protocol):
    """What the queue has to know of a request."""

    @property
    def max_len(self) -> int:
        """Prompt plus new tokens."""
        ...


T = TypeVar("T", bound=Sized)


class WaitingQueue(Generic[T]):
    """Requests that wait for a lane, first come first served, bounded in number and in tokens.

    Args:
        max_requests: most requests waiting.
        max_tokens: most prompt plus new tokens of all of them; one request alone may have more.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tickets: deque[T] = deque()
        self._taken_at: float | None = None
        self._interval_s = 1.0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._tickets))

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting requests may come to."""
        return sum(ticket.max_len for ticket in self._tickets)

    def push(self, ticket: T) -> None:
        """Take a new request.

        Raises:
            Overloaded: no room; says when to come again.
        """
        full = len(self._tickets) >= self._max_requests
        if full or (self._tickets and self.num_tokens + ticket.max_len > self._max_tokens):
            raise Overloaded(
                f"{len(self._tickets)} requests of {self.num_tokens} tokens are waiting",
                retry_after_s=min(max(self._interval_s, _LEAST_RETRY_S), _MOST_RETRY_S),
            )
        self._tickets.append(ticket)

    def push_front(self, ticket: T) -> None:
        """Take a request back that has been admitted before; never refused."""
        self._tickets.appendleft(ticket)

    def remove(self, ticket: T, now: float) -> None:
        """The request was placed, or ended while waiting. Unknown ones are ignored."""
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        if self._taken_at is not None:
            self._interval_s += 0.2 * (now - self._taken_at - self._interval_s)
        self._taken_at = now

"""The seam between a verifier replica and the engine that computes: plain data in, plain data out.

Two engines stand behind it: ours on torch (`verifier_service.torch_engine`), and vLLM. The replica
(`verifier_service.node`) owns lease, streams and draft links; the engine owns weights, target KV,
sampling state and the tokens of its requests. An engine never calls back and does no I/O.

Shape legend: D draft hidden size, T rows newly committed in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from cluster.wire import Admission, Step, StepResult


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine can hold and do."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_requests: int
    max_step_tokens: int
    kv_block_tokens: int
    kv_blocks: int
    platform: str = ""
    """Engine, device and what else decides how fast it is: what a step profile holds for."""
    constraint_kinds: tuple[str, ...] = ()
    """Those of `cluster.constraints.KINDS` that it can hold an answer to."""
    adapters: tuple[str, ...] = ()
    """Names of the target's LoRA adapters."""


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step to be timed: verify rows of equal width, the last one perhaps short, and perhaps a
    prompt chunk; each with as many positions before it."""

    num_tokens: int
    """Of the verify rows, anchors included."""
    row_tokens: int = 8
    """Of a row: an anchor and a block of 7."""
    context: int
    num_prefill: int = 0

    @property
    def spans(self) -> tuple[int, ...]:
        """Tokens of each row, then of the chunk."""
        full, rest = divmod(self.num_tokens, self.row_tokens)
        return (self.row_tokens,) * full + tuple(n for n in (rest, self.num_prefill) if n)

    @property
    def num_rows(self) -> int:
        """Verify rows."""
        return -(-self.num_tokens // self.row_tokens)

    @property
    def sum_context(self) -> int:
        """As `StepResult.sum_context`."""
        return sum(self.context + n for n in self.spans)

    @property
    def num_pairs(self) -> int:
        """As `StepResult.num_pairs`."""
        return sum(num_pairs(self.context, n) for n in self.spans)


def num_pairs(first: int, num_tokens: int) -> int:
    """Pairs of a token and a position that it attends to, of a span that starts at ``first``."""
    return num_tokens * first + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, kw_only=True)
class CommittedRows:
    """Rows that one step committed for one request, ready for its draft session.

    Rows cover positions ``first_position .. first_position + len(ids) - 1``; ``ids`` are those of
    the positions one later (see `cluster.wire.Commit`); ``features`` are projected, [T, D], None
    when the engine has no projection (no drafter, or a feature-free one).
    """

    rid: int
    first_position: int
    ids: tuple[int, ...]
    digest: int
    """Of all committed ids up to and including the last of ``ids``."""
    features: Tensor | None
    prefill_done: bool
    """False for a prompt chunk that is not the last: no anchor yet, nothing to draft."""
    finished: bool
    """The request ended in this step: the draft session needs no more commits."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step gives back: the router's frame, and what goes to the drafters."""

    result: StepResult
    committed: tuple[CommittedRows, ...]
    gauges: Mapping[str, float] = field(default_factory=dict)
    """How full what the engine keeps is, by name: the replica shows them in the directory."""


class Engine(Protocol):
    """One target model. Calls come one at a time, from one thread."""

    @property
    def limits(self) -> EngineLimits:
        """Fixed at load."""
        ...

    def check(self, admission: Admission) -> None:
        """Refuse what cannot be served.

        Raises:
            Unsupported: a sampling feature, a kind of constraint, or adapters, that it lacks.
            InvalidRequest: ids out of vocabulary, too long a prompt, a bad parameter, a constraint
                that it cannot compile, an adapter that it does not have.
        """
        ...

    def step(self, step: Step) -> StepOutcome:
        """Release, admit, then run one ragged forward over verify rows and prompt chunks.

        A row that does not fit the engine's state (unknown request, wrong anchor or digest, bad
        ids) becomes a `Failure` with code ``StaleFrame`` or ``FrameError`` and changes nothing;
        the other rows go on. `Step.rebinds` are the node's business and ignored here.
        """
        ...

    def release_all(self) -> None:
        """Drop every request (lease lost or expired)."""
        ...

    def measure_step(self, shape: StepShape) -> float:
        """Seconds of one step of this shape (profiling).

        Only legal while the engine holds no request.

        Raises:
            InvalidRequest: past the limits of a step or of a request.
        """
        ...

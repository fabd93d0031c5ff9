"""Frames between a router's lane and its verifier: the lease, one step, its result.

Shape legend: R verify rows, N result rows, T tokens (all rows concatenated), K sparse-q width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.wire.fields import (
    F32,
    I32,
    I64,
    U8,
    U64,
    Frame,
    Record,
    array,
    column,
    items,
    natural,
    string,
)
from cluster.wire.limits import (
    MAX_CONSTRAINT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_ROWS,
    MAX_TIERS,
    MAX_TOKENS,
)
from cluster.wire.sampling import Sampling

# ruff: noqa: RUF009 - `array` and `column` make dataclass fields

FINISH_NONE: Final = 0
FINISH_STOP: Final = 1
FINISH_LENGTH: Final = 2
FINISH_REASONS: Final = ("", "stop", "length")


@dataclass(frozen=True, kw_only=True, eq=False)
class Acquire(Frame):
    """Ask a verifier for the lease of itself. Answered by `Lease` or by `Refused`."""

    lane_id: str = string()
    """Member id of the router replica (drafters address its stream by it)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Admission(Record):
    """A request that the verifier shall prefill and then keep until released.

    ``ids`` is the prompt, followed by tokens already emitted when the request is being
    continued after a fault; ``num_prompt`` says where the prompt ends. ``max_new_tokens``
    counts from the prompt's end.
    """

    rid: int = natural()
    ids: I32 = array("i4", limit=MAX_PROMPT_TOKENS)
    num_prompt: int = natural(MAX_PROMPT_TOKENS)
    max_new_tokens: int = natural(MAX_PROMPT_TOKENS)
    stop_ids: I32 = array("i4", limit=1024)
    sampling: Sampling
    drafter_id: str = string()
    """Empty: no drafter, plain decoding."""
    drafter_address: str = string()
    session_epoch: int = natural(1 << 31)
    want_draft: bool
    constraint_kind: str = field(default="", metadata={"limit": 16})
    """One of `cluster.constraints.KINDS`; empty: any answer. Tokens already emitted have advanced
    the constraint's state."""
    constraint: str = field(default="", metadata={"limit": MAX_CONSTRAINT_CHARS})
    """Its text, see `cluster.constraints`."""
    adapter: str = field(default="", metadata={"limit": 128})
    """Name of the LoRA adapter of the target; empty: none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rebind(Record):
    """Move a request's draft session: open it anew, from cached features, at another drafter."""

    rid: int = natural()
    drafter_id: str = string()
    """Empty: drop the session, decode plainly."""
    drafter_address: str = string()
    session_epoch: int = natural(1 << 31)
    want_draft: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Step(Frame):
    """One engine step: admit, release, rebind, then verify the rows and spend the prefill budget.

    A row of ``num_draft`` 0 is a plain decode step. Rows without q (``has_q`` 0) are one-hot.
    A plain row may be sent *ahead*: while the step runs that emits its anchor, which therefore is
    not part of its digest. If that step ends the request, the row fails as stale and means nothing.
    Requests that are neither in a row nor still prefilling are held back.
    """

    lane_epoch: int = natural()
    step_id: int = natural()
    admissions: tuple[Admission, ...] = items()
    rebinds: tuple[Rebind, ...] = items()
    releases: I64 = array("i8", limit=MAX_ROWS)
    prefill_budget: int = natural(MAX_TOKENS)
    """Most prompt tokens this step may compute beside its verify rows."""
    rid: I64 = column("i8", "R")  # R
    anchor: I32 = column("i4", "R")  # R, position of the last committed token
    digest: U64 = column("u8", "R")  # R, of ids[0..anchor]; ahead: of ids[0..anchor - 1]
    num_draft: I32 = column("i4", "R")  # R
    want_draft: U8 = column("u1", "R", most=1)  # R, ask for the next block
    draft_ids: I32 = array("i4", total_of="num_draft")  # T = sum(num_draft)
    has_q: U8 = column("u1", "R", most=1)  # R
    q_ids: I32 = array("i4", ndim=2, limit=64 * MAX_TOKENS, total_of="num_draft", where="has_q")
    """[sum of num_draft with has_q, K]"""
    q_probs: F32 = array("f4", ndim=2, limit=64 * MAX_TOKENS, most=1, shape_of="q_ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class Lease(Frame):
    """The verifier is the sender's, under this epoch, for as long as frames keep coming."""

    lane_epoch: int = natural()
    ttl_s: float
    """Without any frame from the holder for this long, the verifier frees everything."""
    max_model_len: int = natural(MAX_PROMPT_TOKENS)
    vocab_size: int = natural(1 << 24)
    max_requests: int = natural(MAX_ROWS)
    max_step_tokens: int = natural(MAX_TOKENS)
    kv_block_tokens: int = natural(1 << 16)
    kv_blocks: int = natural(1 << 40)
    profile_tokens: I32 = array("i4", limit=MAX_TIERS, rows="profile")
    """Batch sizes B (tokens to the target) measured at start, rising."""
    profile_step_s: F32 = array("f4", limit=MAX_TIERS, rows="profile")
    """Measured seconds of one step at each B, less the costs below."""
    profile_row_s: float = 0.0
    """This and the next three: `cluster.step_costs.StepCosts`."""
    profile_context_s: float = 0.0
    profile_pair_s: float = 0.0
    profile_prefill_s: float = 0.0
    profile_noise: float = 0.0
    """Relative spread of equal steps."""
    profile_fingerprint: str = field(default="", metadata={"limit": 512})
    """What it was measured with, see `cluster.fingerprint.profile_fingerprint`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Failure(Record):
    """One request of a step that could not be served; the others went on."""

    rid: int = natural()
    code: str = string()
    message: str = string(4096)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult(Frame):
    """What a step did. Rows: the verify rows, then requests whose prefill finished in it."""

    lane_epoch: int = natural()
    step_id: int = natural()
    rid: I64 = column("i8", "N")  # N
    num_accepted: I32 = column("i4", "N")  # N, draft tokens that survived
    num_emitted: I32 = column("i4", "N")  # N, new tokens, the bonus included
    token_ids: I32 = array("i4", total_of="num_emitted")  # T = sum(num_emitted)
    logprobs: F32 = array("f4", total_of="num_emitted")  # T, zeros for who did not ask
    anchor: I32 = column("i4", "N")  # N, new position of the last committed token
    digest: U64 = column("u8", "N")  # N, of ids[0..anchor]
    finish: U8 = column("u1", "N", most=len(FINISH_REASONS) - 1)  # N, index into FINISH_REASONS
    failures: tuple[Failure, ...] = items()
    unbound: I64 = array("i8", limit=MAX_ROWS)
    """Requests whose draft session is gone (drafter dead, queue full): decode plainly or rebind."""
    num_real_tokens: int = natural(MAX_TOKENS)
    num_padded_tokens: int = natural(MAX_TOKENS)
    num_prefill_tokens: int = natural(MAX_TOKENS)
    sum_context: int = natural()
    num_pairs: int = field(default=0, metadata={"limit": 1 << 62})
    """Pairs of a token and a position that it attends to; 0: not counted."""
    step_s: float
    """Seconds from taking the step up to results being known (device time on a GPU)."""
    free_kv_blocks: int = natural(1 << 40)
    pending_prefill_tokens: int = natural(1 << 40)
    """Prompt tokens still to compute; what a prefix cache is known to hold is not counted."""
    num_cached_tokens: int = field(default=0, metadata={"limit": 1 << 40})
    """Prompt tokens that the prefix cache spared requests whose prefill began in this step."""
    num_preempted: int = field(default=0, metadata={"limit": 1 << 40})
    """Requests that lost their KV in this step and will be computed again."""

"""Frames to and from a drafter: sessions open, rows are committed, blocks come back.

Shape legend: S sessions in a batch, T tokens (all rows concatenated), D draft hidden size, G gamma,
K sparse-q width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from cluster.wire.fields import F32, I32, I64, U8, U64, Frame, array, column, natural, string
from cluster.wire.limits import MAX_FRAME_BYTES, MAX_ROWS, MAX_TOKENS
from cluster.wire.sampling import Sampling

# ruff: noqa: RUF009 - `array` and `column` make dataclass fields


@dataclass(frozen=True, kw_only=True, eq=False)
class Open(Frame):
    """Start a draft session; the commits that follow bring it up to date.

    Key of a session: (lane_id, rid). An `Open` with a higher epoch replaces the session.
    """

    lane_id: str = string()
    rid: int = natural()
    epoch: int = natural(1 << 31)
    first_id: int = natural(1 << 24)
    """Token id at position 0; commits carry the ids after it."""
    sampling: Sampling


@dataclass(frozen=True, kw_only=True, eq=False)
class Commit(Frame):
    """Newly committed rows of several sessions of one lane.

    Session s brings feature rows ``first_position[s] .. + num_rows[s] - 1`` and the token ids
    of positions ``first_position[s] + 1 .. + num_rows[s]``: as many ids as rows, the last of
    which (when ``want_draft``) is the next anchor and has no row yet. Positions are contiguous
    with what the session already covers, or the session is lost.
    """

    lane_id: str = string()
    rid: I64 = column("i8", "S")  # S
    epoch: I32 = column("i4", "S")  # S
    first_position: I32 = column("i4", "S")  # S
    num_rows: I32 = column("i4", "S")  # S
    digest: U64 = column("u8", "S")  # S, of all ids up to and including the last
    want_draft: U8 = column("u1", "S", most=1)  # S
    ids: I32 = array("i4", total_of="num_rows")  # T = sum(num_rows)
    features: NDArray[Any] = array(
        "f4", "f2", "u2", ndim=2, limit=MAX_FRAME_BYTES, total_of="num_rows", or_empty=True
    )
    """[T, D] projected rows; ``u2`` holds the bits of bfloat16. Empty for feature-free drafters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Release(Frame):
    """Drop these sessions. Unknown ones are ignored: a release may cross a loss."""

    lane_id: str = string()
    rid: I64 = array("i8", limit=MAX_ROWS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks(Frame):
    """Draft blocks of several sessions of one lane, straight to the lane's router."""

    drafter_id: str = string()
    rid: I64 = column("i8", "S")  # S
    epoch: I32 = column("i4", "S")  # S
    anchor: I32 = column("i4", "S")  # S
    digest: U64 = column("u8", "S")  # S, of ids[0..anchor]
    num_draft: I32 = column("i4", "S")  # S, <= gamma (n-gram blocks may be short)
    ids: I32 = array("i4", ndim=2, rows="S")  # S, gamma
    confidence: F32 = array("f4", ndim=2, most=1, shape_of="ids")  # S, gamma; conditional
    has_q: U8 = column("u1", "S", most=1)  # S
    q_ids: I32 = array("i4", ndim=3, limit=64 * MAX_TOKENS, total_of="has_q")
    """[sessions with q, gamma, K]"""
    q_probs: F32 = array("f4", ndim=3, limit=64 * MAX_TOKENS, most=1, shape_of="q_ids")
    draft_s: float
    """Seconds the batch spent in the drafter, queueing included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lost(Frame):
    """Sessions that a drafter no longer has (expired, gap, out of memory). To lane and verifier."""

    lane_id: str = string()
    rid: I64 = column("i8", "S")
    epoch: I32 = column("i4", "S")
    reason: str = string(1024)

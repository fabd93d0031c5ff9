"""Every message between the pools, as one frozen dataclass each, with one msgpack codec.

A frame on the wire is a msgpack array ``[PROTOCOL_VERSION, frame name, {field: value}]``; a
numpy array is an extension holding dtype, shape and raw bytes. Decoding refuses unknown
frames, missing or unexpected fields, wrong types, lengths past the hard limits and non-finite
floats, negative integers and rows that do not match up, each with a `FrameError` that names the
field: whatever passes ``decode`` is well formed. Checks that need context (vocabulary, gamma,
epoch, digest) belong to the receiver.

Shape legend: R verify rows, N result rows, S sessions in a batch, T tokens (all rows
concatenated), K sparse-q width, G gamma, D draft hidden size.

Lengths per row are carried as ``num_*`` arrays beside concatenated values: no padding
crosses the wire, except ids inside a draft block, which always has gamma places.
"""

# ruff: noqa: RUF009 - `array` and `column` make dataclass fields

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from cluster.errors import FrameError, FrameTooLarge, ProtocolMismatch

PROTOCOL_VERSION: Final = 1

MAX_FRAME_BYTES: Final = 64 << 20
"""Hard limit of one encoded frame; both ends set their gRPC limits to it."""
MAX_COMMIT_BYTES: Final = 1 << 20
"""Senders cut `Commit` frames at about this size, so that they interleave with others."""
MAX_ROWS: Final = 1 << 14
MAX_TOKENS: Final = 1 << 20
MAX_TOP_K: Final = 1 << 24
MAX_BIASES: Final = 1024
MAX_PROMPT_TOKENS: Final = 1 << 20
MAX_TIERS: Final = 256
"""Of a throughput profile; what the router does with it goes with their square."""

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FINISH_NONE: Final = 0
FINISH_STOP: Final = 1
FINISH_LENGTH: Final = 2
FINISH_REASONS: Final = ("", "stop", "length")


def array(
    *dtypes: str,
    ndim: int = 1,
    limit: int = MAX_TOKENS,
    most: float = math.inf,
    rows: str = "",
    total_of: str = "",
    where: str = "",
    shape_of: str = "",
    or_empty: bool = False,
) -> Any:
    """A required array field. Integers are never negative; floats are finite and, with ``most``
    given, in 0..most.

    Args:
        dtypes: those allowed.
        ndim: number of axes.
        limit: most elements.
        most: largest value.
        rows: fields of one record with the same mark have equally many rows.
        total_of: the field whose sum is the number of rows ...
        where: ... counted only where this field is not zero.
        shape_of: the field whose shape it has.
        or_empty: or else it has no elements at all.
    """
    return field(
        metadata={
            "dtypes": dtypes,
            "ndim": ndim,
            "limit": limit,
            "most": most,
            "rows": rows,
            "total_of": total_of,
            "where": where,
            "shape_of": shape_of,
            "or_empty": or_empty,
        }
    )


def column(dtype: str, rows: str, *, most: float = math.inf) -> Any:
    """A required array field with one value for each of the rows marked ``rows``."""
    return array(dtype, limit=MAX_ROWS, rows=rows, most=most)


def string(limit: int = 256) -> Any:
    """A required string or bytes field of at most ``limit`` characters."""
    return field(metadata={"limit": limit})


def items(limit: int = MAX_ROWS) -> Any:
    """A required tuple of nested records."""
    return field(metadata={"limit": limit})


def natural(limit: int = 1 << 62) -> Any:
    """A required integer in 0..limit."""
    return field(metadata={"limit": limit})


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Base of frames and of the records nested in them. Equality compares arrays by value."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(
            _same(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)
        )

    __hash__ = None  # type: ignore[assignment]


class Frame(Record):
    """Base of everything that may stand alone on a stream."""


# --- both directions --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Hello(Frame):
    """First frame of both ends of every stream."""

    role: str = string(16)
    """``router``, ``verifier``, ``drafter`` or ``probe``."""
    member_id: str = string()
    incarnation: int = natural()
    """Rises whenever the member restarts (start time in ns)."""
    model: str = string()
    """Fingerprint of the target model; empty if the member does not know one."""
    drafter: str = string()
    """Fingerprint of the drafter checkpoint; empty for none."""
    token: str = string()
    """Shared cluster secret, empty where the cluster has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Refused(Frame):
    """A typed refusal. After a fatal one the sender closes the stream."""

    code: str = string()
    """Class name in `cluster.errors`."""
    message: str = string(4096)
    fatal: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Ping(Frame):
    """Keeps a lease alive and measures the round trip; answered by `Pong`."""

    nonce: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Pong(Frame):
    """Answer to `Ping` with its nonce."""

    nonce: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Drain(Frame):
    """The sender will go away: give it no new work; what it has will be finished."""

    deadline_s: float


# --- router -> verifier -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Acquire(Frame):
    """Ask a verifier for the lease of itself. Answered by `Lease` or by `Refused`."""

    lane_id: str = string()
    """Member id of the router replica (drafters address its stream by it)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling(Record):
    """Everything that shapes the distribution of one request's tokens."""

    temperature: float
    """0 is greedy."""
    top_k: int = natural(MAX_TOP_K)
    """0 means all."""
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: I32 = array("i4", limit=MAX_BIASES, rows="bias")
    bias_values: F32 = array("f4", limit=MAX_BIASES, rows="bias")
    seed: int = natural((1 << 64) - 1)
    mode: str = string(16)
    """``coupled`` or ``rejection`` (see DESIGN, two exact acceptance modes)."""
    logprobs: bool


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
    digest: U64 = column("u8", "R")  # R, of ids[0..anchor]
    num_draft: I32 = column("i4", "R")  # R
    want_draft: U8 = column("u1", "R", most=1)  # R, ask for the next block
    draft_ids: I32 = array("i4", total_of="num_draft")  # T = sum(num_draft)
    has_q: U8 = column("u1", "R", most=1)  # R
    q_ids: I32 = array("i4", ndim=2, limit=64 * MAX_TOKENS, total_of="num_draft", where="has_q")
    """[sum of num_draft with has_q, K]"""
    q_probs: F32 = array("f4", ndim=2, limit=64 * MAX_TOKENS, most=1, shape_of="q_ids")


# --- verifier -> router -----------------------------------------------------------------


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


# --- verifier -> drafter ----------------------------------------------------------------


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


# --- drafter -> router and verifier ---------------------------------------------------------


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


# --- router <-> router ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Submit(Frame):
    """Hand a tokenized request to the router that owns a better lane."""

    request_id: str = string()
    loan: int = natural()
    """Over 0 and new with each `Submit` of a stream, request ids may come again; every `Emit` of
    the request repeats it."""
    ids: I32 = array("i4", limit=MAX_PROMPT_TOKENS)
    """The prompt, then tokens already emitted when a request continues after a fault."""
    num_prompt: int = natural(MAX_PROMPT_TOKENS)
    num_sent_chars: int = natural()
    """Characters of text that the client already has (0 for a fresh request)."""
    max_new_tokens: int = natural(MAX_PROMPT_TOKENS)
    """Counted from the prompt's end."""
    stop_ids: I32 = array("i4", limit=1024)
    stop_strings: tuple[str, ...] = items(64)
    ignore_eos: bool
    draft: bool
    sampling: Sampling
    deadline_s: float
    """Seconds left, 0 for none."""
    target_rate: float
    """Tokens per second that it should get, 0 for no target."""
    tier: str = string(64)
    """A name of `cluster.tiers`; empty for the usual one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Emit(Frame):
    """One round's output of a submitted request. Exactly one has ``finish`` or ``error`` set."""

    request_id: str = string()
    loan: int = natural()
    """Of the `Submit`; 0 in answer to a `Cancel` of a request that was not submitted here."""
    seq: int = natural()
    """0, 1, 2, ...: a gap or a repeat is a fault of ours."""
    text: str = string(MAX_FRAME_BYTES)
    token_ids: I32 = array("i4")
    logprobs: F32 = array("f4")
    finish: str = string(32)
    """Empty while running; then ``stop``, ``length``, ``cancelled`` or ``error``."""
    error_code: str = string()
    error_message: str = string(4096)
    num_rounds: int = natural()
    num_proposed: int = natural()
    num_verified: int = natural()
    num_accepted: int = natural()


@dataclass(frozen=True, kw_only=True, eq=False)
class Cancel(Frame):
    """Stop a submitted request; answered by its terminal `Emit`."""

    request_id: str = string()


FRAMES: Final[dict[str, type[Frame]]] = {
    cls.__name__: cls
    for cls in (
        Hello, Refused, Ping, Pong, Drain, Acquire, Step, Lease, StepResult, Open, Commit,
        Release, Blocks, Lost, Submit, Emit, Cancel,
    )
}  # fmt: skip


# --- codec ----------------------------------------------------------------------------------------

_EXT_ARRAY: Final = 1
_ANOTHER_LANGUAGE: Final = "the peer is no DSpark member of this release, or the bytes were damaged"
_DTYPES: Final = {name: np.dtype("<" + name) for name in ("i4", "i8", "u1", "u2", "u8", "f2", "f4")}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def encode(frame: Frame) -> bytes:
    """Serialise a frame.

    Raises:
        FrameError: a field breaks the wire rules (ours to fix: the message names it).
        FrameTooLarge: the result exceeds `MAX_FRAME_BYTES`.
    """
    name = type(frame).__name__
    body = _pack_record(frame, name)
    try:
        data: bytes = msgpack.packb([PROTOCOL_VERSION, name, body], use_bin_type=True)
    except ValueError as error:  # a lone surrogate in a string, or past msgpack's 4 GiB
        raise FrameError(f"{name}: cannot be encoded: {error}") from error
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"{name} of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Frame:
    """Parse and check one frame.

    Raises:
        FrameTooLarge: more than `MAX_FRAME_BYTES`, or a field over its limit.
        ProtocolMismatch: another protocol version.
        FrameError: anything else that is not a well-formed frame.
    """
    if len(data) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        outer = msgpack.unpackb(
            data, raw=False, strict_map_key=True, ext_hook=_unpack_array, use_list=True
        )
    except FrameError:
        raise
    except Exception as error:  # msgpack raises many kinds on hostile bytes
        raise FrameError(
            f"not msgpack: {type(error).__name__}: {error}", hint=_ANOTHER_LANGUAGE
        ) from error
    if not (isinstance(outer, list) and len(outer) == 3 and isinstance(outer[1], str)):
        raise FrameError("not a frame: expected [version, name, fields]", hint=_ANOTHER_LANGUAGE)
    version, name, body = outer
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"protocol version {str(version)[:32]}, expected {PROTOCOL_VERSION}",
            hint="run the same release on every node",
        )
    cls = FRAMES.get(name)
    if cls is None:
        raise FrameError(f"unknown frame {name[:64]!r}", hint=_ANOTHER_LANGUAGE)
    return typing.cast(Frame, _unpack_record(cls, body, name))


class _Field(typing.NamedTuple):
    """What the codec must know of one field, worked out once per class."""

    name: str
    kind: Any
    item: Any
    """Type of a tuple's items, None for other kinds."""
    is_record: bool
    """Whether the value (or each item) is a record itself."""
    meta: dict[str, Any]


_plans: dict[type, tuple[_Field, ...]] = {}
_row_plans: dict[type, tuple[_Field, ...]] = {}


def _fields(cls: type[Record]) -> tuple[_Field, ...]:
    if cls not in _plans:
        hints = typing.get_type_hints(cls)
        _plans[cls] = tuple(
            _Field(
                name=spec.name,
                kind=hints[spec.name],
                item=_item_type(hints[spec.name]),
                is_record=_is_record(_item_type(hints[spec.name]) or hints[spec.name]),
                meta=dict(spec.metadata),
            )
            for spec in dataclasses.fields(cls)
        )
    return _plans[cls]


def _pack_record(record: Record, path: str) -> dict[str, Any]:
    values = {
        spec.name: _check(getattr(record, spec.name), spec, f"{path}.{spec.name}")
        for spec in _fields(type(record))
    }
    _check_rows(type(record), values, path)
    return {name: _pack(value, f"{path}.{name}") for name, value in values.items()}


def _pack(value: Any, path: str) -> Any:
    if isinstance(value, np.ndarray):
        head = msgpack.packb([_NAMES[value.dtype], list(value.shape)])
        return msgpack.ExtType(_EXT_ARRAY, head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, Record):
        return _pack_record(value, path)
    if isinstance(value, tuple):
        return [_pack(item, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def _unpack_array(code: int, data: bytes) -> NDArray[Any]:
    if code != _EXT_ARRAY:
        raise FrameError(f"unknown extension {code}")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        name, shape = unpacker.unpack()
        dtype = _DTYPES[name]
        dims = tuple(operator.index(n) for n in shape)
    except Exception as error:
        raise FrameError("array with a malformed head") from error
    offset = unpacker.tell()
    too_odd = len(dims) > 3 or any(not 0 <= n <= MAX_FRAME_BYTES for n in dims)
    if too_odd or len(data) - offset != math.prod(dims) * dtype.itemsize:
        raise FrameError(f"array does not match its {len(data) - offset} bytes: {str(dims)[:64]}")
    return np.frombuffer(data, dtype, offset=offset).reshape(dims)


def _unpack_record(cls: type[Any], body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise FrameError(f"{path}: expected a map of fields")
    fields = _fields(cls)
    expected = {spec.name for spec in fields}
    if body.keys() != expected:
        missing, extra = (
            sorted(expected - body.keys()),
            [str(k)[:64] for k in body.keys() - expected],
        )
        raise FrameError(f"{path}: missing fields {missing[:8]}, unexpected fields {extra[:8]}")
    values = {}
    for spec in fields:
        where = f"{path}.{spec.name}"
        value = body[spec.name]
        if spec.item is not None and isinstance(value, list):
            _check_length(len(value), spec.meta, where)
            value = tuple(
                _unpack_record(spec.item, v, f"{where}[{i}]") if spec.is_record else v
                for i, v in enumerate(value)
            )
        elif spec.is_record and spec.item is None:
            value = _unpack_record(spec.kind, value, where)
        values[spec.name] = _check(value, spec, where)
    _check_rows(cls, values, path)
    return cls(**values)


def _check(value: Any, spec: _Field, path: str) -> Any:
    """Return ``value`` in canonical form, or raise naming ``path``."""
    kind, item, meta = spec.kind, spec.item, spec.meta
    if "dtypes" in meta:
        return _check_array(value, meta, path)
    if item is not None:
        if not isinstance(value, tuple) or not all(isinstance(v, item) for v in value):
            raise FrameError(f"{path}: expected a tuple of {item.__name__}")
        _check_length(len(value), meta, path)
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FrameError(f"{path}: expected a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise FrameError(f"{path}: not finite")
        return float(value)
    if kind is int:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise FrameError(f"{path}: expected an integer, got {type(value).__name__}")
        if not 0 <= value <= meta["limit"]:
            raise FrameError(f"{path}: {value} is outside 0..{meta['limit']}")
        return int(value)
    if not isinstance(value, kind):
        raise FrameError(f"{path}: expected {kind.__name__}, got {type(value).__name__}")
    if kind is str:
        _check_length(len(value), meta, path)
    return value


def _check_array(value: Any, meta: dict[str, Any], path: str) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise FrameError(f"{path}: expected an array, got {type(value).__name__}")
    dtype = value.dtype.newbyteorder("<")
    if _NAMES.get(dtype) not in meta["dtypes"]:
        raise FrameError(f"{path}: dtype {value.dtype} is not one of {meta['dtypes']}")
    if value.ndim != meta["ndim"]:
        raise FrameError(f"{path}: {value.ndim} axes, expected {meta['ndim']}")
    _check_length(value.size, meta, path)
    _check_values(value, meta["most"], path)
    return value.astype(dtype, copy=False)


def _check_values(value: NDArray[Any], most: float, path: str) -> None:
    if value.size == 0:
        return
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise FrameError(f"{path}: not finite")
    bounded = most < math.inf
    if (bounded or value.dtype.kind == "i") and value.min() < 0:
        raise FrameError(f"{path}: {value.min()} is negative")
    if bounded and value.max() > most:
        raise FrameError(f"{path}: {value.max()} is over {most}")


def _row_rules(cls: type[Record]) -> tuple[_Field, ...]:
    if cls not in _row_plans:
        rules = ("rows", "total_of", "shape_of")
        _row_plans[cls] = tuple(f for f in _fields(cls) if any(f.meta.get(rule) for rule in rules))
    return _row_plans[cls]


def _check_rows(cls: type[Record], values: dict[str, Any], path: str) -> None:
    """Refuse arrays of one record whose lengths do not match up."""
    marks: dict[str, int] = {}
    for name, _, _, _, meta in _row_rules(cls):
        value = values[name]
        num_rows = len(value)
        if meta["or_empty"] and value.size == 0:
            continue
        if meta["rows"] and marks.setdefault(meta["rows"], num_rows) != num_rows:
            raise FrameError(f"{path}.{name}: {num_rows} rows, expected {marks[meta['rows']]}")
        if meta["shape_of"] and value.shape != values[meta["shape_of"]].shape:
            raise FrameError(f"{path}.{name}: shape {value.shape} differs from {meta['shape_of']}")
        if meta["total_of"]:
            counts = values[meta["total_of"]]
            if meta["where"]:
                counts = counts[values[meta["where"]] != 0]
            if (total := int(counts.sum(dtype=np.int64))) != num_rows:
                raise FrameError(f"{path}.{name}: {num_rows} rows, {meta['total_of']} says {total}")


def _check_length(length: int, meta: dict[str, Any], path: str) -> None:
    if length > meta["limit"]:
        raise FrameTooLarge(f"{path}: length {length} exceeds {meta['limit']}")


def _item_type(kind: Any) -> type[Any] | None:
    if typing.get_origin(kind) is tuple:
        return typing.cast("type[Any]", typing.get_args(kind)[0])
    return None


def _is_record(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and not isinstance(kind, types.GenericAlias)
        and issubclass(kind, Record)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    return bool(a == b)

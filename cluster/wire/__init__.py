"""Every message between the pools, as one frozen dataclass each, with one msgpack codec.

`cluster.wire.codec` says what a frame is on the wire and what `decode` guarantees.

Lengths per row are carried as ``num_*`` arrays beside concatenated values: no padding
crosses the wire, except ids inside a draft block, which always has gamma places.
"""

from cluster.wire.codec import FRAMES, decode, encode
from cluster.wire.drafts import Blocks, Commit, Lost, Open, Release
from cluster.wire.fields import F32, I32, I64, U8, U64, Frame, Record
from cluster.wire.limits import (
    MAX_BIASES,
    MAX_COMMIT_BYTES,
    MAX_FRAME_BYTES,
    MAX_PROMPT_TOKENS,
    MAX_ROWS,
    MAX_TIERS,
    MAX_TOKENS,
    MAX_TOP_K,
    PROTOCOL_VERSION,
)
from cluster.wire.link import Drain, Hello, Ping, Pong, Refused
from cluster.wire.profiles import AskProfile, Profile
from cluster.wire.requests import Cancel, Emit, Submit
from cluster.wire.sampling import Sampling
from cluster.wire.steps import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_REASONS,
    FINISH_STOP,
    Acquire,
    Admission,
    Failure,
    Lease,
    Rebind,
    Step,
    StepResult,
)

__all__ = [
    "F32",
    "FINISH_LENGTH",
    "FINISH_NONE",
    "FINISH_REASONS",
    "FINISH_STOP",
    "FRAMES",
    "I32",
    "I64",
    "MAX_BIASES",
    "MAX_COMMIT_BYTES",
    "MAX_FRAME_BYTES",
    "MAX_PROMPT_TOKENS",
    "MAX_ROWS",
    "MAX_TIERS",
    "MAX_TOKENS",
    "MAX_TOP_K",
    "PROTOCOL_VERSION",
    "U8",
    "U64",
    "Acquire",
    "Admission",
    "AskProfile",
    "Blocks",
    "Cancel",
    "Commit",
    "Drain",
    "Emit",
    "Failure",
    "Frame",
    "Hello",
    "Lease",
    "Lost",
    "Open",
    "Ping",
    "Pong",
    "Profile",
    "Rebind",
    "Record",
    "Refused",
    "Release",
    "Sampling",
    "Step",
    "StepResult",
    "Submit",
    "decode",
    "encode",
]

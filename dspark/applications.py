"""What Serve says when a call names no application that it runs, made into an error that helps.

Serve's gRPC proxy refuses such a call itself, before any code of ours; which applications there
are it tells on request. Where it runs only one, it takes any name for that one's, and
`deploy.requests` checks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.field_mask_pb2 import FieldMask

from cluster.errors import ModelNotFound

LIST_METHOD: Final = "/ray.serve.RayServeAPIService/ListApplications"
_MISSING: Final = re.compile(r"Application ('.*' not found|metadata not set)\. Ping ", re.DOTALL)


def names_none(error: Any) -> bool:
    """Whether a call failed because Serve found no application of that name."""
    return error.code().name == "NOT_FOUND" and bool(_MISSING.match(error.details() or ""))


def names_of(answer: bytes) -> list[str]:
    """Read the answer to `LIST_METHOD`: a message of one field, ``repeated string = 1``.

    `FieldMask` is such a message; Serve's own class would have the client import Ray.
    """
    return sorted(FieldMask.FromString(answer).paths)


def no_application(asked: str, names: Sequence[str]) -> ModelNotFound:
    """The error for a user.

    Args:
        asked: what the call named; may be empty.
        names: of the applications that there are.
    """
    there = f"one of {', '.join(names)}" if names else "Serve runs none there"
    if not asked:
        return ModelNotFound("the server runs several applications", hint=f"name {there}")
    return ModelNotFound(f"no application {asked!r} there", hint=there)

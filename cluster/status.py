"""Errors of the tree as gRPC statuses and back: trailing metadata may be lost, details are not."""

from __future__ import annotations

import re
from typing import Final

from cluster import errors
from cluster.errors import DSparkError, error_for

_DETAILS: Final = re.compile(r"([A-Z]\w+): (.*?)(?:\nhint: (.*))?", re.DOTALL)
_MOST_MESSAGE_BYTES: Final = 4096
"""Clients refuse headers of more than 8 KiB, and then take the error for another one."""
_MOST_HINT_BYTES: Final = 1024

_BY_CODE: Final[dict[str, type[DSparkError]]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "UNAUTHENTICATED": errors.AuthError,
    "NOT_FOUND": errors.ModelNotFound,
    "UNIMPLEMENTED": errors.Unsupported,
    "RESOURCE_EXHAUSTED": errors.Overloaded,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
}


def details_of(error: DSparkError) -> str:
    """Write an error as status details; `error_of` reads it back. What is too long is cut."""
    hint = f"\nhint: {_cut(error.hint, _MOST_HINT_BYTES)}" if error.hint else ""
    return f"{type(error).__name__}: {_cut(error.message, _MOST_MESSAGE_BYTES)}{hint}"


def _cut(text: str, most_bytes: int) -> str:
    """As much of a text as fits once gRPC has percent-encoded it."""
    for place, char in enumerate(text):
        most_bytes -= 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if most_bytes < 0:
            return f"{text[:place]}..."
    return text


_CUT_OFF: Final = "Stream removed"
"""What gRPC makes of a plain HTTP answer in the middle of a call: HAProxy has no router that does,
for one is just starting, or the machine was asleep."""


def error_of(code: str, details: str | None, address: str) -> DSparkError:
    """Rebuild the error that a call to ``address`` ended with.

    Args:
        code: name of the gRPC status code.
        details: as `details_of` wrote it, or anything: statuses that did not come from us (a
            refused connection, the proxy's own) map by their code.
    """
    if match := _DETAILS.fullmatch(details or ""):
        error = error_for(match[1], match[2])
        if type(error).__name__ == match[1] and error.grpc_code == code:
            error.hint = match[3] or ""
            return error
    if code == "UNKNOWN" and (details or "").startswith(_CUT_OFF):
        code = "UNAVAILABLE"
    kind = _BY_CODE.get(code, DSparkError)
    first_line = next(iter((details or "").strip().splitlines()), "no details")
    hint = "is `dspark serve` running there?" if kind is errors.Unavailable else ""
    return kind(f"{address}: {code}: {first_line}", hint=hint)

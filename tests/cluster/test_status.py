"""Errors survive the trip through status details."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from cluster import errors
from cluster.errors import DSparkError
from cluster.status import details_of, error_of

TREE = [
    error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, DSparkError)
]


@pytest.mark.parametrize("kind", TREE)
@pytest.mark.parametrize("hint", ["", "do this\nor that"])
def test_every_error_comes_back_as_itself(kind: type[DSparkError], hint: str) -> None:
    error = kind("first: line\nsecond line", hint=hint)
    back = error_of(error.grpc_code, details_of(error), "host:1")
    assert type(back) is kind
    assert (back.message, back.hint) == (error.message, error.hint)


@pytest.mark.parametrize("char", ["x", "%", "é", "🎈"])
def test_what_no_header_can_hold_is_cut(char: str) -> None:
    """An engine's message may quote a whole grammar."""
    error = errors.BadConstraint("line 1: " + char * 10_000, hint=char * 10_000)
    details = details_of(error)
    assert len(quote(details, safe="")) < 6 << 10
    back = error_of(error.grpc_code, details, "host:1")
    assert type(back) is errors.BadConstraint
    assert back.message.startswith("line 1: " + char * 300)
    assert back.message.endswith(char + "...")
    assert back.hint.endswith(char + "...")
    short = errors.BadConstraint(char * 300, hint=char * 80)
    assert error_of(short.grpc_code, details_of(short), "host:1").message == short.message


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", errors.Unavailable),
        ("RESOURCE_EXHAUSTED", "", errors.Overloaded),
        ("NOT_FOUND", None, errors.ModelNotFound),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.DeadlineExceeded),
        ("INTERNAL", "Traceback: line\nmore", DSparkError),
        # A name of ours under a code that is not its own did not come from us.
        ("INTERNAL", "AuthError: no token", DSparkError),
        ("UNKNOWN", "ValueError: x", DSparkError),
        (
            "UNKNOWN",
            "Stream removed (Data frame with END_STREAM flag)",
            errors.Unavailable,
        ),
    ],
)
def test_foreign_statuses_map_by_code(
    code: str, details: str | None, kind: type[DSparkError]
) -> None:
    error = error_of(code, details, "host:1")
    assert type(error) is kind
    assert "host:1" in error.message
    assert "\n" not in error.message

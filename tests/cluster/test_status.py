"""Errors survive the trip through status details."""

from __future__ import annotations

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
    ],
)
def test_foreign_statuses_map_by_code(
    code: str, details: str | None, kind: type[DSparkError]
) -> None:
    error = error_of(code, details, "host:1")
    assert type(error) is kind
    assert "host:1" in error.message
    assert "\n" not in error.message

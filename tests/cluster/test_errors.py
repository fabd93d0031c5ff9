"""The error tree: each error knows its codes and survives the wire by name."""

from __future__ import annotations

import grpc
import pytest

from cluster import errors
from cluster.errors import DSparkError, Overloaded, error_for


def tree(base: type[DSparkError] = DSparkError) -> list[type[DSparkError]]:
    return [base, *(sub for child in base.__subclasses__() for sub in tree(child))]


@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_codes_are_real_and_the_name_rebuilds_it(kind: type[DSparkError]) -> None:
    assert kind.grpc_code in grpc.StatusCode.__members__
    assert 400 <= kind.http_status < 600
    rebuilt = error_for(kind.__name__, "what happened")
    assert type(rebuilt) is kind
    assert rebuilt.message == "what happened"


def test_the_drawing_lists_every_error() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in tree() if kind.__name__ not in drawn] == []


def test_an_unknown_name_keeps_its_text() -> None:
    error = error_for("SomethingNewer", "text")
    assert type(error) is DSparkError
    assert str(error) == "SomethingNewer: text"


def test_the_hint_is_shown() -> None:
    assert str(DSparkError("wrong", hint="do this")) == "wrong (do this)"
    assert str(DSparkError("wrong")) == "wrong"
    assert "2.5 s" in str(Overloaded("full", retry_after_s=2.5))


@pytest.mark.parametrize(
    ("kind", "code", "status"),
    [
        (errors.PromptTooLong, "INVALID_ARGUMENT", 400),
        (errors.BadConstraint, "INVALID_ARGUMENT", 400),
        (errors.UnknownAdapter, "INVALID_ARGUMENT", 400),
        (errors.Unsupported, "UNIMPLEMENTED", 501),
        (errors.Overloaded, "RESOURCE_EXHAUSTED", 429),
        (errors.AuthError, "UNAUTHENTICATED", 401),
        (errors.Unavailable, "UNAVAILABLE", 503),
        (errors.ProtocolMismatch, "INVALID_ARGUMENT", 400),
        (errors.LeaseError, "FAILED_PRECONDITION", 409),
        (errors.DeadlineExceeded, "DEADLINE_EXCEEDED", 504),
    ],
)
def test_codes_that_clients_rely_on(kind: type[DSparkError], code: str, status: int) -> None:
    assert (kind.grpc_code, kind.http_status) == (code, status)

"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dspark.fake_server import FakeDSpark, running


@pytest.fixture
def fake() -> FakeDSpark:
    """A scripted servicer."""
    return FakeDSpark()


@pytest.fixture
def address(fake: FakeDSpark) -> Iterator[str]:
    """Where ``fake`` listens."""
    with running(fake) as where:
        yield where

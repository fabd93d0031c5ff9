"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The developers' data folder beside the checkout; absent elsewhere."""
    folder = REPO.parent / "shared"
    if not (folder / "golden").is_dir():
        pytest.skip("needs the developers' shared/ folder beside the checkout")
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded target as a Hugging Face folder (DSPARK_TEST_TARGET, or the model store)."""
    override = os.environ.get("DSPARK_TEST_TARGET")
    if override:
        return Path(override)
    from cluster.model_store import ensure_model

    return ensure_model("smollm2-135m")

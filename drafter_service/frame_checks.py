"""What the codec cannot know of a frame: checks against the model behind this drafter."""

from __future__ import annotations

import numpy as np

from cluster.errors import FrameError
from cluster.sampling import check_sampling
from cluster.wire import Commit, Open
from drafter_service.drafter import DrafterLimits


def check_commit(frame: Commit, limits: DrafterLimits) -> None:
    """Check what the codec cannot know.

    Raises:
        FrameError: an id outside the vocabulary, rows of the wrong width or number, or features
            that are not finite (bfloat16 crosses as bits, which the codec cannot read).
    """
    if frame.ids.size and int(frame.ids.max()) >= limits.vocab_size:
        raise FrameError(
            f"Commit.ids: {int(frame.ids.max())} is outside the vocabulary of {limits.vocab_size}"
        )
    expected = (len(frame.ids), limits.feature_size)
    if limits.feature_size and frame.features.shape != expected:
        raise FrameError(
            f"Commit.features: shape {frame.features.shape}, expected {expected}",
            hint="verifier and drafter must hold the same drafter checkpoint",
        )
    if frame.features.dtype == np.uint16 and bool(
        ((frame.features & np.uint16(0x7F80)) == 0x7F80).any()
    ):
        raise FrameError("Commit.features: not finite")


def check_open(frame: Open, limits: DrafterLimits) -> None:
    """Check a new session's first id and sampling parameters.

    Raises:
        FrameError: the id is outside the vocabulary.
        InvalidRequest: a sampling parameter is outside its domain.
    """
    if frame.first_id >= limits.vocab_size:
        raise FrameError(
            f"Open.first_id: {frame.first_id} is outside the vocabulary of {limits.vocab_size}"
        )
    check_sampling(frame.sampling, limits.vocab_size)

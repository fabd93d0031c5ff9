"""What a drafter sends is checked before it is used."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from router.blocks import DraftBlock, Malformed, read_blocks
from tests.frames import make_blocks

IDS = (3, 1, 4)


def read(**changes: Any) -> DraftBlock | Malformed:
    frame = dataclasses.replace(make_blocks(7, 2, IDS, [5, 6]), **changes)
    (block,) = read_blocks(frame, vocab_size=10)
    return block


def q(ids: list[list[int]], probs: list[list[float]]) -> dict[str, Any]:
    return {
        "has_q": np.ones(1, np.uint8),
        "q_ids": np.array([ids], np.int32),
        "q_probs": np.array([probs], np.float32),
    }


def test_a_good_block() -> None:
    block = read(confidence=np.array([[0.5, 0.25]], np.float32))
    assert isinstance(block, DraftBlock)
    assert (block.rid, block.epoch, block.anchor, block.ids) == (7, 2, 2, (5, 6))
    assert block.confidence.tolist() == [0.5, 0.25]
    assert block.q is None


def test_a_short_block_uses_only_its_own_places() -> None:
    block = read(num_draft=np.array([1], np.int32), ids=np.array([[5, 99]], np.int32))
    assert isinstance(block, DraftBlock)
    assert block.ids == (5,)
    assert len(block.confidence) == 1


def test_q_rows_belong_to_the_sessions_that_have_them() -> None:
    one = make_blocks(1, 0, IDS, [5, 6])
    frame = dataclasses.replace(
        one,
        **{
            name: np.concatenate([getattr(one, name)] * 3)
            for name in ("epoch", "anchor", "digest", "num_draft", "ids", "confidence")
        },
        rid=np.array([1, 2, 3], np.int64),
        has_q=np.array([1, 0, 1], np.uint8),
        q_ids=np.array([[[5], [6]], [[5], [6]]], np.int32),
        q_probs=np.ones((2, 2, 1), np.float32),
    )
    blocks = list(read_blocks(frame, vocab_size=10))
    assert [isinstance(b, DraftBlock) and b.q is not None for b in blocks] == [True, False, True]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_draft": np.array([3], np.int32)},
        {"ids": np.array([[5, 10]], np.int32)},
        q([[5, 5], [6, 7]], [[0.5, 0.5], [0.5, 0.5]]),
        q([[5, 7], [6, 7]], [[0.5, 0.1], [0.5, 0.5]]),
        q([[5, 7], [1, 7]], [[0.5, 0.5], [0.5, 0.5]]),
        q([[5, 7], [6, 7]], [[0.5, 0.5], [0.0, 1.0]]),
        q([[5, 70], [6, 7]], [[0.5, 0.5], [0.5, 0.5]]),
        q([[5]], [[1.0]]),
    ],
    ids=["length", "vocabulary", "repeated", "sum", "absent", "impossible", "q-id", "q-length"],
)
def test_a_block_that_breaks_a_rule(changes: dict[str, Any]) -> None:
    block = read(**changes)
    assert isinstance(block, Malformed)
    assert (block.rid, block.epoch, block.anchor) == (7, 2, 2)
    assert block.reason

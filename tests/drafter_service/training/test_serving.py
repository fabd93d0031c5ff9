"""A trained drafter, served: the draft engine computes what training computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.wire import Commit
from drafter_service.drafter import Work
from drafter_service.loading import load_drafter
from drafter_service.training import trainer
from drafter_service.training.config import DrafterShape, TrainConfig
from drafter_service.training.loss import block_output
from drafter_service.training.packing import pack
from tests.drafters import LANE, Feed, make_engine


@pytest.mark.parametrize("draft_vocab_size", [40, 64])
def test_the_engine_drafts_what_training_computed(
    make_config: Callable[..., TrainConfig], draft_vocab_size: int
) -> None:
    shape = DrafterShape(gamma=3, markov_rank=8, num_layers=2, draft_vocab_size=draft_vocab_size)
    config = make_config(shape=shape)
    trainer.train(config)
    sequence = trainer.prepare(config).held_out[0]
    anchor = sequence.num_prompt + 5
    model = load_drafter(config.output, config.target)

    feed = Feed(1, model.spec)
    feed.ids = sequence.ids[:1].tolist()
    with torch.no_grad():
        rows = model.project(sequence.features[:anchor].float()).numpy()
    committed = sequence.ids[1 : anchor + 1].tolist()
    commit = Commit(
        lane_id=LANE,
        rid=np.array([1], np.int64),
        epoch=np.array([0], np.int32),
        first_position=np.array([0], np.int32),
        num_rows=np.array([anchor], np.int32),
        digest=np.array([digest.of(sequence.ids[: anchor + 1].tolist())], np.uint64),
        want_draft=np.array([True], np.uint8),
        ids=np.array(committed, np.int32),
        features=rows,
    )
    outcome = make_engine(model).run([feed.open(), Work(owner=1, frame=commit)], 0.0)
    assert outcome.block is not None
    drafted = outcome.block.ids[0].tolist()

    # Training's view of the same block, the text after the anchor being what was drafted.
    text = sequence.ids.clone()
    text[anchor + 1 : anchor + 4] = torch.tensor(drafted)
    batch = pack([dataclasses.replace(sequence, ids=text)], torch.tensor([[anchor]]), 3)
    with torch.no_grad():
        output = block_output(model, batch)
    assert drafted == model.d2t[output.logits[0].argmax(-1)].tolist()
    assert output.confidence is not None
    np.testing.assert_allclose(
        outcome.block.confidence[0], output.confidence[0].sigmoid().numpy(), atol=1e-5
    )

"""Training rolls blocks out exactly as serving does, and learns from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster import digest
from cluster.config import DrafterConfig
from cluster.errors import ConfigError
from cluster.wire import Commit
from drafter_service.autoregressive.loading import load_autoregressive
from drafter_service.drafter import Work
from drafter_service.opening import open_drafter
from drafter_service.training.autoregressive import block_output
from drafter_service.training.config import DrafterShape, Schedule, TrainConfig
from drafter_service.training.packing import pack
from drafter_service.training.shards import FeatureSequence
from drafter_service.training.trainer import train
from tests.autoregressive import make_engine, make_model, make_spec, reference_rollout
from tests.drafter_service.training.conftest import reply, write_target
from tests.drafters import LANE, Feed

SHAPE = DrafterShape(
    kind="autoregressive", head="none", markov_rank=0, gamma=3, draft_vocab_size=40
)


def make_sequence(length: int, num_prompt: int, seed: int) -> FeatureSequence:
    generator = torch.Generator().manual_seed(seed)
    return FeatureSequence(
        ids=torch.randint(0, 60, (length,), generator=generator),
        num_prompt=num_prompt,
        features=torch.randn(length, 64, generator=generator).bfloat16(),
        hidden=torch.randn(length, 32, generator=generator).half(),
        log_normaliser=8 + torch.rand(length, generator=generator),
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"norms_heads": True, "norm_output": True}, {"norm_before_residual": True}],
    ids=str,
)
def test_every_block_of_a_pack_equals_the_slow_rollout(changes: dict[str, Any]) -> None:
    model = make_model(make_spec(draft_vocab_size=20, **changes))
    sequences = [make_sequence(30, 1, seed=1), make_sequence(17, 6, seed=2)]
    anchors_SA = torch.tensor([[1, 2, 20], [6, 12, 9]])
    output = block_output(model, pack(sequences, anchors_SA, model.spec.gamma))
    assert output.confidence is not None
    for block, (place, anchor) in enumerate(
        (s, anchor) for s, row in enumerate(anchors_SA.tolist()) for anchor in row
    ):
        sequence = sequences[place]
        text = sequence.ids[anchor + 1 : anchor + 5].tolist()
        with torch.no_grad():
            rows = model.project(sequence.features[:anchor].float())
        logits, _, confidence = reference_rollout(
            model, sequence.ids[: anchor + 1].tolist(), rows, forced=text
        )
        torch.testing.assert_close(output.logits[block], logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            output.confidence[block].sigmoid(), torch.tensor(confidence), atol=1e-4, rtol=1e-4
        )


def test_no_block_sees_another_or_what_lies_behind_its_anchor() -> None:
    model = make_model(make_spec())
    sequence = make_sequence(30, 3, seed=1)
    alone = block_output(model, pack([sequence], torch.tensor([[9]]), 4)).logits[0]
    beside = block_output(model, pack([sequence], torch.tensor([[9, 10, 25]]), 4)).logits[0]
    torch.testing.assert_close(beside, alone, atol=1e-5, rtol=1e-5)
    changed = make_sequence(30, 3, seed=1)
    changed.features[9:] = 7.0
    other = block_output(model, pack([changed], torch.tensor([[9, 10, 25]]), 4)).logits[0]
    torch.testing.assert_close(other, alone, atol=1e-5, rtol=1e-5)


def test_later_steps_train_the_first_ones() -> None:
    """The fed-back output carries gradient: the loss of step 3 alone reaches the feature tap."""
    model = make_model(make_spec(gamma=3))
    batch = pack([make_sequence(12, 3, seed=1)], torch.tensor([[8]]), 3)
    batch.features.requires_grad_(True)
    block_output(model, batch).logits[0, 2].sum().backward()
    gradient_LF = batch.features.grad
    assert gradient_LF is not None
    assert float(gradient_LF[0, 7].abs().max()) > 0
    assert float(gradient_LF[0, 8:].abs().sum()) == 0


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that reads only the last id, so that few replies teach all there is to know."""
    folder = tmp_path_factory.mktemp("markov")
    model = write_target(folder / "target", seed=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        model.model.norm.weight.mul_(2.0)
    model.save_pretrained(folder / "target")
    rows = []
    for number in range(16):
        prompt = [3 + 2 * number, 5 + number]
        response = reply(model, prompt, greedy=False, length=30)
        rows.append({"prompt": prompt, "response": response, "t": 1.0})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_training_lowers_the_loss_and_lengthens_blocks(
    make_config: Callable[..., TrainConfig], markov: Path, tmp_path: Path
) -> None:
    paths = {"target": markov / "target", "data": markov / "data.jsonl", "shape": SHAPE}
    schedule = Schedule(
        num_steps=80,
        sequences_per_step=4,
        anchors_per_sequence=8,
        learning_rate=3e-3,
        evaluate_every=40,
        checkpoint_every=40,
    )
    still = Schedule(num_steps=1, learning_rate=1e-9)
    untrained = train(make_config(**paths, schedule=still, work=tmp_path / "untrained"))
    curve = train(make_config(**paths, schedule=schedule, work=tmp_path / "trained"))
    losses = [step.loss for step in curve.steps]
    assert np.mean(losses[-10:]) < 0.85 * np.mean(losses[:3])
    before, after = untrained.evaluations[-1][1], curve.evaluations[-1][1]
    assert after.expected_length > before.expected_length + 0.15


def test_the_trained_drafter_is_served_as_it_was_trained(
    make_config: Callable[..., TrainConfig],
) -> None:
    config = make_config(shape=SHAPE)
    train(config)
    model = load_autoregressive(config.output, config.target)
    assert model.spec.gamma == 3
    assert model.spec.draft_vocab_size == 40
    drafter = open_drafter(config.output, config.target, DrafterConfig(), device="cpu")
    sequence = FeatureSequence(
        ids=torch.arange(3, 23),
        num_prompt=4,
        features=torch.randn(20, model.spec.feature_width).bfloat16(),
        hidden=torch.randn(20, 32).half(),
        log_normaliser=torch.full((20,), 9.0),
    )
    anchor = 9
    feed = Feed(1, model.spec)
    feed.ids = sequence.ids[:1].tolist()
    with torch.no_grad():
        rows = model.project(sequence.features[:anchor].float()).numpy()
    commit = Commit(
        lane_id=LANE,
        rid=np.array([1], np.int64),
        epoch=np.array([0], np.int32),
        first_position=np.array([0], np.int32),
        num_rows=np.array([anchor], np.int32),
        digest=np.array([digest.of(sequence.ids[: anchor + 1].tolist())], np.uint64),
        want_draft=np.array([1], np.uint8),
        ids=sequence.ids[1 : anchor + 1].numpy().astype(np.int32),
        features=rows,
    )
    outcome = drafter.run([feed.open(), Work(owner=1, frame=commit)], 0.0)
    assert outcome.block is not None
    drafts = outcome.block.ids[0].tolist()
    sequence.ids[anchor + 1 : anchor + 4] = torch.tensor(drafts)
    with torch.no_grad():
        output = block_output(model, pack([sequence], torch.tensor([[anchor]]), 3))
    assert drafts == model.d2t[output.logits[0].argmax(-1)].tolist()
    assert output.confidence is not None
    np.testing.assert_allclose(
        outcome.block.confidence[0], output.confidence[0].sigmoid().numpy(), atol=1e-4
    )


def test_mtp_is_one_token_from_the_last_hidden_state(
    make_config: Callable[..., TrainConfig],
) -> None:
    shape = DrafterShape(
        kind="autoregressive",
        head="none",
        markov_rank=0,
        gamma=1,
        draft_vocab_size=40,
        target_layer_ids=(3,),
    )
    config = make_config(shape=shape)
    train(config)
    model = load_autoregressive(config.output, config.target)
    assert model.spec.gamma == 1
    assert model.spec.target_layer_ids == (3,)
    engine = make_engine(model)
    feed = Feed(1, model.spec)
    outcome = engine.run([feed.open(), feed.commit(6)], 0.0)
    assert outcome.block is not None
    assert outcome.block.ids.shape == (1, 1)


@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"head": "vanilla", "markov_rank": 8}])
def test_shapes_that_do_not_exist_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one layer"):
        DrafterShape(**{**vars(SHAPE), **changes})


def test_two_runs_of_one_seed_agree(
    make_config: Callable[..., TrainConfig], tmp_path: Path
) -> None:
    first = train(make_config(shape=SHAPE, work=tmp_path / "1"))
    second = train(make_config(shape=SHAPE, work=tmp_path / "2"))
    assert first.to_json() == second.to_json()

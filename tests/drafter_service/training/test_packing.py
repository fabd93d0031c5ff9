from __future__ import annotations

import pytest
import torch

from cluster.drafter_spec import DrafterSpec, HeadKind
from drafter_service.backbone import DSparkModel
from drafter_service.training.packing import (
    anchor_range,
    block_hidden,
    draw_anchors,
    pack,
    visibility,
)
from drafter_service.training.shards import FeatureSequence
from tests.drafter_service.training import reference

GAMMA = 3


def spec(*, num_layers: int = 2, head: HeadKind = "vanilla", rank: int = 4) -> DrafterSpec:
    return DrafterSpec(
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=100.0,
        max_position_embeddings=64,
        gamma=GAMMA,
        mask_token_id=1,
        target_layer_ids=(0, 1),
        num_target_layers=3,
        target_hidden_size=16,
        vocab_size=20,
        draft_vocab_size=12,
        head=head,
        markov_rank=rank,
        has_confidence=True,
        confidence_with_markov=rank > 0,
        sliding_windows=(None,) * num_layers,
    )


def sequence(length: int, num_prompt: int, seed: int) -> FeatureSequence:
    """Random ids and features; hidden states whose log-normaliser leaves room outside."""
    generator = torch.Generator().manual_seed(seed)
    return FeatureSequence(
        ids=torch.randint(0, 20, (length,), generator=generator),
        num_prompt=num_prompt,
        features=torch.randn(length, 32, generator=generator).bfloat16(),
        hidden=torch.randn(length, 16, generator=generator).half(),
        log_normaliser=8 + torch.rand(length, generator=generator),
    )


def test_every_block_of_a_pack_equals_the_block_alone() -> None:
    model = reference.random_model(DSparkModel(spec()), seed=0)
    sequences = [sequence(14, 4, seed=1), sequence(9, 2, seed=2)]
    anchors_SA = torch.tensor([[4, 12, 7, 7], [2, 3, 7, 5]])  # unsorted, repeated, at the end
    with torch.no_grad():
        hidden = block_hidden(model, pack(sequences, anchors_SA, GAMMA))
    for row, one in enumerate(sequences):
        for column, anchor in enumerate(anchors_SA[row].tolist()):
            expected = reference.block_hidden(model, one, anchor)
            torch.testing.assert_close(hidden[row, column], expected, rtol=1e-4, atol=1e-4)


def test_blocks_see_the_context_before_their_anchor_and_themselves() -> None:
    sees = visibility(torch.tensor([[2, 1]]), 2, 3)[0].int().tolist()
    assert sees == [
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1],
        [1, 0, 0, 0, 0, 1, 1],
    ]


def test_a_pack_pairs_each_drafted_position_with_the_law_that_judges_it() -> None:
    one = sequence(8, 3, seed=1)
    batch = pack([one], torch.tensor([[3, 5, 6]]), GAMMA)
    ids = one.ids.tolist()
    assert batch.anchor_ids[0].tolist() == [ids[3], ids[5], ids[6]]
    assert batch.target_ids[0].tolist() == [ids[4:7], [*ids[6:8], 0], [ids[7], 0, 0]]
    assert batch.valid[0].tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert batch.previous_ids[0, 0].tolist() == ids[3:6]
    torch.testing.assert_close(batch.hidden[0, 0], one.hidden[3:6].float())
    torch.testing.assert_close(batch.log_normaliser[0, 0], one.log_normaliser[3:6])
    assert not batch.hidden[0, 2, 1:].any()


def test_anchors_are_response_positions_with_something_after_them() -> None:
    one = sequence(8, 3, seed=1)
    assert list(anchor_range(one)) == [3, 4, 5, 6]
    generator = torch.Generator().manual_seed(0)
    assert sorted(draw_anchors(one, 4, generator).tolist()) == [3, 4, 5, 6]
    many = draw_anchors(one, 50, generator)
    assert set(many.tolist()) == {3, 4, 5, 6}
    assert len(many) == 50


@pytest.mark.parametrize("field", ["features", "ids"])
def test_nothing_at_or_after_the_anchor_leaks_into_its_block(field: str) -> None:
    model = reference.random_model(DSparkModel(spec()), seed=0)
    one = sequence(12, 3, seed=1)
    anchors_SA = torch.tensor([[5, 9]])
    with torch.no_grad():
        before = block_hidden(model, pack([one], anchors_SA, GAMMA))
        changed = getattr(one, field)
        # The anchor's own id is an input; its features are not computed yet when drafting.
        changed[5 if field == "features" else 6 :] = 0
        after = block_hidden(model, pack([one], anchors_SA, GAMMA))
    torch.testing.assert_close(after[0, 0], before[0, 0])
    assert not torch.allclose(after[0, 1], before[0, 1])

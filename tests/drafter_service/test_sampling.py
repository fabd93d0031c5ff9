"""Drawing blocks: what is shipped is what was drawn from, whatever shares the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cluster.drafter_spec import DrafterSpec
from cluster.noise import KEYED, Stream, gumbel
from cluster.sparse import SparseQ, check_draft
from cluster.wire import Sampling
from drafter_service.backbone import DSparkModel
from drafter_service.sampling import NUM_CANDIDATES, Block, sample_blocks
from tests.exactness.tiny import Injected, sampling

GAMMA, VOCAB, DRAFT_VOCAB, WIDTH = 4, 300, 90, 8
ANCHORS, POSITIONS = [17, 250, 3], [40, 9, 77]

SPEC = DrafterSpec(
    hidden_size=WIDTH,
    intermediate_size=8,
    num_layers=0,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=128,
    gamma=GAMMA,
    mask_token_id=0,
    target_layer_ids=(0,),
    num_target_layers=1,
    target_hidden_size=8,
    vocab_size=VOCAB,
    draft_vocab_size=DRAFT_VOCAB,
    head="vanilla",
    markov_rank=6,
    has_confidence=True,
    confidence_with_markov=True,
    sliding_windows=(),
)


def model_for(**changes: Any) -> DSparkModel:
    torch.manual_seed(1)
    model = DSparkModel(dataclasses.replace(SPEC, **changes)).requires_grad_(False)
    model.d2t.copy_(torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values)
    return model


def hidden_for(num: int) -> torch.Tensor:
    return torch.randn(num, GAMMA, WIDTH, generator=torch.Generator().manual_seed(2)) * 4


def draw(model: DSparkModel, settings: list[Sampling], **options: Any) -> Block:
    num = len(settings)
    options = {"q_top_k": 16} | options
    return sample_blocks(
        model, hidden_for(3)[:num], ANCHORS[:num], POSITIONS[:num], settings, **options
    )


def laws(model: DSparkModel, s: int, drafts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [G, V] and confidences [G] of one session along given drafts, one at a time."""
    hidden, head, confidence = hidden_for(3)[s], model.markov_head, model.confidence_head
    state = head.initial_state(1) if head is not None else None
    logits, confidences = [], []
    for k, previous in enumerate([ANCHORS[s], *drafts[:-1]]):
        row, embedding = model.lm_head(hidden[k : k + 1]), None
        if head is not None and state is not None:
            latent, state, embedding = head.latent(
                torch.tensor([previous]), hidden[k : k + 1], state
            )
            row = row + latent @ head.markov_w2.weight.T
        logits.append(row[0])
        if confidence is not None:
            confidences.append(torch.sigmoid(confidence(hidden[k : k + 1], embedding))[0])
        else:
            confidences.append(row[0].softmax(0).max())
    return torch.stack(logits), torch.stack(confidences)


HEADS: list[dict[str, Any]] = [
    {"head": "vanilla"},
    {"head": "gated"},
    {"head": "rnn"},
    {"head": "none", "markov_rank": 0, "confidence_with_markov": False},
    {"head": "vanilla", "has_confidence": False},
]


@pytest.mark.parametrize("head", HEADS)
def test_greedy_follows_every_head(head: dict[str, Any]) -> None:
    model = model_for(**head)
    block = draw(model, [sampling(temperature=0.0, mode=m) for m in ("coupled", "rejection")])
    assert block.has_q.tolist() == [0, 0]
    for s in range(2):
        logits, confidences = laws(model, s, block.ids[s].tolist())
        assert block.ids[s].tolist() == model.d2t[logits.argmax(dim=1)].tolist()
        assert block.confidence[s] == pytest.approx(confidences.numpy(), rel=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_coupled_is_argmax_of_perturbed_law(temperature: float) -> None:
    """Noise by target id and by the position of the token itself, as the verifier has it."""
    model = model_for()
    settings = [sampling(seed=s + 5, temperature=temperature) for s in range(3)]
    block = draw(model, settings)
    assert not block.has_q.any()
    for s in range(3):
        logits, _ = laws(model, s, block.ids[s].tolist())
        for k in range(GAMMA):
            top = logits[k].topk(NUM_CANDIDATES)
            ids = model.d2t[top.indices].numpy()
            noise = gumbel(
                KEYED.uniform(
                    Stream.GUMBEL, np.array([s + 5], np.uint64), POSITIONS[s] + k + 1, ids
                )
            )
            assert (
                block.ids[s, k] == ids[(top.values.double().numpy() / temperature + noise).argmax()]
            )


def test_rejection_draws_from_what_it_ships() -> None:
    model = model_for()
    settings = [sampling(seed=s, mode="rejection", temperature=0.8) for s in range(3)]
    for uniform in (1e-12, 0.2, 0.5, 0.9, 1 - 1e-12):
        table = Injected({Stream.DRAFT: np.full((3, 99, GAMMA + 1), uniform)})
        block = draw(model, settings, randomness=table)
        assert block.q_ids.shape == block.q_probs.shape == (3, GAMMA, 16)
        for s in range(3):
            q = SparseQ(ids=block.q_ids[s], probs=block.q_probs[s])
            check_draft(tuple(block.ids[s].tolist()), q, VOCAB)
            logits, _ = laws(model, s, block.ids[s].tolist())
            for k in range(GAMMA):
                top = (logits[k] / 0.8).topk(16)
                assert block.q_ids[s, k].tolist() == model.d2t[top.indices].tolist()
                assert block.q_probs[s, k] == pytest.approx(top.values.softmax(0).numpy(), rel=1e-5)
                cdf = block.q_probs[s, k].astype(np.float64).cumsum()
                at = np.searchsorted(cdf, uniform * cdf[-1], side="right")
                assert block.ids[s, k] == block.q_ids[s, k, at]


def test_rejection_keys_its_draws_by_seed_anchor_and_place() -> None:
    """The production numbers: stream DRAFT, the request's seed, the anchor's position, k from 1."""
    model = model_for()
    block = draw(model, [sampling(seed=1 << 40, mode="rejection")])
    for k in range(GAMMA):
        uniform = KEYED.uniform(Stream.DRAFT, np.array([1 << 40], np.uint64), POSITIONS[0], k + 1)
        cdf = block.q_probs[0, k].astype(np.float64).cumsum()
        at = np.searchsorted(cdf, uniform[0] * cdf[-1], side="right")
        assert block.ids[0, k] == block.q_ids[0, k, at]


def test_mixed_batch_equals_single_sessions() -> None:
    model = model_for(head="rnn")
    settings = [
        sampling(seed=1, mode="rejection"),
        sampling(seed=2, temperature=0.0),
        sampling(seed=3, temperature=0.6),
    ]
    block = draw(model, settings)
    assert block.has_q.tolist() == [1, 0, 0]
    hidden = hidden_for(3)
    for s in range(3):
        alone = sample_blocks(
            model,
            hidden[s : s + 1],
            ANCHORS[s : s + 1],
            POSITIONS[s : s + 1],
            [settings[s]],
            q_top_k=16,
        )
        assert alone.ids[0].tolist() == block.ids[s].tolist()
        assert alone.confidence[0] == pytest.approx(block.confidence[s], rel=1e-5)
        if s == 0:
            assert alone.q_probs[0] == pytest.approx(block.q_probs[0], rel=1e-5)


@pytest.mark.parametrize("has_confidence", [True, False])
def test_confidence_never_sees_its_own_token(has_confidence: bool) -> None:
    """c_k may depend on x_<k only, or the schedule of rejection mode leaks x_k."""
    model = model_for(has_confidence=has_confidence)
    settings = [sampling(mode="rejection")]
    rng = np.random.default_rng(6)
    seen: dict[tuple[int, ...], set[float]] = {}
    for _ in range(60):
        table = np.zeros((1, 99, GAMMA + 1))
        table[..., 1:] = rng.choice([0.1, 0.6, 0.9], GAMMA)
        block = draw(model, settings, randomness=Injected({Stream.DRAFT: table}))
        for k in range(GAMMA):
            prefix = tuple(block.ids[0, :k].tolist())
            seen.setdefault(prefix, set()).add(float(block.confidence[0, k]))
    assert all(len(values) == 1 for values in seen.values())
    assert len({value for values in seen.values() for value in values}) > GAMMA


def test_width_of_q_is_bounded_by_the_draft_vocabulary() -> None:
    block = draw(model_for(), [sampling(mode="rejection")], q_top_k=1000)
    assert block.q_ids.shape == (1, GAMMA, DRAFT_VOCAB)
    assert block.q_probs.sum(axis=2) == pytest.approx(np.ones((1, GAMMA)), abs=1e-5)


def test_bfloat16_model() -> None:
    model = model_for().bfloat16()
    settings = [sampling(mode="rejection"), sampling(), sampling(temperature=0.0)]
    block = sample_blocks(model, hidden_for(3).bfloat16(), ANCHORS, POSITIONS, settings, q_top_k=16)
    q = SparseQ(ids=block.q_ids[0], probs=block.q_probs[0])
    check_draft(tuple(block.ids[0].tolist()), q, VOCAB)
    assert block.confidence.dtype == np.float32

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter_service.training.config import DrafterShape
from drafter_service.training.initialisation import (
    drafter_spec,
    factored_bigrams,
    initial_model,
    spread_taps,
)
from drafter_service.training.target import Target

BIGRAMS = torch.tensor([[5, 6], [5, 6], [6, 5], [7, 8]])


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return Target(tiny / "target")


def test_taps_are_spread_and_end_at_the_input_of_the_last_layer() -> None:
    assert spread_taps(30)[-1] == 28
    assert len(set(spread_taps(30))) == 5
    assert spread_taps(4) == (0, 1, 2)
    assert spread_taps(2) == (0,)


def test_context_keys_start_as_those_of_the_targets_last_layer(target: Target) -> None:
    """Up to the key norm that Llama lacks, which only rescales, and the noise of other taps."""
    spec = drafter_spec(target, DrafterShape(markov_rank=4, target_layer_ids=(0, 2)), 0)
    model = initial_model(spec, target, torch.arange(spec.draft_vocab_size), BIGRAMS, seed=0)
    ids = torch.arange(3, 13)
    taps, _ = target.hidden_states(ids, spec.target_layer_ids)
    with torch.no_grad():
        model.fc.weight[:, :32] = 0  # the noise on the other tap
        context = model.project(torch.cat(taps, dim=-1))
        ((_, values),) = model.context_key_values(context, torch.arange(10))
    layer = target.layer(-1)
    normed = torch.nn.functional.rms_norm(
        taps[1], (32,), layer["input_layernorm.weight"], spec.rms_norm_eps
    )
    expected = normed @ layer["self_attn.v_proj.weight"].T
    torch.testing.assert_close(values.flatten(1), expected, rtol=1e-4, atol=1e-4)
    # Query and key norms start at the size that queries and keys have in the target.
    keys = (normed @ layer["self_attn.k_proj.weight"].T).unflatten(-1, (-1, spec.head_dim))
    size = float(keys.square().mean(-1).sqrt().mean())
    found = model.state_dict()["layers.0.self_attn.k_norm.weight"]
    assert float(found.min()) == float(found.max()) == pytest.approx(size, rel=0.5)


def test_the_drafter_shares_the_targets_embedding_and_head_frozen(target: Target) -> None:
    spec = drafter_spec(target, DrafterShape(draft_vocab_size=10, num_layers=4), 0)
    d2t = torch.arange(10, 20)
    model = initial_model(spec, target, d2t, BIGRAMS, seed=0)
    assert torch.equal(model.embed_tokens.weight, target.embedding)
    assert torch.equal(model.lm_head.weight, target.head[10:20])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not {"embed_tokens.weight", "lm_head.weight"} & trained
    assert {"fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= trained


def test_factored_bigrams_rank_what_really_follows_first() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 30, (4000,), generator=generator)
    follows = torch.randperm(30, generator=generator)
    noise = torch.randint(0, 30, (4000,), generator=generator)
    second = torch.where(torch.rand(4000, generator=generator) < 0.6, follows[first], noise)
    w1, w2 = factored_bigrams(torch.stack([first, second], dim=1), 40, 30, rank=30)
    assert (w1[:30] @ w2.T).argmax(-1).tolist() == follows.tolist()
    assert not w1[30:].any()  # never seen: no bias
    n = 4000.0
    count = float(((first == 3) & (second == follows[3])).sum())
    exact = torch.tensor(
        (count - 0.75) * n / float((first == 3).sum() * (second == follows[3]).sum())
    ).log()
    torch.testing.assert_close(w1[3] @ w2[follows[3]], exact, rtol=0.02, atol=0)
    thin1, thin2 = factored_bigrams(torch.stack([first, second], dim=1), 40, 30, rank=64)
    torch.testing.assert_close(thin1 @ thin2.T, w1 @ w2.T, rtol=1e-3, atol=1e-3)

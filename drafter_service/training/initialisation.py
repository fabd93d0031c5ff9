"""Where training starts: a drafter that already computes something of its target.

The backbone's layers are copied from the target's last ones, and ``fc`` picks the tap that is the
last layer's input, so that at step 0 its context keys and values are those the target itself
attends to. The Markov head starts at the pointwise mutual information of neighbouring ids in the
target's replies, factored to its rank: hundreds of steps that need not be trained.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from cluster.drafter_spec import AutoregressiveSpec, DrafterSpec
from cluster.errors import CheckpointError, ConfigError
from drafter_service.backbone import DraftLayer, DSparkModel
from drafter_service.training.config import DrafterShape
from drafter_service.training.target import Target

_FC_NOISE = 0.2
"""Spread of the taps that are not copied, relative to an ordinary linear initialisation."""
_MARKOV_NOISE = 0.02
"""Spread added to the Markov embeddings, so that ids never seen can learn too."""
_DISCOUNT = 0.75
"""Taken off every bigram count: most pairs seen once are chance."""


def spread_taps(num_target_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """``num_taps`` layers spread evenly, ending at the one whose output the last layer reads.

    The very last layer is not tapped: its output is the last hidden state, which transformers
    reports after the final norm.
    """
    last = num_target_layers - 2
    if last < 0:
        return (0,)
    num_taps = min(num_taps, last + 1)
    stride = (last + 1) / num_taps
    return tuple(round(last - stride * (num_taps - 1 - i)) for i in range(num_taps))


def tapped_layers(chosen: tuple[int, ...] | None, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a run taps: the chosen ones, else `spread_taps`.

    Raises:
        ConfigError: a chosen one does not exist in the target.
    """
    if chosen and not all(0 <= layer < num_target_layers for layer in chosen):
        raise ConfigError(
            f"shape.target_layer_ids = {list(chosen)} outside the target's "
            f"{num_target_layers} layers"
        )
    return chosen or spread_taps(num_target_layers)


def drafter_spec(target: Target, shape: DrafterShape, mask_token_id: int) -> DrafterSpec:
    """The drafter of ``shape`` for ``target``: the target's widths, heads and rotary base.

    Raises:
        ConfigError: a tap or the number of layers does not exist in the target.
        CheckpointError: the target has a feature that draft layers lack.
    """
    config = target.config
    _refuse_unsupported(config)
    taps = tapped_layers(shape.target_layer_ids, config.num_hidden_layers)
    if shape.num_layers > config.num_hidden_layers:
        raise ConfigError(
            f"shape.num_layers = {shape.num_layers} exceeds the target's {config.num_hidden_layers}"
        )
    return DrafterSpec(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        max_position_embeddings=config.max_position_embeddings,
        gamma=shape.gamma,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        num_target_layers=config.num_hidden_layers,
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=min(shape.draft_vocab_size, config.vocab_size),
        head=shape.head,
        markov_rank=shape.markov_rank,
        has_confidence=True,
        confidence_with_markov=shape.head != "none",
        sliding_windows=(None,) * shape.num_layers,
    )


def check_shape(
    found: DrafterSpec | AutoregressiveSpec,
    wanted: DrafterSpec | AutoregressiveSpec,
    checkpoint: Path,
) -> None:
    """Refuse to train a drafter further as something that it is not.

    Raises:
        ConfigError: names each field that differs.
    """
    values = asdict(wanted)
    differ = [
        f"{name} is {value}, the run asks for {values[name]}"
        for name, value in asdict(found).items()
        if value != values[name]
    ]
    if differ:
        raise ConfigError(
            f"cannot start from {checkpoint}: {'; '.join(differ)}",
            hint="pass the shape that it was trained with: it is not read from the drafter",
        )


@torch.no_grad()
def initial_model(
    spec: DrafterSpec, target: Target, d2t: Tensor, bigrams: Tensor, seed: int
) -> DSparkModel:
    """A drafter on the target's device, its embedding and head frozen (shared with the target).

    Args:
        d2t: int64 [W], target id of each draft id.
        bigrams: int64 [M, 2], neighbours in the responses (see `factored_bigrams`).
    """
    generator = torch.Generator().manual_seed(seed)
    model = DSparkModel(spec)
    model.embed_tokens.weight.copy_(target.embedding)
    model.lm_head.weight.copy_(target.head[d2t])
    model.d2t = d2t.clone()
    model.norm.weight.copy_(target.final_norm)
    first = spec.num_target_layers - spec.num_layers
    for index, layer in enumerate(model.layers):
        state = target.layer(first + index)
        own_norms = {f"self_attn.{n}_norm.weight" for n in "qk"} - state.keys()
        layer.load_state_dict(state, strict=not own_norms)
    _start_projection(model, target, generator)
    if not any(name.endswith("q_norm.weight") for name in target.layer(0)):
        _start_head_norms(model, target)
    _start_heads(model, bigrams, spec.vocab_size, generator)
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model.to(target.device)


def _start_projection(model: DSparkModel, target: Target, generator: torch.Generator) -> None:
    """``H_ctx`` starts as what the last target layer's projections read (equation 2)."""
    spec = model.spec
    start_taps(model.fc, spec.target_layer_ids, spec.num_target_layers, generator)
    model.hidden_norm.weight.copy_(target.layer(-1)["input_layernorm.weight"])


def start_taps(
    fc: nn.Linear, taps: tuple[int, ...], num_target_layers: int, generator: torch.Generator
) -> None:
    """``fc`` passes on the tap nearest to the last target layer's input; the others are noise."""
    fc.weight.normal_(0, _FC_NOISE / fc.in_features**0.5, generator=generator)
    wanted = num_target_layers - 2  # the last layer's input is this layer's output
    nearest = min(range(len(taps)), key=lambda i: abs(taps[i] - wanted))
    width = fc.out_features
    fc.weight[:, nearest * width : (nearest + 1) * width].copy_(torch.eye(width))


def _start_head_norms(model: DSparkModel, target: Target) -> None:
    """Llama has no norm on queries and keys: start ours at their usual root-mean-square.

    A norm with that constant weight keeps directions and, on average, attention logits.
    """
    spec = model.spec
    probe_N = torch.arange(0, spec.vocab_size, max(1, spec.vocab_size // 256))[:256]
    first = spec.num_target_layers - spec.num_layers
    taps = range(max(first - 1, 0), spec.num_target_layers - 1)
    inputs, _ = target.hidden_states(probe_N, taps)
    if first == 0:
        inputs = [target.embedding[probe_N], *inputs]
    layers = cast("list[DraftLayer]", list(model.layers))
    for layer, x_ND in zip(layers, inputs, strict=True):
        normed_ND = layer.input_layernorm(x_ND.cpu())
        attention = layer.self_attn
        for projection, norm in (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
        ):
            heads_NHE = projection(normed_ND).unflatten(-1, (-1, spec.head_dim))
            norm.weight.fill_(float(heads_NHE.square().mean(-1).sqrt().mean()))


def _start_heads(
    model: DSparkModel, bigrams: Tensor, vocab_size: int, generator: torch.Generator
) -> None:
    head = model.markov_head
    if head is not None:
        first_VR, second_WR = factored_bigrams(
            bigrams, vocab_size, model.spec.draft_vocab_size, head.rank
        )
        head.markov_w1.weight.normal_(0, _MARKOV_NOISE, generator=generator).add_(first_VR)
        head.markov_w2.weight.copy_(second_WR)
        for name, parameter in head.named_parameters():
            if not name.startswith("markov_w"):  # gates and recurrence: torch's usual start, seeded
                bound = (model.spec.hidden_size + head.rank) ** -0.5
                parameter.uniform_(-bound, bound, generator=generator)
    if model.confidence_head is not None:
        model.confidence_head.proj.weight.zero_()
        model.confidence_head.proj.bias.zero_()


def factored_bigrams(
    bigrams: Tensor, vocab_size: int, draft_vocab_size: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Pointwise mutual information of neighbours, as the best product of two thin matrices.

    Args:
        bigrams: int64 [M, 2], (target id, draft id that followed it); counted here.

    Returns:
        (W1 [V, R], W2 [W, R]) of equation 5, with ``W1 W2^T`` near
        ``max(0, log (c(a, b) c / c(a) c(b)))``; zero for ids never seen.
    """
    pairs_P2, count_P = torch.unique(bigrams, dim=0, return_counts=True)
    first_P, second_P = pairs_P2.unbind(1)
    of_first_V = torch.bincount(bigrams[:, 0], minlength=vocab_size)
    of_second_W = torch.bincount(bigrams[:, 1], minlength=draft_vocab_size)
    expected_P = of_first_V[first_P].double() * of_second_W[second_P] / len(bigrams)
    information_P = ((count_P - _DISCOUNT) / expected_P).log().clamp(min=0).float()
    # Only ids that occur, so that the sketch of the factorisation stays small.
    rows, row_P = torch.unique(first_P, return_inverse=True)
    columns, column_P = torch.unique(second_P, return_inverse=True)
    matrix = torch.sparse_coo_tensor(
        torch.stack([row_P, column_P]),
        information_P,
        (len(rows), len(columns)),
        check_invariants=True,
    ).coalesce()
    left, singular, right = _truncated_svd(matrix, rank)
    scale = singular.sqrt()
    w1_VR, w2_WR = torch.zeros(vocab_size, rank), torch.zeros(draft_vocab_size, rank)
    w1_VR[rows, : len(scale)] = left * scale
    w2_WR[columns, : len(scale)] = right * scale
    return w1_VR, w2_WR


def _truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Leading singular triplets of a sparse matrix, by subspace iteration from a fixed start."""
    generator = torch.Generator().manual_seed(0)
    width = min(rank + 16, *matrix.shape)
    transposed = matrix.transpose(0, 1).coalesce()
    basis = torch.randn(matrix.shape[1], width, generator=generator)
    for _ in range(4):
        basis = torch.linalg.qr(torch.sparse.mm(matrix, basis)).Q
        basis = torch.linalg.qr(torch.sparse.mm(transposed, basis)).Q
    left, singular, inner = torch.linalg.svd(torch.sparse.mm(matrix, basis), full_matrices=False)
    kept = min(rank, len(singular))
    return left[:, :kept], singular[:kept], (basis @ inner.mT)[:, :kept]


def _refuse_unsupported(config: object) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise CheckpointError(f"target has {name}, which draft layers do not")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or "rope_theta" not in rope:
        raise CheckpointError(f"target's rope_parameters {rope} are not plain rotary positions")

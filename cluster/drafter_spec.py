"""The shapes of drafters with weights, whatever file format they came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

HeadKind = Literal["vanilla", "gated", "rnn", "none"]
NGRAM: Final = "ngram"
"""Name of prompt lookup, the drafter without a checkpoint."""
DrafterSource = Path | Literal["ngram"]
"""What a drafter is made of: a checkpoint folder, or nothing but the text."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Architecture of one drafter (paper section 3.1). Sizes in elements, ids in the target's
    vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    gamma: int
    """Tokens drafted per block (checkpoint: ``block_size``)."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Target layers whose outputs are features: layer id i is transformers'
    ``hidden_states[i + 1]``."""
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int
    """The target's vocabulary: what ids mean on the wire."""
    draft_vocab_size: int
    """Rows of the draft head; equals ``vocab_size`` unless the vocabulary is reduced."""
    head: HeadKind
    markov_rank: int
    """0 with head ``none``: plain DFlash."""
    has_confidence: bool
    confidence_with_markov: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many context positions before the anchor the block sees, None for all."""
    sample_from_anchor: bool = True
    """Whether the anchor's own slot predicts the first draft token (DSpark); otherwise (DFlash)
    the block has one more slot than draft tokens and the anchor's output is unused."""
    causal_sliding_blocks: bool = False
    """Whether, in layers with a sliding window, a block position sees no later one of its block."""

    @property
    def block_width(self) -> int:
        """Slots of one block ``[anchor, mask, ...]``."""
        return self.gamma if self.sample_from_anchor else self.gamma + 1

    @property
    def feature_width(self) -> int:
        """Width of one raw feature row: the tapped layers side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class AutoregressiveSpec:
    """Architecture of an EAGLE-3-type drafter: one causal layer over [token; target feature].

    Row i pairs the feature at position i with the id at position i + 1 and predicts the id at
    i + 2. Behind the committed rows the layer's own output stands in for the feature. With
    ``gamma`` 1 and the target's last hidden state as the only tap this is MTP-1.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    gamma: int
    target_layer_ids: tuple[int, ...]
    """As in `DrafterSpec`."""
    num_target_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    has_confidence: bool
    norms_heads: bool
    """Whether queries and keys are normed per head, as Qwen3 does."""
    norm_before_residual: bool = False
    """Whether the residual stream starts at the normed feature instead of the raw one."""
    norm_output: bool = False
    """Whether the output is fed back after the final norm instead of before it."""

    @property
    def feature_width(self) -> int:
        """Width of one raw feature row: the tapped layers side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size

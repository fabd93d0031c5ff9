"""Sequential heads and the confidence head (paper sections 3.1 and 3.2.1, equations 4 to 7).

A sequential head turns the token just sampled into a bias on the next position's base logits.
Heads are stepped left to right; the state of the RNN head is explicit, so that a batch of
blocks, a training pack and a single block go through the same code.

Shape legend: N block positions stepped at once (one per block), D hidden size, R Markov rank,
V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cluster.drafter_spec import DrafterSpec


class SequentialHead(nn.Module):
    """Bias ``B_k(x_0, x_<k, v)`` of equation 4: vanilla (5), gated, or RNN (6) by ``spec.head``.

    Parameter names are those of the DeepSpec checkpoint's ``markov_head``.
    """

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        rank, width = spec.markov_rank, spec.hidden_size
        self.kind = spec.head
        self.rank = rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def initial_state(self, num: int) -> Tensor:
        """Zero state [N, R] (used by the RNN head, carried untouched by the others)."""
        return self.markov_w1.weight.new_zeros(num, self.rank)

    def latent(
        self, previous_N: Tensor, hidden_ND: Tensor, state_NR: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step. Returns (latent [N, R] whose ``markov_w2`` is the bias, state, W1[x_{k-1}])."""
        embedding_NR = self.markov_w1(previous_N)
        if self.kind == "vanilla":
            return embedding_NR, state_NR, embedding_NR
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden_ND, embedding_NR], dim=-1)))
            return gate * embedding_NR, state_NR, embedding_NR
        joint = self.joint_proj(torch.cat([state_NR, embedding_NR, hidden_ND], dim=-1))
        gate_raw, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate_raw)
        state_NR = gate * state_NR + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state_NR, embedding_NR


class ConfidenceHead(nn.Module):
    """Logit of ``c_k`` (equation 7): will token k survive, given that all before it did."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.with_markov = markov_rank > 0
        """Whether it also sees the sequential head's embedding, of this rank."""
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden_ND: Tensor, embedding_NR: Tensor | None) -> Tensor:
        """Confidence logits [N] from block hidden states and ``W1[x_{k-1}]``."""
        if self.with_markov:
            assert embedding_NR is not None, "confidence_with_markov needs a sequential head"
            hidden_ND = torch.cat([hidden_ND, embedding_NR], dim=-1)
        logits: Tensor = self.proj(hidden_ND).squeeze(-1)
        return logits

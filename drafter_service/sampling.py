"""Drawing a block left to right (paper section 3.1, equation 4; DESIGN 3.3 and 3.11).

The backbone has produced hidden states for the whole block; here the sequential head turns each
drawn token into a bias on the next position. Sessions of all kinds go through one pass:

* greedy (temperature 0): argmax;
* ``coupled``: argmax(log q + G) with the noise that the verifier will form for that position;
* ``rejection``: q is cut to its ``q_top_k`` likeliest, renormalised, rounded to fp32, and only then
  drawn from: what is shipped is the law that was really used.

Confidence ``c_k`` is the head's (equation 7). A drafter without one reports the largest
probability of its law at k instead. Both depend on x_<k only; the probability of the drawn x_k
would be a sharper guess, and would make the schedule of rejection mode inexact. A calibration
scales the logit of either by the request's regime and k (paper section 3.2.1); it never changes
what is drawn.

Shape legend: S sessions, G gamma, D draft hidden size, V draft vocabulary, C candidates, K width
of the shipped q, Q sessions that ship one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.noise import KEYED, Randomness, Stream, gumbel
from cluster.wire import F32, I32, U8, Sampling
from drafter_service.backbone import DSparkModel
from drafter_service.calibration.calibration import Calibration

NUM_CANDIDATES: Final = 64
"""Likeliest draft tokens that coupled mode perturbs. Any number is exact; more match more often."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Draft blocks of a batch; ids are the target's."""

    ids: I32  # S, G
    confidence: F32  # S, G; conditional, in [0, 1]
    q_ids: I32  # Q, G, K
    q_probs: F32  # Q, G, K
    has_q: U8  # S


def sample_blocks(
    model: DSparkModel,
    hidden_SGD: Tensor,
    anchor_ids_S: Sequence[int],
    anchor_positions_S: Sequence[int],
    samplings: Sequence[Sampling],
    *,
    q_top_k: int,
    calibration: Calibration | None = None,
    randomness: Randomness = KEYED,
) -> Block:
    """Draw one block per session.

    Args:
        model: drafter with its heads; `DSparkModel.d2t` maps draft ids to target ids.
        hidden_SGD: final hidden states of ``[anchor, mask, ...]``.
        anchor_ids_S: last committed token of each session, a target id.
        anchor_positions_S: its position.
        samplings: parameters of each session's request.
        q_top_k: most entries of a shipped q row; the width is smaller for a small draft
            vocabulary.
        calibration: of the drafter's confidence; None reports it raw.
    """
    num_sessions, gamma, _ = hidden_SGD.shape
    base_SGV = model.lm_head(hidden_SGD)
    draw = Draw(
        anchor_positions_S,
        samplings,
        gamma=gamma,
        vocab_size=base_SGV.shape[2],
        q_top_k=q_top_k,
        device=base_SGV.device,
        randomness=randomness,
    )
    previous_S = torch.as_tensor(np.asarray(anchor_ids_S, np.int64), device=hidden_SGD.device)
    head = model.markov_head
    state_SR = head.initial_state(num_sessions) if head is not None else None
    ids, confidences = [], []
    for k in range(gamma):
        hidden_SD, logits_SV, embedding_SR = hidden_SGD[:, k], base_SGV[:, k], None
        if head is not None and state_SR is not None:
            latent_SR, state_SR, embedding_SR = head.latent(previous_S, hidden_SD, state_SR)
            logits_SV = logits_SV + head.markov_w2(latent_SR)
        if model.confidence_head is not None:
            confidences.append(model.confidence_head(hidden_SD, embedding_SR).float().sigmoid())
        else:
            confidences.append(draw.peak(logits_SV))
        previous_S = draw.step(k, logits_SV, model.d2t)
        ids.append(previous_S)
    return draw.block(ids, confidences, calibration)


class Draw:
    """Picks the k-th tokens of a batch; holds what does not depend on the tokens before.

    Args:
        anchor_positions_S, samplings: of each session, as in `sample_blocks`.
        gamma: how many times it will pick.
        vocab_size: of the draft head.
        q_top_k: most entries of a shipped q row.
        device: of the logits.
    """

    def __init__(
        self,
        anchor_positions_S: Sequence[int],
        samplings: Sequence[Sampling],
        *,
        gamma: int,
        vocab_size: int,
        q_top_k: int,
        device: torch.device,
        randomness: Randomness = KEYED,
    ) -> None:
        self.samplings = samplings
        self.randomness = randomness
        self.seeds_S = np.array([s.seed for s in samplings], np.uint64)
        self.anchors_S = np.asarray(anchor_positions_S, np.int64)
        temperatures = np.array([s.temperature for s in samplings], np.float64)
        modes = np.array([s.mode for s in samplings])
        self.ships = (temperatures > 0) & (modes == "rejection")
        self.shipping = np.flatnonzero(self.ships)
        self.coupling = np.flatnonzero((temperatures > 0) & (modes == "coupled"))
        self.scale_S1 = 1 / torch.as_tensor(np.where(temperatures > 0, temperatures, 1))[:, None]
        self.scale_S1 = self.scale_S1.to(device)
        width = min(q_top_k, vocab_size)
        self.num_candidates = min(max(NUM_CANDIDATES, width), vocab_size)
        self.q_ids = np.empty((len(self.shipping), gamma, width), np.int32)
        self.q_probs = np.empty((len(self.shipping), gamma, width), np.float32)
        self.uniform_QG = randomness.uniform(
            Stream.DRAFT,
            self.seeds_S[self.shipping, None],
            self.anchors_S[self.shipping, None],
            np.arange(1, gamma + 1),
        )

    def peak(self, logits_SV: Tensor) -> Tensor:
        """Largest probability of each session's law [S]."""
        return (logits_SV * self.scale_S1).softmax(dim=1).amax(dim=1)

    def step(self, k: int, logits_SV: Tensor, d2t: Tensor) -> Tensor:
        """Target ids [S] of draft k (counted from 0)."""
        if not (len(self.shipping) or len(self.coupling)):
            return d2t[logits_SV.argmax(dim=1)]
        top_SC, place_SC = logits_SV.topk(self.num_candidates, dim=1)
        ids_SC = d2t[place_SC].cpu().numpy()
        log_q_SC = ((top_SC - top_SC[:, :1]).double() * self.scale_S1).cpu().numpy()
        chosen_S = d2t[logits_SV.argmax(dim=1)].cpu().numpy()  # greedy ones keep it
        at = self.coupling
        if len(at):
            noise = self.randomness.uniform(
                Stream.GUMBEL, self.seeds_S[at, None], self.anchors_S[at, None] + k + 1, ids_SC[at]
            )
            winner = (log_q_SC[at] + gumbel(noise)).argmax(axis=1)
            chosen_S[at] = ids_SC[at, winner]
        at = self.shipping
        if len(at):
            width = self.q_ids.shape[2]
            self.q_ids[:, k] = ids_SC[at, :width]
            self.q_probs[:, k] = _normalised(log_q_SC[at, :width])
            winner = _inverse_cdf(self.q_probs[:, k], self.uniform_QG[:, k])
            chosen_S[at] = ids_SC[at, winner]
        return torch.as_tensor(chosen_S, device=d2t.device)

    def block(
        self, ids: Sequence[Tensor], confidences: Sequence[Tensor], calibration: Calibration | None
    ) -> Block:
        """What was picked, once `step` has been called for every position.

        Args:
            ids: what the steps gave, [S] each.
            confidences: conditional, [S] each.
            calibration: applied to them; None reports them raw.
        """
        confidence_SG = torch.stack(list(confidences), dim=1).to("cpu", torch.float32).numpy()
        if calibration is not None:
            confidence_SG = calibration.apply(confidence_SG, self.samplings)
        return Block(
            ids=torch.stack(list(ids), dim=1).to("cpu", torch.int32).numpy(),
            confidence=confidence_SG,
            q_ids=self.q_ids,
            q_probs=self.q_probs,
            has_q=self.ships.astype(np.uint8),
        )


def _normalised(log_q_QK: NDArray[np.float64]) -> F32:
    """Probabilities [Q, K] in the fp32 that is shipped."""
    weight_QK = np.exp(log_q_QK)
    probs: F32 = (weight_QK / weight_QK.sum(axis=1, keepdims=True)).astype(np.float32)
    return probs


def _inverse_cdf(q_QK: F32, uniform_Q: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index [Q] drawn from fp32 rows, taken over their fp64 sum as the verifier takes them."""
    cdf_QK = q_QK.cumsum(axis=1, dtype=np.float64)
    beyond_QK = cdf_QK > uniform_Q[:, None] * cdf_QK[:, -1:]
    return np.asarray(beyond_QK.argmax(axis=1))

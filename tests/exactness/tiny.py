"""A drafter and a target small enough to enumerate, behind the production functions.

Both are first-order Markov over V tokens: the target's law after token x is ``p[x]``, the draft's
``q[x]``. The drafter is a real `DSparkModel` whose Markov head holds log q, so that drafting runs
`sample_blocks` as served. Entries of q are dyadic: fp32 holds them exactly.

Shape legend: V vocabulary, G gamma, S sessions, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cluster.drafter_spec import DrafterSpec
from cluster.noise import Randomness, Stream
from cluster.sparse import SparseQ
from cluster.wire import Sampling
from drafter_service.backbone import DSparkModel
from drafter_service.sampling import Block, sample_blocks
from router.policies import PolicyInput
from router.policies.retrospective import retrospective_lengths
from verifier_service.acceptance import RowVerdict, VerifyRow, accept

Schedule = Callable[[np.ndarray, Block], np.ndarray]
"""(survival [R, G], the drafted block) -> lengths [R]. Only wrong rules look at the block's ids."""


def sampling(**changes: Any) -> Sampling:
    """Plain sampling at temperature 1, coupled, with these changes."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "seed": 0,
        "mode": "coupled",
        "logprobs": False,
    }
    return Sampling(**(values | changes))


@dataclass(frozen=True)
class Pair:
    """Laws ``p[V, V]``, ``q[V, V]``; the confidence logit of place k after x is ``a[k] + f[x]``."""

    p: np.ndarray
    q: np.ndarray
    a: np.ndarray
    f: np.ndarray

    @property
    def gamma(self) -> int:
        return len(self.a)

    @property
    def vocab_size(self) -> int:
        return len(self.p)

    def drafter(self) -> DSparkModel:
        """Hidden state k is the k-th unit vector; W1[x] = [log q[x], f[x]]."""
        vocab_size, gamma = self.vocab_size, self.gamma
        model = DSparkModel(_spec(vocab_size, gamma)).double()
        with torch.no_grad():
            model.lm_head.weight.zero_()
            head, confidence = model.markov_head, model.confidence_head
            assert head is not None
            assert confidence is not None
            table = np.concatenate([np.log(self.q), self.f[:, None]], axis=1)
            head.markov_w1.weight.copy_(torch.as_tensor(table))
            head.markov_w2.weight.copy_(torch.eye(vocab_size, vocab_size + 1))
            weight = np.concatenate([self.a, np.zeros(vocab_size), [1.0]])
            confidence.proj.weight.copy_(torch.as_tensor(weight)[None])
            confidence.proj.bias.zero_()
        return model.requires_grad_(False)

    def draft(
        self,
        contexts: Sequence[tuple[int, ...]],
        samplings: Sequence[Sampling],
        randomness: Randomness,
    ) -> Block:
        """One block per context, drawn by production."""
        hidden = torch.eye(self.gamma, dtype=torch.float64).expand(len(contexts), -1, -1)
        return sample_blocks(
            self.drafter(),
            hidden,
            [ids[-1] for ids in contexts],
            [len(ids) - 1 for ids in contexts],
            samplings,
            q_top_k=self.vocab_size,
            randomness=randomness,
        )

    def verify(
        self,
        contexts: Sequence[tuple[int, ...]],
        samplings: Sequence[Sampling],
        block: Block,
        lengths: np.ndarray,
        randomness: Randomness,
        p: np.ndarray | None = None,
    ) -> list[RowVerdict]:
        """Judge the first ``lengths`` drafts of each block by production (by target ``p``)."""
        slot = np.cumsum(block.has_q) - 1
        rows, previous = [], []
        ids = block.ids.tolist()
        for s, (context, num) in enumerate(zip(contexts, lengths.tolist(), strict=True)):
            drafts = tuple(ids[s][:num])
            q = None
            if block.has_q[s]:
                at = slot[s]
                q = SparseQ(ids=block.q_ids[at, :num], probs=block.q_probs[at, :num])
            rows.append(
                VerifyRow(sampling=samplings[s], ids=context, num_prompt=1, draft_ids=drafts, q=q)
            )
            previous.extend((context[-1], *drafts))
        law = np.log(self.p if p is None else p)
        return accept(torch.as_tensor(law[previous]), rows, randomness=randomness)

    def sequence_law(self, first: int, length: int) -> dict[tuple[int, ...], float]:
        """The target's law of ``length`` tokens after ``first``."""
        law = {(): 1.0}
        for _ in range(length):
            law = {
                (*ids, token): weight * self.p[ids[-1] if ids else first, token]
                for ids, weight in law.items()
                for token in range(self.vocab_size)
            }
        return law

    def complete(
        self, law: dict[tuple[int, ...], float], length: int
    ) -> dict[tuple[int, ...], float]:
        """Continue shorter outcomes by the target itself up to ``length`` tokens."""
        full: dict[tuple[int, ...], float] = {}
        for ids, weight in law.items():
            for rest, share in self.sequence_law(ids[-1], max(0, length - len(ids))).items():
                key = (*ids, *rest)[:length]
                full[key] = full.get(key, 0.0) + weight * share
        return full


class Injected:
    """Uniforms looked up in tables [seed, position, index]; asking for any other stream fails."""

    def __init__(self, tables: dict[Stream, np.ndarray]) -> None:
        self.tables = tables

    def uniform(
        self, stream: Stream, seeds: np.ndarray, positions: Any, indices: Any
    ) -> np.ndarray:
        at = np.broadcast_arrays(seeds.astype(np.int64), positions, indices)
        return self.tables[stream][tuple(at)] if at[0].size else np.empty(at[0].shape)


def survival(block: Block) -> np.ndarray:
    """a_{r,j} in fp64, as a lane forms it."""
    return np.cumprod(block.confidence.astype(np.float64), axis=1)


def step_of(
    survival_RG: np.ndarray, sps: np.ndarray, *, deterministic: bool = False
) -> PolicyInput:
    """A step of these blocks, all there, as a policy sees it; ``sps[B]`` steps per second."""
    num_rows, gamma = survival_RG.shape
    return PolicyInput(
        survival_RG=survival_RG,
        num_drafts_R=np.full(num_rows, gamma),
        deterministic_R=np.full(num_rows, deterministic),
        weight_R=np.ones(num_rows),
        rids=np.arange(num_rows),
        step_s_B=1 / np.asarray(sps, np.float64),
    )


def retrospective(survival_RG: np.ndarray, sps: np.ndarray) -> np.ndarray:
    """The wrong rule for sampled drafts, as production has it for others: told that nothing was
    drawn, it takes the best point of the whole walk."""
    return retrospective_lengths(step_of(survival_RG, sps, deterministic=True))


def gap(law: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> float:
    """Largest difference of two laws, outcome by outcome."""
    return max(abs(law.get(key, 0.0) - wanted.get(key, 0.0)) for key in law.keys() | wanted.keys())


def _spec(vocab_size: int, gamma: int) -> DrafterSpec:
    return DrafterSpec(
        hidden_size=gamma,
        intermediate_size=1,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=64,
        gamma=gamma,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=1,
        target_hidden_size=1,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        head="vanilla",
        markov_rank=vocab_size + 1,
        has_confidence=True,
        confidence_with_markov=True,
        sliding_windows=(),
    )

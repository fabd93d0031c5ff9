"""Replay a golden folder through production code: ``python -m tests.golden DIR``.

A golden folder holds a tiny target, a DSpark drafter, and what the paper's reference implementation
computed with them, greedily, round by round (``expected.safetensors``). The replay loads the
drafter, commits each round's rows to a session of the real engine, drafts, and compares every
intermediate figure. It prints the largest absolute difference per quantity and round, and exits
with 1 if one exceeds `TOLERANCE` (token ids included).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cluster import digest
from cluster.errors import DSparkError
from cluster.wire import Commit, Open
from drafter_service.drafter import Work
from drafter_service.engine import DraftEngine
from drafter_service.loading import load_drafter
from tests.frames import make_sampling

TOLERANCE = 1e-4
OWNER = 1


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest absolute difference of one quantity in one round."""

    round: int
    quantity: str
    value: float


def replay(folder: Path, companions: Sequence[int] = ()) -> list[Difference]:
    """Replay all rounds of a golden folder.

    Args:
        folder: with ``target/``, ``drafter/`` and ``expected.safetensors``.
        companions: context lengths of other sessions (random rows) that share every batch.
    """
    expected = load_file(folder / "expected.safetensors")
    model = load_drafter(folder / "drafter", folder / "target")
    engine = DraftEngine(
        model, max_sessions=64, max_session_tokens=1 << 15, idle_session_s=60.0, q_top_k=8
    )
    target = _Target(folder / "target", model.spec.target_layer_ids)
    others = _Companions(engine, companions)
    differences: list[Difference] = []
    ids = expected["prompt_ids"].tolist()
    covered = 0
    engine.run([_open(rid=0, first_id=ids[0])], 0.0)
    for number, want in _rounds(expected):
        ids.append(int(want["anchor_token"]))
        rows = want["context_features"]
        assert covered + len(rows) == int(want["anchor_position"]), "the golden itself has a hole"
        got = {
            "projected_context": model.project(rows).detach(),
            "context_features": target.features(ids)[covered : covered + len(rows)],
        }
        commit = _commit(0, covered, ids[covered + 1 :], digest.of(ids), got["projected_context"])
        got |= _draft(engine, [*others.work(number), commit])
        got["target_logits"] = target.logits(ids, got["draft_tokens"])
        differences += [
            Difference(round=number, quantity=name, value=_distance(got[name], want[name]))
            for name in got
        ]
        covered += len(rows)
        ids += got["draft_tokens"].tolist()[: int(want["num_committed_rows"]) - 1]
    return differences


def _draft(engine: DraftEngine, work: list[Work]) -> dict[str, Tensor]:
    """Run one batch and read session 0's figures off the engine and its heads."""
    before = engine.sessions.allocator.num_free
    outcome = engine.run(work, 0.0)
    assert not outcome.lost, outcome.lost
    row = [d.rid for d in outcome.drafted].index(0)
    sessions = [engine.sessions.get(d.lane_id, d.rid) for d in outcome.drafted]
    live = [session for session in sessions if session is not None]
    hidden_GD = engine.block_hidden(live)[row]
    assert outcome.block is not None
    assert engine.sessions.allocator.num_free <= before
    tokens = torch.as_tensor(outcome.block.ids[row].tolist())
    base, draft, confidence = head_figures(engine, hidden_GD, live[row].last_id, tokens)
    shipped = torch.as_tensor(outcome.block.confidence[row])
    assert torch.allclose(shipped, confidence.sigmoid(), atol=1e-5), "confidence as shipped"
    return {
        "block_hidden": hidden_GD,
        "base_logits": base,
        "draft_logits": draft,
        "draft_tokens": tokens,
        "confidence_logits": confidence,
    }


@torch.inference_mode()
def head_figures(
    engine: DraftEngine, hidden_GD: Tensor, anchor_id: int, tokens_G: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits [G, W], draft logits [G, W], confidence logits [G] along the tokens drafted."""
    model = engine.model
    base_GW = model.lm_head(hidden_GD)
    assert model.confidence_head is not None
    draft, confidence = [], []
    previous = torch.tensor([anchor_id])
    state = None
    for k, hidden_D in enumerate(hidden_GD):
        step_1W, embedding = base_GW[k : k + 1], None
        if model.markov_head is not None:
            state = model.markov_head.initial_state(1) if state is None else state
            latent, state, embedding = model.markov_head.latent(previous, hidden_D[None], state)
            step_1W = step_1W + model.markov_head.markov_w2(latent)
        draft.append(step_1W)
        confidence.append(model.confidence_head(hidden_D[None], embedding))
        previous = tokens_G[k : k + 1]
    return base_GW, torch.cat(draft), torch.cat(confidence)


class _Companions:
    """Other sessions in the engine: random contexts that grow by a row each round."""

    def __init__(self, engine: DraftEngine, lengths: Sequence[int]) -> None:
        self._width = engine.spec.hidden_size
        self._lengths = lengths
        self._random = torch.Generator().manual_seed(7)
        for rid in range(1, len(lengths) + 1):
            engine.run([_open(rid=rid, first_id=rid)], 0.0)
        self._ids = [[rid] for rid in range(1, len(lengths) + 1)]

    def work(self, number: int) -> list[Work]:
        commits = []
        for index, length in enumerate(self._lengths):
            num = 1 if number else length
            ids = self._ids[index]
            new = torch.randint(0, 300, (num,), generator=self._random).tolist()
            first = len(ids) - 1
            ids += new
            features = torch.randn(num, self._width, generator=self._random)
            commits.append(_commit(index + 1, first, new, digest.of(ids), features))
        return commits


class _Target:
    """The golden's target on transformers: checks the tapped layers and the verify logits."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._layer_ids = layer_ids

    @torch.inference_mode()
    def features(self, ids: list[int]) -> Tensor:
        out = self._model(torch.tensor([ids]), output_hidden_states=True)
        return torch.cat([out.hidden_states[i + 1][0] for i in self._layer_ids], dim=-1)

    @torch.inference_mode()
    def logits(self, ids: list[int], draft: Tensor) -> Tensor:
        logits: Tensor = self._model(torch.tensor([[*ids, *draft.tolist()]])).logits
        return logits[0, len(ids) - 1 :]


def _rounds(expected: dict[str, Tensor]) -> Iterator[tuple[int, dict[str, Tensor]]]:
    number = 0
    while f"round{number}.anchor_position" in expected:
        prefix = f"round{number}."
        yield (
            number,
            {
                name.removeprefix(prefix): tensor
                for name, tensor in expected.items()
                if name.startswith(prefix)
            },
        )
        number += 1


def _open(*, rid: int, first_id: int) -> Work:
    frame = Open(lane_id="golden", rid=rid, epoch=0, first_id=first_id, sampling=make_sampling())
    return Work(owner=OWNER, frame=frame)


def _commit(rid: int, first: int, ids: list[int], digest_after: int, features: Tensor) -> Work:
    frame = Commit(
        lane_id="golden",
        rid=np.array([rid], np.int64),
        epoch=np.zeros(1, np.int32),
        first_position=np.array([first], np.int32),
        num_rows=np.array([len(ids)], np.int32),
        digest=np.array([digest_after], np.uint64),
        want_draft=np.ones(1, np.uint8),
        ids=np.array(ids, np.int32),
        features=features.numpy(),
    )
    return Work(owner=OWNER, frame=frame)


def _distance(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape:
        return float("inf")
    return float((got.double() - want.double()).abs().max())


def _print_table(differences: Sequence[Difference]) -> None:
    quantities = list(dict.fromkeys(d.quantity for d in differences))
    rounds = sorted({d.round for d in differences})
    value = {(d.quantity, d.round): d.value for d in differences}
    print(f"{'max abs difference':<20}" + "".join(f"  round {r:>2}" for r in rounds))
    for name in quantities:
        print(f"{name:<20}" + "".join(f"  {value[name, r]:8.1e}" for r in rounds))


def main(arguments: Sequence[str]) -> int:
    """Replay the folder alone and among sessions of other lengths; 0 if all is within tolerance."""
    if len(arguments) != 1:
        print("usage: python -m tests.golden DIR", file=sys.stderr)
        return 2
    failed = []
    for companions in ((), (1, 40, 300)):
        try:
            differences = replay(Path(arguments[0]), companions)
        except (DSparkError, OSError) as error:
            print(f"golden: {error}", file=sys.stderr)
            return 1
        print(f"\n{arguments[0]}, {'alone' if not companions else f'beside contexts {companions}'}")
        _print_table(differences)
        failed += [d for d in differences if not d.value <= TOLERANCE]
    for d in failed:
        print(f"golden: round {d.round}: {d.quantity} differs by {d.value:.3g} > {TOLERANCE}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    sys.exit(main(sys.argv[1:]))

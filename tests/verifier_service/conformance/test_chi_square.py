"""The engine end to end against the target's law: requests of many seeds behind one prompt.

Each request is admitted, says its first token, and is then verified with drafts that were drawn as
a drafter draws them, until three tokens are there. The law of those three tokens is known from
transformers; it has to hold whatever was accepted or refused on the way. The twin that must fail
asks the engine for a law that is off by 2% of its mass.

Shape legend: N contexts, V vocabulary, S requests of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from scipy.special import logit
from scipy.stats import chisquare
from torch import Tensor

from cluster.sparse import SparseQ
from cluster.wire import Sampling
from drafter_service.sampling import Draw
from tests.frames import make_admission, make_sampling
from tests.verifier_service.conformance.rounds import Draft, Rounds
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt
from verifier_service.engine import Engine

NUM_ROUNDS: Final = 20_480
NUM_TOKENS: Final = 3
GAMMA: Final = 2
NUM_CELLS: Final = 20
Q_TOP_K: Final = 16
START: Final = prompt(3, 41)


class Laws:
    """Logits of a target behind one prompt and a few more tokens, by transformers."""

    def __init__(self, target: Target, start: Sequence[int]) -> None:
        self._model = target.reference.model
        self._start = tuple(start)
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits(self, suffixes: Sequence[tuple[int, ...]]) -> Tensor:
        """[N, V] for suffixes of equal length."""
        missing = sorted({suffix for suffix in suffixes if suffix not in self._known})
        for at in range(0, len(missing), 512):
            part = missing[at : at + 512]
            ids = torch.tensor([self._start + suffix for suffix in part])
            rows = self._model(ids, logits_to_keep=1).logits[:, 0]
            self._known.update(zip(part, rows, strict=True))
        return torch.stack([self._known[suffix] for suffix in suffixes])

    def likeliest(self, length: int, temperature: float) -> dict[tuple[int, ...], float]:
        """The `NUM_CELLS` likeliest texts of this length, and their probabilities.

        A text is no likelier than its beginning, so those behind beginnings less likely than all
        that were found cannot be among them; the beam is wide enough to see that.
        """
        beam: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            starts = list(beam)
            law_NV = (self.logits(starts).double() / temperature).softmax(dim=1).numpy()
            longer = {
                (*start, token): beam[start] * law_NV[n, token]
                for n, start in enumerate(starts)
                for token in np.argsort(-law_NV[n])[:NUM_CELLS].tolist()
            }
            ordered = sorted(longer, key=lambda text: -longer[text])[: 8 * NUM_CELLS]
            least = min(beam.values()) if len(starts) > 1 else 0.0
            assert longer[ordered[NUM_CELLS - 1]] > least, "the beam is too narrow"
            beam = {text: longer[text] for text in ordered}
        return dict(list(beam.items())[:NUM_CELLS])


class Drafting:
    """A drafter whose law is the target's, flattened and moved by noise that depends on the last
    token: production draws from it."""

    def __init__(self, laws: Laws, samplings: Sequence[Sampling]) -> None:
        self._laws = laws
        self._samplings = samplings
        generator = torch.Generator().manual_seed(3)
        self._noise_VV = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
        self.drafted: dict[int, Draft] = {}

    def prepare(self, contexts: dict[int, list[int]]) -> None:
        """Draw a block for each of these requests (by rid: all committed ids) at once."""
        self.drafted = {}
        if not contexts:
            return
        rids = list(contexts)
        said = [tuple(contexts[rid][len(START) :]) for rid in rids]
        draw = Draw(
            [len(contexts[rid]) - 1 for rid in rids],
            [self._samplings[rid] for rid in rids],
            gamma=GAMMA,
            vocab_size=VOCAB_SIZE,
            q_top_k=Q_TOP_K,
            device=torch.device("cpu"),
        )
        identity, ids = torch.arange(VOCAB_SIZE), []
        for k in range(GAMMA):
            last = torch.tensor([text[-1] for text in said])
            logits_SV = 0.8 * self._by_length(said) + 0.5 * self._noise_VV[last]
            ids.append(draw.step(k, logits_SV, identity))
            said = [(*text, token) for text, token in zip(said, ids[-1].tolist(), strict=True)]
        block = draw.block(ids, [torch.zeros(len(rids))] * GAMMA, None)
        slots = np.cumsum(block.has_q) - 1
        for at, rid in enumerate(rids):
            q = None
            if block.has_q[at]:
                q = SparseQ(ids=block.q_ids[slots[at]], probs=block.q_probs[slots[at]])
            self.drafted[rid] = Draft(ids=block.ids[at].tolist(), q=q)

    def _by_length(self, said: list[tuple[int, ...]]) -> Tensor:
        """[S, V] of texts of any lengths."""
        rows: dict[tuple[int, ...], Tensor] = {}
        for length in {len(text) for text in said}:
            same = [text for text in said if len(text) == length]
            rows.update(zip(same, self._laws.logits(same), strict=True))
        return torch.stack([rows[text] for text in said])


def texts(
    engine: Engine, laws: Laws, samplings: Sequence[Sampling], per_step: int
) -> tuple[np.ndarray, float]:
    """First tokens [len(samplings), `NUM_TOKENS`] of requests with these parameters, and the share
    of drafts that were accepted."""
    rounds, drafting = Rounds(engine), Drafting(laws, samplings)
    found = np.zeros((len(samplings), NUM_TOKENS), np.int64)
    num_drafted, admitted, leaving = 0, 0, []
    while admitted < len(samplings) or rounds.decoding:
        coming = range(admitted, min(admitted + per_step, len(samplings)))
        admitted = coming.stop
        # One more token than is looked at: then whole blocks are judged behind the first one.
        rounds.add(
            *[
                make_admission(i, START, max_new_tokens=NUM_TOKENS + 1, sampling=samplings[i])
                for i in coming
            ]
        )
        rids = sorted(rounds.decoding - set(leaving))
        drafting.prepare({rid: rounds.ids[rid] for rid in rids})
        num_drafted += GAMMA * len(rids)
        rounds.step(
            lambda rid, ids: drafting.drafted[rid],
            rids=rids,
            releases=leaving,
            prefill_budget=engine.limits.max_step_tokens,
        )
        done = [*rids, *coming]
        ready = [rid for rid in done if len(rounds.emitted(rid)) >= NUM_TOKENS]
        for rid in ready:
            found[rid] = rounds.emitted(rid)[:NUM_TOKENS]
        leaving = [rid for rid in ready if rid in rounds.decoding]
    assert (rounds.num_preempted, rounds.num_overloaded) == (0, 0)
    return found, sum(rounds.num_accepted.values()) / num_drafted


def p_value(found: np.ndarray, laws: Laws, temperature: float) -> float:
    """Least p-value, corrected for their number, of the first one, two and three tokens: the
    likeliest texts and all others as one cell."""
    values = []
    for length in range(1, NUM_TOKENS + 1):
        cells = laws.likeliest(length, temperature)
        observed = [(found[:, :length] == cell).all(axis=1).sum() for cell in map(list, cells)]
        expected = len(found) * np.array(list(cells.values()))
        kept = expected >= 5
        observed = np.array(observed)[kept]
        expected = expected[kept]
        rest = len(found) - observed.sum(), len(found) - expected.sum()
        values.append(chisquare(np.append(observed, rest[0]), np.append(expected, rest[1])).pvalue)
    return min(float(min(values)) * len(values), 1.0)


def check(
    engine: Engine, laws: Laws, mode: str, temperature: float, num: int, **bias: Any
) -> float:
    """The p-value of ``num`` requests, after seeing that drafts were both accepted and refused."""
    samplings = [
        make_sampling(temperature=temperature, mode=mode, seed=seed, **bias) for seed in range(num)
    ]
    per_step = min(engine.limits.max_requests // 3, engine.limits.max_step_tokens // 10)
    found, accepted = texts(engine, laws, samplings, per_step)
    assert 0.2 < accepted < 0.9
    return p_value(found, laws, temperature)


@pytest.fixture(scope="package")
def laws(tiny: Target) -> Laws:
    return Laws(tiny, START)


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_few_rounds(engine: Engine, laws: Laws, mode: str) -> None:
    assert check(engine, laws, mode, 1.0, 400) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_the_targets_law(wide: Engine, laws: Laws, mode: str, temperature: float) -> None:
    assert check(wide, laws, mode, temperature, NUM_ROUNDS) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_catches_two_percent(wide: Engine, laws: Laws, mode: str, temperature: float) -> None:
    """One token is likelier to the engine than to the test, by 2% of all mass at the first place
    (and about as much at later ones)."""
    law = (laws.logits([()])[0].double() / temperature).softmax(dim=0).numpy()
    token = int(np.abs(law - 0.1).argmin())
    shift = temperature * (logit(law[token] + 0.02) - logit(law[token]))
    bias = {"bias_ids": np.array([token], np.int32), "bias_values": np.array([shift], np.float32)}
    assert check(wide, laws, mode, temperature, NUM_ROUNDS, **bias) < 1e-6

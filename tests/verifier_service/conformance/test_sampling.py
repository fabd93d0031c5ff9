"""Sampling parameters through the engine: laws, seeds, logprobs.

The law of each token is formed from transformers' logits behind the very prefix that the engine
was at; what a seed makes of it is a function of law and position in coupled mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from cluster.wire import Sampling
from tests.deploy.reference import NEAR_TIE
from tests.frames import make_admission, make_sampling
from tests.verifier_service.conformance.drafts import leaning
from tests.verifier_service.conformance.oracle import near_ties
from tests.verifier_service.conformance.rounds import Draft, Drafter, Rounds, undrafted
from tests.verifier_service.conformance.targets import Target
from tests.verifier_service.torch_targets import VOCAB_SIZE, prompt
from verifier_service.engine import Engine

NUM_NEW: Final = 16
BIASES: Final = {
    "bias_ids": np.array([3, 9], np.int32),
    "bias_values": np.array([4.0, -100.0], np.float32),
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.5},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": BIASES,
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.8, **BIASES},
}


def garbage(rid: int, ids: Sequence[int]) -> Draft:
    """Random drafts of every length up to 5."""
    rng = np.random.default_rng([rid, len(ids)])
    return Draft(ids=rng.integers(0, VOCAB_SIZE, rng.integers(0, 6)).tolist())


def sampled(engine: Engine, settings: Sequence[Sampling], drafter: Drafter = undrafted) -> Rounds:
    """A request of 16 tokens behind one prompt for each of these."""
    rounds = Rounds(engine)
    rounds.run(
        [
            make_admission(rid, prompt(9, 30), max_new_tokens=NUM_NEW, sampling=sampling)
            for rid, sampling in enumerate(settings)
        ],
        drafter,
    )
    return rounds


# --- laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_and_greedy_text(
    engine: Engine, tiny: Target, name: str, temperature: float
) -> None:
    """Plain, with garbage, and with drafts that survive: one text, and the one of the law."""
    changes = {"temperature": temperature, **SETTINGS[name]}
    settings = [make_sampling(seed=seed, **changes) for seed in (1, 2, 1 << 63)]
    plain = sampled(engine, settings)
    said = [sampled(engine, settings, drafter) for drafter in (garbage, leaning(plain.ids))]
    ties = sum(near_ties(tiny, plain.ids[rid], 9, one) for rid, one in enumerate(settings))
    for rounds in said:
        for rid, one in enumerate(settings):
            if rounds.ids[rid] != plain.ids[rid]:
                ties += near_ties(tiny, rounds.ids[rid], 9, one)
                assert ties > 0, "texts differ without a near-tie"
    assert ties <= 1, "near-ties are rare: this many means that something is off"
    assert min(said[1].num_accepted.values()) >= NUM_NEW / 3
    if changes["temperature"] >= 1 and name != "top-k":
        assert len({tuple(ids) for ids in plain.ids.values()}) == len(settings)


def test_penalties_and_bias_by_hand(engine: Engine, tiny: Target) -> None:
    """Greedy text under each, from transformers' logits by the textbook, token by token."""
    start = prompt(9, 30)
    cases = {
        "repetition": {"repetition_penalty": 1.7},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.0},
        "bias": {"bias_ids": np.array([7], np.int32), "bias_values": np.array([9.0], np.float32)},
    }
    rounds = sampled(engine, [make_sampling(**changes) for changes in cases.values()], garbage)
    for rid, changes in enumerate(cases.values()):
        text = rounds.emitted(rid)
        logits = tiny.reference.logits(tuple(start), tuple(text))
        for place, token in enumerate(text):
            law, said = logits[place].double(), Counter(text[:place])
            for seen in {*start, *said}:
                penalty = changes.get("repetition_penalty", 1.0)
                law[seen] = law[seen] / penalty if law[seen] > 0 else law[seen] * penalty
            for seen, count in said.items():
                law[seen] -= changes.get("presence_penalty", 0.0)
                law[seen] -= changes.get("frequency_penalty", 0.0) * count
            if "bias_ids" in changes:
                law[7] += 9.0
            assert float(law.max() - law[token]) < NEAR_TIE, (changes, place)
    assert len({tuple(rounds.emitted(rid)) for rid in range(len(cases))}) == len(cases)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_logprobs_are_the_targets(
    engine: Engine, tiny: Target, mode: str, temperature: float
) -> None:
    """The model's own log-softmax, whatever was drafted and whatever shaped the draw."""
    settings = [
        make_sampling(
            logprobs=asked, mode=mode, temperature=temperature, seed=4, presence_penalty=0.5
        )
        for asked in (True, False)
    ]
    rounds = sampled(engine, settings, garbage)
    text = rounds.emitted(0)
    law = tiny.reference.logits(tuple(prompt(9, 30)), tuple(text)).log_softmax(dim=1)
    want = law[torch.arange(NUM_NEW), torch.tensor(text)]
    torch.testing.assert_close(torch.tensor(rounds.logprobs[0]), want, atol=1e-3, rtol=0)
    assert rounds.logprobs[1] == [0.0] * NUM_NEW


# --- seeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
def test_seeds_reproduce(engine: Engine, mode: str) -> None:
    """Equal seeds and schedules say the same, side by side and again; other seeds do not."""
    settings = [make_sampling(temperature=1.0, mode=mode, seed=seed) for seed in (5, 6, 5, 7)]
    same = lambda rid, ids: garbage(0, ids)  # noqa: E731 - requests of one seed get equal drafts
    first, second = (sampled(engine, settings, same) for _ in range(2))
    assert first.ids == second.ids
    assert first.ids[0] == first.ids[2]
    assert len({tuple(ids) for ids in first.ids.values()}) == 3


def test_a_drafted_token_of_no_mass_is_refused(engine: Engine, tiny: Target) -> None:
    """Rejection mode, one-hot drafts that a filter rules out: refused every time, drawn from the
    rest."""
    ids = prompt(9, 30)
    law = tiny.reference.logits(tuple(ids), (0,))[0]
    banned = int(law.argmax())
    bias = {
        "bias_ids": np.array([banned], np.int32),
        "bias_values": np.array([-100.0], np.float32),
    }
    settings = [
        make_sampling(temperature=1.0, mode="rejection", seed=seed, **bias) for seed in range(12)
    ]
    rounds = sampled(engine, settings, lambda rid, known: Draft(ids=[banned] * 3))
    assert sum(rounds.num_accepted.values()) == 0
    assert all(banned not in rounds.emitted(rid) for rid in range(12))

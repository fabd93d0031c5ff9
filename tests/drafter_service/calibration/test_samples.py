"""Which positions of a round count, and that the ends of requests bias nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from drafter_service.calibration.samples import LOGIT_LIMIT, logit, sigmoid, to_samples

STOP = 7


@dataclass(frozen=True, kw_only=True)
class FakeRound:
    num_verified: int = 4
    num_accepted: int = 0
    draft_ids: tuple[int, ...] = (1, 2, 3, 4)
    confidence: tuple[float, ...] = (0.5, 0.5, 0.5, 0.5)
    prompt: int = 0


CASES = [
    (FakeRound(num_accepted=0), "1111", "1000"),  # later ones cannot survive: known
    (FakeRound(num_accepted=2), "1111", "1110"),
    (FakeRound(num_accepted=4), "1111", "1111"),
    (FakeRound(num_accepted=2, num_verified=2), "1100", "1100"),  # near the end
    (FakeRound(num_accepted=0, num_verified=2), "1100", "1000"),  # as well, though it was rejected
    (FakeRound(num_verified=0), "0000", "0000"),
    (FakeRound(num_accepted=2, draft_ids=(1, STOP, 3, 4)), "1100", "1100"),  # ended by the draft
    (FakeRound(num_accepted=0, draft_ids=(1, STOP, 3, 4)), "1100", "1000"),  # as well
    (FakeRound(num_accepted=2, draft_ids=(1, 2, 3, STOP), num_verified=3), "1110", "1110"),
]


@pytest.mark.parametrize(("one", "observable", "reached"), CASES)
def test_what_counts(one: FakeRound, observable: str, reached: str) -> None:
    samples = to_samples([one], stop_ids={STOP})
    assert "".join(str(int(flag)) for flag in samples.observable[0]) == observable
    assert "".join(str(int(flag)) for flag in samples.reached[0]) == reached
    assert samples.survived[0].tolist() == [one.num_accepted >= k for k in (1, 2, 3, 4)]


def test_what_counts_does_not_depend_on_what_happened() -> None:
    for draft_ids in ((1, 2, 3, 4), (STOP, 2, 3, 4), (1, 2, STOP, 4)):
        rounds = [FakeRound(num_accepted=a, num_verified=3, draft_ids=draft_ids) for a in range(4)]
        observable = to_samples(rounds, stop_ids={STOP}).num_observable
        assert len(set(observable.tolist())) == 1


def test_ends_of_requests_do_not_bias() -> None:
    """Requests of nine tokens, blocks of four, one draft in five a stop token; each draft is
    accepted with probability 0.7. Counting every known outcome would show far less."""
    rng = np.random.default_rng(0)
    rounds, naive = [], []
    for prompt in range(4000):
        left = 9
        while left > 0:
            draft_ids = tuple(rng.choice([1, 2, 3, 4, STOP], 4).tolist())
            verified = min(4, left - 1)
            lucky = int((rng.random(4) < 0.7).cumprod().sum())
            stop_at = draft_ids.index(STOP) + 1 if STOP in draft_ids else 9
            accepted = min(lucky, verified, stop_at)
            rounds.append(
                FakeRound(
                    num_verified=verified,
                    num_accepted=accepted,
                    draft_ids=draft_ids,
                    prompt=prompt,
                )
            )
            rejected = accepted < verified and accepted != stop_at
            naive.append([accepted >= k if k <= accepted or rejected else None for k in (1, 2, 3)])
            left = 0 if accepted == stop_at else left - accepted - 1
    samples = to_samples(rounds, stop_ids={STOP})
    for k in (1, 2, 3):
        seen = samples.observable[:, k - 1]
        share = samples.survived[seen, k - 1].mean()
        assert share == pytest.approx(0.7**k, abs=4 * np.sqrt(0.25 / seen.sum()))
    known = [row[2] for row in naive if row[2] is not None]
    assert np.mean(known) < 0.7**3 - 0.05  # the bias that the rule avoids


def test_folds_keep_prompts_together() -> None:
    rounds = [FakeRound(prompt=prompt) for prompt in (4, 9, 4, 2, 9, 9)]
    folds = to_samples(rounds, stop_ids=()).folds(2)
    assert folds.tolist() == [1, 0, 1, 0, 0, 0]


def test_logits_come_back_from_confidence() -> None:
    x = np.linspace(-11, 11, 45)
    assert logit(sigmoid(x).astype(np.float32)) == pytest.approx(x, abs=5e-3)
    assert logit(np.array([0.0, 1.0])).tolist() == [-LOGIT_LIMIT, LOGIT_LIMIT]


def test_no_rounds_and_ragged_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        to_samples([], stop_ids=())
    with pytest.raises(ValueError, match="inhomogeneous"):
        to_samples([FakeRound(), FakeRound(confidence=(0.5,))], stop_ids=())

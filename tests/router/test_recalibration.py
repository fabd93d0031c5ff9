"""The online recalibrator: planted errors are learnt, nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, logit

from cluster.config import LookupConfig
from cluster.fingerprint import drafter_fingerprint
from router.recalibration import (
    MAX_SHIFT,
    MAX_SLOPE,
    MEMORY,
    MIN_SAMPLES,
    MIN_SLOPE,
    Recalibrator,
    RecalibratorBook,
)

Truth = Callable[[np.ndarray], np.ndarray]
GREEDY, COUPLED, REJECTION = range(3)
GAMMA = 4


def drive(
    recalibrator: Recalibrator,
    truth: Truth,
    *,
    rounds: int,
    reported: Truth = lambda normal: expit(1.5 + 1.5 * normal),
    regime: int = GREEDY,
    seed: int = 0,
) -> None:
    """Whole blocks, verified in steps of eight rows; a draft survives with ``truth(confidence)``.

    Args:
        reported: confidence from standard normal numbers.
    """
    rng = np.random.default_rng(seed)
    for _ in range(rounds // 8):
        confidence = reported(rng.standard_normal((8, GAMMA)))
        survives = rng.random((8, GAMMA)) < truth(confidence)
        num_accepted = survives.cumprod(axis=1).sum(axis=1)
        recalibrator.learn(
            confidence,
            np.full(8, regime),
            num_reached_R=np.minimum(num_accepted + 1, GAMMA),
            num_accepted_R=num_accepted,
        )


def applied(recalibrator: Recalibrator, *confidence: float, regime: int = GREEDY) -> np.ndarray:
    """Mapped confidences of a block."""
    return recalibrator.apply(np.array([confidence]), np.array([regime]))[0]


def one(recalibrator: Recalibrator, confidence: float, *, hit: bool, times: int = 1) -> None:
    """The same outcome of a first draft, step after step."""
    for _ in range(times):
        recalibrator.learn(
            np.array([[confidence]]), np.array([GREEDY]), np.array([1]), np.array([int(hit)])
        )


PLANTED: dict[str, tuple[Truth, Truth]] = {
    # truth, reported
    "temperature": (lambda c: expit(0.5 * logit(c)), lambda n: expit(1.5 + 1.5 * n)),
    "sharpness": (lambda c: expit(2 * logit(c)), lambda n: expit(0.5 + n)),
    "offset": (lambda c: expit(logit(c) - 1.5), lambda n: expit(2 + n)),
    "tilted": (lambda c: expit(0.6 * logit(c) + 1), lambda n: expit(n)),
    "no head": (lambda c: np.full(c.shape, 0.55), lambda n: np.full(n.shape, 0.999)),
    "always sure": (lambda c: np.full(c.shape, 0.8), lambda n: np.ones(n.shape)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_miscalibration_is_learnt(name: str) -> None:
    """After 4000 rounds (some thousand samples at each position) the mapped values are right."""
    truth, reported = PLANTED[name]
    recalibrator = Recalibrator()
    drive(recalibrator, truth, reported=reported, rounds=4000)
    confidence = reported(np.linspace(-1.5, 1.5, 7))
    for c in confidence:
        mapped = applied(recalibrator, *[c] * GAMMA)
        assert mapped == pytest.approx(truth(np.array([c]))[0], abs=0.08)
    figures = recalibrator.figures()
    for k in (1, 2):
        before, after = (figures[f"greedy.{k}.{n}_ece"] for n in ("reported", "recalibrated"))
        assert after < before / 2
        assert after < 0.045
        assert abs(figures[f"greedy.{k}.recalibrated"] - figures[f"greedy.{k}.accepted"]) < 0.025


@pytest.mark.parametrize("num", [208, 1600])
def test_the_fit_is_the_penalised_likelihoods_own_maximum(num: int) -> None:
    """Against scipy on the raw samples: neither bins nor single Newton steps cost anything."""
    rng = np.random.default_rng(3)
    recalibrator = Recalibrator()
    logits, hits = rng.normal(1, 1.5, num), np.zeros(num, bool)
    hits[:] = rng.random(num) < expit(0.7 * logits - 0.8)
    for at in range(0, num, 16):
        batch = slice(at, at + 16)
        recalibrator.learn(
            expit(logits[batch])[:, None],
            np.full(16, GREEDY),
            num_reached_R=np.ones(16, np.int64),
            num_accepted_R=hits[batch].astype(np.int64),
        )
    weights = (1 - 1 / MEMORY) ** (num - 16 - np.arange(num) // 16 * 16)

    def loss(ab: np.ndarray) -> float:
        z = ab[0] * logits + ab[1]
        likelihood = weights @ (np.logaddexp(0, z) - hits * z)
        return float(likelihood + 8 * (ab[0] - 1) ** 2 + 4.5 * ab[1] ** 2)

    slope, shift = minimize(loss, [1.0, 0.0]).x
    figures = recalibrator.figures()
    assert figures["greedy.1.slope"] == pytest.approx(slope, abs=0.02)
    assert figures["greedy.1.shift"] == pytest.approx(shift, abs=0.02)


def test_a_calibrated_drafter_is_left_alone() -> None:
    recalibrator = Recalibrator()
    drive(recalibrator, lambda c: c, rounds=4000)
    for c in (0.2, 0.5, 0.8, 0.95):
        assert applied(recalibrator, *[c] * GAMMA) == pytest.approx(c, abs=0.05)


def test_frozen_while_samples_are_few() -> None:
    recalibrator = Recalibrator()
    one(recalibrator, 0.9, hit=False, times=MIN_SAMPLES - 1)
    assert applied(recalibrator, 0.9)[0] == 0.9
    assert applied(recalibrator, 1.0)[0] == 1.0, "not even clipped"
    one(recalibrator, 0.9, hit=False)
    assert applied(recalibrator, 0.9)[0] < 0.6


def test_each_position_thaws_by_its_own_samples() -> None:
    recalibrator = Recalibrator()
    confidence = np.full((MIN_SAMPLES, 3), 0.9)
    ones = np.ones(MIN_SAMPLES, np.int64)
    recalibrator.learn(confidence, GREEDY * ones, num_reached_R=2 * ones, num_accepted_R=ones)
    mapped = applied(recalibrator, 0.9, 0.9, 0.9)
    assert mapped[0] > 0.9
    assert mapped[1] < 0.9
    assert mapped[2] == 0.9


def test_unreached_positions_teach_nothing_whatever_they_hold() -> None:
    maps = []
    for rest in (0.1, 0.99):
        recalibrator = Recalibrator()
        rng = np.random.default_rng(1)
        for _ in range(40):
            confidence = rng.uniform(0.3, 0.9, (8, GAMMA))
            confidence[:, 2:] = rest
            accepted = rng.integers(0, 2, 8)
            recalibrator.learn(confidence, np.zeros(8, np.int64), np.full(8, 2), accepted)
        maps.append(recalibrator.figures())
    assert maps[0] == maps[1]
    assert not any(name.startswith(("greedy.3", "greedy.4")) for name in maps[0])


def test_regimes_are_apart() -> None:
    recalibrator = Recalibrator()
    drive(recalibrator, lambda c: 0.3 * c, rounds=800, regime=COUPLED)
    assert applied(recalibrator, 0.8, regime=COUPLED)[0] < 0.5
    assert applied(recalibrator, 0.8, regime=GREEDY)[0] == 0.8
    assert applied(recalibrator, 0.8, regime=REJECTION)[0] == 0.8


def test_drift_is_followed_within_some_thousand_samples() -> None:
    recalibrator = Recalibrator()
    drive(recalibrator, lambda c: expit(logit(c) - 1.5), rounds=2 * MEMORY)
    assert applied(recalibrator, 0.8)[0] == pytest.approx(expit(logit(0.8) - 1.5), abs=0.06)
    drive(recalibrator, lambda c: expit(logit(c) + 1.0), rounds=2 * MEMORY, seed=1)
    assert applied(recalibrator, 0.8)[0] == pytest.approx(expit(logit(0.8) + 1.0), abs=0.06)


Samples = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1 - 1e-9]), st.floats(0, 1)),
        st.booleans(),
        st.integers(1, 300),
    ),
    min_size=1,
    max_size=12,
)


@given(Samples, st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_bounded_and_in_order_whatever_is_sent(
    samples: list[tuple[float, bool, int]], asked: list[float]
) -> None:
    recalibrator = Recalibrator()
    for confidence, hit, times in samples:
        recalibrator.learn(
            np.full((times, 1), confidence),
            np.zeros(times, np.int64),
            np.ones(times, np.int64),
            np.full(times, int(hit)),
        )
    figures = recalibrator.figures()
    assert MIN_SLOPE <= figures["greedy.1.slope"] <= MAX_SLOPE
    assert abs(figures["greedy.1.shift"]) <= MAX_SHIFT
    mapped = recalibrator.apply(np.array([sorted(asked)]).T, np.zeros(len(asked), np.int64))[:, 0]
    assert (np.diff(mapped) >= 0).all()
    assert (mapped >= 0).all()
    assert (mapped <= 1).all()


def test_a_turned_round_drafter_cannot_turn_the_order() -> None:
    recalibrator = Recalibrator()
    drive(recalibrator, lambda c: 1 - c, reported=lambda n: expit(2 * n), rounds=3000)
    low, high = applied(recalibrator, 0.1)[0], applied(recalibrator, 0.9)[0]
    assert low < high
    assert high - low < 0.2, "but hardly any of it is left"


def test_positions_past_the_last_map_share_it() -> None:
    recalibrator = Recalibrator()
    confidence, ones = np.full((80, 40), 0.9), np.ones(80, np.int64)
    recalibrator.learn(confidence, 0 * ones, num_reached_R=40 * ones, num_accepted_R=39 * ones)
    mapped = recalibrator.apply(confidence[:1], np.array([0]))[0]
    assert mapped[31:] == pytest.approx(mapped[39])
    assert mapped[30] > mapped[31], "the refused draft is among those that share"


def test_switched_off_it_keeps_its_figures_and_the_identity() -> None:
    recalibrator = Recalibrator(enabled=False)
    one(recalibrator, 0.9, hit=False, times=500)
    assert applied(recalibrator, 0.9)[0] == 0.9
    assert recalibrator.figures()["greedy.1.reported_ece"] == pytest.approx(0.9)
    assert recalibrator.figures()["greedy.1.recalibrated_ece"] == pytest.approx(0.9)


def test_a_new_drafter_version_starts_fresh_and_an_old_one_is_remembered() -> None:
    book = RecalibratorBook(enabled=True)
    first = book.of("a" * 64)
    one(first, 0.9, hit=False, times=100)
    assert book.of("a" * 64) is first
    assert applied(book.of("b" * 64), 0.9)[0] == 0.9
    assert book.of("a" * 64) is first
    assert book.figures()["aaaaaaaaaaaaaaaa.greedy.1.samples"] == 100
    for version in "cdef":
        book.of(version)
    assert book.of("a" * 64) is not first, "memory is bounded"


def test_figures_of_two_lookups_are_told_apart() -> None:
    book = RecalibratorBook(enabled=True)
    for gamma in (4, 8):
        lookup = drafter_fingerprint("ngram", LookupConfig(min_ngram=10, max_ngram=16, gamma=gamma))
        one(book.of(lookup), 0.9, hit=True, times=gamma)
    samples = [value for name, value in book.figures().items() if name.endswith(".samples")]
    assert samples == [4, 8]


def test_a_book_is_switched_off_and_on() -> None:
    book = RecalibratorBook(enabled=False)
    recalibrator = book.of("f")
    one(recalibrator, 0.9, hit=False, times=500)
    assert applied(recalibrator, 0.9)[0] == 0.9
    book.switch(enabled=True)
    assert applied(recalibrator, 0.9)[0] < 0.3, "it has learnt meanwhile"
    book.switch(enabled=False)
    assert applied(recalibrator, 0.9)[0] == applied(book.of("g"), 0.9)[0] == 0.9


def test_learning_tells_what_was_promised_by_the_maps_from_before() -> None:
    recalibrator = Recalibrator()
    rng = np.random.default_rng(5)
    for _ in range(30):
        confidence, regime = rng.random((8, GAMMA)), rng.integers(0, 3, 8)
        before = recalibrator.apply(confidence, regime)
        num_accepted = rng.integers(0, GAMMA, 8)
        told = recalibrator.learn(confidence, regime, num_accepted + 1, num_accepted)
        assert (told == before).all()
    assert (recalibrator.apply(confidence, regime) != before).any(), "and then it has learnt"

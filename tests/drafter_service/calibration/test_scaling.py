"""Sequential Temperature Scaling on rounds whose law is known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.calibration import scaling
from drafter_service.calibration.figures import figures
from drafter_service.calibration.samples import Samples, sigmoid
from drafter_service.calibration.scaling import MIN_REACHED, Scaling
from tests.drafter_service.calibration.planted import planted

TEMPERATURES = (2.0, 0.6, 1.0, 1.6)
OFFSETS = (-0.6, -0.4, 0.3, -0.5)


def errors(confidence: np.ndarray, samples: Samples) -> np.ndarray:
    return np.array(figures(confidence, samples).ece, np.float64)


def test_planted_temperatures_are_found() -> None:
    fitted = scaling.fit_method(planted(8000, TEMPERATURES, seed=0), "temperature")
    assert np.log(fitted.temperatures) == pytest.approx(np.log(TEMPERATURES), abs=0.2)
    assert fitted.offsets == (0, 0, 0, 0)
    assert fitted.borrowed == ()


def test_planted_offsets_are_found() -> None:
    fitted = scaling.fit_method(planted(8000, TEMPERATURES, OFFSETS, seed=0), "temperature+offset")
    assert np.log(fitted.temperatures) == pytest.approx(np.log(TEMPERATURES), abs=0.2)
    assert fitted.offsets == pytest.approx(OFFSETS, abs=0.2)


@pytest.mark.parametrize(
    ("offsets", "method"), [(None, "temperature"), (OFFSETS, "temperature+offset")]
)
def test_an_offset_is_used_only_where_it_pays(
    offsets: tuple[float, ...] | None, method: scaling.Method
) -> None:
    samples = planted(3000, TEMPERATURES, offsets, seed=2)
    fitted = scaling.fit(samples)
    assert fitted.method == method
    fresh = planted(20000, TEMPERATURES, offsets, seed=3)
    raw, calibrated = errors(sigmoid(fresh.logit), fresh), errors(fitted.apply(fresh.logit), fresh)
    assert calibrated.max() < 0.02 < raw.max()
    assert calibrated.mean() < raw.mean() / 2


def test_a_bend_is_used_where_the_head_does_not_know_a_ceiling() -> None:
    """No draft holds with more than 0.8, and the head goes up to 1."""
    fitted = scaling.fit(planted(6000, TEMPERATURES, ceiling=0.8, seed=4))
    assert fitted.method == "temperature+offset+bend"
    assert fitted.bend < 0.7
    fresh = planted(20000, TEMPERATURES, ceiling=0.8, seed=5)
    same = planted(6000, TEMPERATURES, ceiling=0.8, seed=4)
    straight = scaling.fit_method(same, "temperature+offset")
    bent_errors = errors(fitted.apply(fresh.logit), fresh)
    straight_errors = errors(straight.apply(fresh.logit), fresh)
    assert bent_errors[0] < 0.02 < straight_errors[0]
    assert bent_errors.mean() < 0.8 * straight_errors.mean()


@pytest.mark.parametrize("bend", [0.3, 1.0, 1.25])
def test_a_bend_is_another_slope_on_either_side_and_keeps_the_order(bend: float) -> None:
    z = np.linspace(-60.0, 60.0, 2001)
    found = scaling.bent(z, bend)
    assert (np.diff(found) > 0).all()
    slopes = np.diff(found) / np.diff(z)
    assert slopes[[0, -1]] == pytest.approx([1.0, bend], rel=1e-6)
    p = sigmoid(z)
    inner = (p > 1e-9) & (p < 1 - 1e-9)
    beta = np.log(p[inner]) - bend * np.log1p(-p[inner])
    np.testing.assert_allclose(found[inner], beta, atol=1e-6)


def test_few_rounds_do_no_harm() -> None:
    """A sound head, 300 rounds: the fit stays near the identity instead of chasing noise."""
    for seed in range(4):
        fitted = scaling.fit_method(planted(300, (1.0,) * 4, seed=seed), "temperature")
        assert np.log(fitted.temperatures) == pytest.approx(np.zeros(4), abs=0.6)
        fresh = planted(20000, (1.0,) * 4, seed=9)
        assert errors(fitted.apply(fresh.logit), fresh).max() < 0.035


def test_a_position_does_not_see_later_ones() -> None:
    samples = planted(1000, TEMPERATURES, OFFSETS, seed=4)
    whole = scaling.fit_method(samples, "temperature+offset")
    for k in (1, 2, 3):
        rng = np.random.default_rng(k)
        logit = samples.logit.copy()
        logit[:, k:] = rng.normal(size=logit[:, k:].shape)
        # Whoever survived k positions gets another fate after them.
        far = samples.num_accepted >= k
        num_accepted = np.where(far, rng.integers(k, 5, len(far)), samples.num_accepted)
        other = dataclasses.replace(samples, logit=logit, num_accepted=num_accepted)
        changed = scaling.fit_method(other, "temperature+offset")
        assert changed.temperatures[:k] == whole.temperatures[:k]
        assert changed.offsets[:k] == whole.offsets[:k]
        assert changed.temperatures[k:] != whole.temperatures[k:]


def test_what_does_not_count_does_not_matter() -> None:
    samples = planted(1000, TEMPERATURES, seed=5)
    cut = dataclasses.replace(samples, num_observable=np.arange(1000) % 5)
    logit = np.where(cut.observable, cut.logit, 3.0)
    num_accepted = np.where(
        cut.num_accepted >= cut.num_observable, cut.num_observable, cut.num_accepted
    )
    hidden = dataclasses.replace(cut, logit=logit, num_accepted=num_accepted)
    assert scaling.fit_method(hidden, "temperature") == scaling.fit_method(cut, "temperature")


def test_a_position_that_too_few_reach_takes_the_one_before() -> None:
    samples = planted(1000, TEMPERATURES, seed=6)
    rejected = np.where(np.arange(1000) < MIN_REACHED - 1, 4, 1)
    sparse = dataclasses.replace(samples, num_accepted=np.minimum(samples.num_accepted, rejected))
    fitted = scaling.fit_method(sparse, "temperature")
    assert fitted.borrowed == (3, 4)
    assert fitted.temperatures[1] == fitted.temperatures[2] == fitted.temperatures[3]
    assert fitted.temperatures[0] != fitted.temperatures[1]


def test_one_prompt_cannot_judge_an_offset() -> None:
    samples = planted(400, TEMPERATURES, OFFSETS, seed=7)
    alone = dataclasses.replace(samples, prompt=np.zeros(400, np.int64))
    assert scaling.fit(alone).method == "temperature"


@given(
    st.floats(0.2, 5.0),
    st.floats(-3.0, 3.0),
    st.lists(st.floats(-12, 12), min_size=2, max_size=8),
)
def test_scaling_keeps_the_order(temperature: float, offset: float, logits: list[float]) -> None:
    one = Scaling(method="temperature+offset", temperatures=(temperature,), offsets=(offset,))
    ranked = np.sort(np.array(logits))[:, None]
    confidence = one.apply(ranked)[:, 0]
    assert (np.diff(confidence) >= 0).all()
    assert ((confidence >= 0) & (confidence <= 1)).all()
    apart = np.diff(ranked[:, 0]) > 1e-3
    assert (np.diff(confidence)[apart & (np.abs(ranked[1:, 0]) < 3)] > 0).all()

"""A regime's calibration is judged on prompts that its fit has not seen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cluster.errors import ConfigError
from drafter_service.calibration import scaling
from drafter_service.calibration.figures import figures
from drafter_service.calibration.fitting import fit_regime, left_out_confidence
from drafter_service.calibration.samples import sigmoid
from tests.drafter_service.calibration.planted import ROUNDS_PER_PROMPT, planted

TEMPERATURES = (2.5, 0.5, 1.0)


def test_the_figures_are_those_of_fresh_prompts() -> None:
    samples = planted(2000, TEMPERATURES, seed=0)
    judgement = fit_regime(samples, temperature=1.0).calibration.judgement
    assert judgement is not None
    fresh = planted(20000, TEMPERATURES, seed=1)
    fit = scaling.fit(samples)
    for seen, truth in (
        (judgement.before, figures(sigmoid(fresh.logit), fresh)),
        (judgement.after, figures(fit.apply(fresh.logit), fresh)),
    ):
        assert seen.ece == pytest.approx(truth.ece, abs=0.03)
        assert seen.brier == pytest.approx(truth.brier, abs=0.02)
        assert seen.auc == pytest.approx(truth.auc, abs=0.04)
        assert seen.pooled_auc == pytest.approx(truth.pooled_auc, abs=0.03)
    assert judgement.before.ece[0] is not None
    assert judgement.after.ece[0] is not None
    assert judgement.after.ece[0] < judgement.before.ece[0] / 2
    assert judgement.num_prompts == 2000 / ROUNDS_PER_PROMPT
    assert judgement.num_rounds == (2000,) * 3
    assert judgement.num_reached[0] == 2000 > judgement.num_reached[1] > judgement.num_reached[2]


def test_a_prompt_is_judged_by_fits_to_others() -> None:
    """Turning a prompt's outcomes around changes what other prompts get, not what it gets."""
    samples = planted(400, TEMPERATURES, seed=2)
    mine = samples.prompt == 5
    turned = np.where(mine, 3 - samples.num_accepted, samples.num_accepted)
    before = left_out_confidence(samples)
    after = left_out_confidence(dataclasses.replace(samples, num_accepted=turned))
    half = samples.folds(2)
    assert (after[half == half[mine][0]] == before[half == half[mine][0]]).all()
    assert (after != before).any()


def test_figures_of_a_position_that_no_round_shows() -> None:
    samples = planted(300, TEMPERATURES, seed=3)
    short = dataclasses.replace(samples, num_observable=np.full(300, 2))
    judged = figures(sigmoid(short.logit), short)
    assert judged.ece[2] is None
    assert judged.ece_noise[2] is None
    assert judged.ece[:2] == figures(sigmoid(samples.logit), samples).ece[:2]


@pytest.mark.parametrize(("num", "named"), [(180, "180 rounds of 9"), (140, "140 rounds of 7")])
def test_too_few_rounds_are_refused(num: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        fit_regime(planted(num, TEMPERATURES, seed=4), temperature=1.0)
    assert "more prompts" in caught.value.hint


def test_many_rounds_of_few_prompts_are_refused() -> None:
    samples = planted(400, TEMPERATURES, seed=5)
    few = dataclasses.replace(samples, prompt=samples.prompt % 7)
    with pytest.raises(ConfigError, match="400 rounds of 7 prompts"):
        fit_regime(few, temperature=1.0)

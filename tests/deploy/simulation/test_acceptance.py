"""The acceptance model: what it promises of shares, confidence and repetition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from deploy.simulation.acceptance import AcceptanceModel, Domain, evaluated_domains
from deploy.simulation.presets import DOMAINS, paper_domain

TABLE = ((0.43, 0.52, 0.56, 0.60), (0.90, 0.88, 0.86, 0.84))
MODEL = AcceptanceModel(
    domains=(Domain(name="hard", acceptance=TABLE[0]), Domain(weight=3, acceptance=TABLE[1])),
    request_sd=0.7,
    drift_sd=0.4,
)


def rounds(model: AcceptanceModel, num_requests: int, num_tokens: int) -> list[np.ndarray]:
    """Whole blocks verified until every request has its tokens: [N, 1 + G + G] domain, whether
    each draft is right, confidence."""
    key = np.arange(num_requests, dtype=np.uint64)
    domain, traits = model.domain_of(key), model.traits(key)
    anchor, found = np.full(num_requests, 20), []
    live = np.arange(num_requests)
    while len(live):
        right, confidence = model.draft(key[live], anchor[live], traits[live])
        found.append(np.concatenate([domain[live, None], right, confidence], axis=1))
        anchor[live] += right.cumprod(axis=1).sum(axis=1) + 1
        live = live[anchor[live] < 20 + num_tokens]
    return found


def test_acceptance_by_position_is_the_table_over_rounds() -> None:
    table = np.concatenate(rounds(MODEL, 1500, 300))
    for domain, wanted in enumerate(TABLE):
        mine = table[table[:, 0] == domain][:, 1:5]
        survived = mine.cumprod(axis=1)
        reached = np.concatenate([[len(mine)], survived.sum(axis=0)[:-1]])
        np.testing.assert_allclose(survived.sum(axis=0) / reached, wanted, atol=0.012)
    tau = [1 + np.cumprod(row).sum() for row in TABLE]
    np.testing.assert_allclose(MODEL.accepted_length(), tau)


def test_confidence_is_calibrated_or_miscalibrated_as_told() -> None:
    table = np.concatenate(rounds(MODEL, 800, 200))
    right, stated = table[:, 1:5].ravel(), table[:, 5:].ravel()
    for low in np.arange(0.1, 0.9, 0.2):
        there = (stated >= low) & (stated < low + 0.2)
        assert right[there].mean() == pytest.approx(stated[there].mean(), abs=0.02)
    assert stated.std() > 0.15
    bold = AcceptanceModel(domains=MODEL.domains, confidence_slope=1.5, confidence_offset=0.5)
    logit = np.array([[-1.0, 0.0, 2.0]])
    np.testing.assert_allclose(bold.confidence(logit), 1 / (1 + np.exp(-(1.5 * logit + 0.5))))


def test_what_a_request_meets_depends_on_it_and_the_position_alone() -> None:
    key = np.array([7, 8], np.uint64)
    together = MODEL.draft(key, np.array([40, 90]), MODEL.traits(key))
    alone = MODEL.draft(key[1:], np.array([90]), MODEL.traits(key[1:]))
    for both, one in zip(together, alone, strict=True):
        np.testing.assert_array_equal(both[1:], one)


def test_domains_are_drawn_by_weight() -> None:
    share = MODEL.domain_of(np.arange(20_000, dtype=np.uint64)).mean()
    assert share == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("drafter", ["dspark", "dflash", "eagle3"])
def test_presets_have_the_accepted_length_of_the_paper(drafter: str) -> None:
    published = {"dspark": 6.11, "dflash": 5.40, "eagle3": 5.14}[drafter]
    domain = paper_domain(drafter, "gsm8k")
    assert 1 + np.cumprod(domain.acceptance).sum() == pytest.approx(published, abs=0.005)


def test_dflash_decays_and_dspark_holds() -> None:
    first, last = paper_domain("dflash", "math").acceptance[::6]
    assert last < 0.9 * first
    first, last = paper_domain("dspark", "math").acceptance[::6]
    assert last == first


def test_every_preset_is_a_model() -> None:
    for domains in DOMAINS.values():
        model = AcceptanceModel(domains=domains())
        assert model.traits(np.zeros(1, np.uint64)).shape == (1, model.gamma)


@pytest.mark.parametrize(
    "domains",
    [
        (),
        (Domain(acceptance=()),),
        (Domain(acceptance=(0.5,)), Domain(acceptance=(0.5, 0.5))),
        (Domain(acceptance=(1.0,)),),
    ],
)
def test_what_is_no_model_is_refused(domains: tuple[Domain, ...]) -> None:
    with pytest.raises(ConfigError):
        AcceptanceModel(domains=domains)


def test_reports_of_dspark_eval_are_read(tmp_path: Path) -> None:
    def row(domain: str, position: int, acceptance: float) -> dict[str, object]:
        key = {"drafter": "a", "temperature": 1.0, "mode": "coupled"}
        return {**key, "domain": domain, "position": position, "acceptance": acceptance}

    path = tmp_path / "eval.json"
    rows = [row("math", 1, 0.5), row("math", 2, 0.6), row("chat", 1, 0.3), row("chat", 2, 1.0)]
    path.write_text(json.dumps({"positions": [*rows, row("all", 1, 0.4)]}))
    math, chat = evaluated_domains(path, temperature=1.0, mode="coupled")
    assert (math.name, math.acceptance) == ("math", (0.5, 0.6))
    assert chat.acceptance[1] == 1 - 1e-5  # never quite certain
    assert AcceptanceModel(domains=(math, chat)).gamma == 2
    with pytest.raises(ConfigError, match="no acceptance"):
        evaluated_domains(path, temperature=1.0, mode="rejection")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="no report"):
        evaluated_domains(path, temperature=1.0, mode="coupled")
    with pytest.raises(ConfigError, match="cannot read"):
        evaluated_domains(tmp_path / "none", temperature=1.0, mode="coupled")

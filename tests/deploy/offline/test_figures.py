"""Figures by hand: lengths, positions, depth, thresholds, intervals."""

from __future__ import annotations

import numpy as np
import pytest

from deploy.offline import figures
from deploy.offline.bootstrap import interval_of_ratio
from deploy.offline.confidence_figures import confidence_figures, reliability
from tests.deploy.offline.made_rounds import make_round, make_table, random_rounds


def test_accepted_length_is_tokens_per_round_by_data_set_and_domain() -> None:
    rounds = [
        make_round(num_emitted=3),
        make_round(num_emitted=5, num_accepted=4),
        make_round(num_emitted=1, num_accepted=0, domain="chat", source="chat-set", prompt=1),
    ]
    table = make_table(rounds)
    rows = {f["source"]: f for f in figures.lengths_by_source(table)}
    assert rows["gsm8k"]["accepted_length"] == 4
    assert (rows["gsm8k"]["rounds"], rows["gsm8k"]["tokens"], rows["gsm8k"]["prompts"]) == (2, 8, 1)
    assert rows["chat-set"]["accepted_length"] == 1
    domains = {f["domain"]: f["accepted_length"] for f in figures.lengths_by_domain(table)}
    assert domains == {"math": 4, "chat": 1, "all": 3}


def test_the_headline_counts_cut_rounds_and_the_rest_does_not() -> None:
    table = make_table([make_round(), make_round(anchor=108, num_emitted=1, num_accepted=0)])
    assert figures.accepted_length(table)["accepted_length"] == 2
    whole = figures.whole_length(table)
    assert whole is not None
    assert whole["accepted_length"] == 3


def test_conditional_acceptance_counts_only_what_was_reached() -> None:
    rounds = [make_round(num_accepted=n, num_emitted=n + 1) for n in (0, 1, 1, 4)]
    found = [f for f in figures.acceptance_by_position(make_table(rounds)) if f["domain"] == "all"]
    assert [(f["position"], f["reached"]) for f in found] == [(1, 4), (2, 3), (3, 1), (4, 1)]
    assert [f["acceptance"] for f in found] == pytest.approx([3 / 4, 1 / 3, 1, 1])
    assert [f["survival"] for f in found] == pytest.approx([3 / 4, 1 / 4, 1 / 4, 1 / 4])


def test_depth_buckets_are_half_open() -> None:
    rounds = [make_round(anchor=a, num_emitted=e) for a, e in ((20, 1), (63, 2), (64, 5))]
    found = figures.length_by_depth(make_table(rounds))
    assert [(f["from"], f["to"], f["accepted_length"]) for f in found] == [
        (0, 64, 1.5),
        (64, 128, 5.0),
    ]


def test_the_last_depth_bucket_is_open() -> None:
    table = make_table([make_round(anchor=90)])
    assert [(f["from"], f["to"]) for f in figures.length_by_depth(table, (0, 50))] == [(50, None)]


def test_the_threshold_keeps_a_prefix() -> None:
    """Survivals 0.9 0.72 0.36 0.18: two accepted in one round, none in the other."""
    rounds = [make_round(), make_round(num_accepted=0, num_emitted=1, reached=1)]
    found = {
        f["threshold"]: f
        for f in figures.threshold_sweep(make_table(rounds), (0.0, 0.5, 0.8, 0.95))
        if f["domain"] == "all"
    }
    assert [found[t]["verified_per_round"] for t in (0.0, 0.5, 0.8, 0.95)] == [4, 2, 1, 0]
    assert [found[t]["acceptance"] for t in (0.0, 0.5, 0.8, 0.95)] == [2 / 8, 2 / 4, 1 / 2, None]
    assert [found[t]["accepted_length"] for t in (0.0, 0.5, 0.8, 0.95)] == [2, 2, 1.5, 1]


def test_a_stop_id_at_a_blocks_end_leaves_no_bonus_token() -> None:
    """Everything verified, the sweep gives the length that the rounds really had."""
    ended = make_round(draft_ids=(1, 2, 3, 7), num_accepted=4, num_emitted=4)
    table = make_table([ended, make_round()])
    whole = figures.whole_length(table)
    assert whole is not None
    sweep = figures.threshold_sweep(table, (0.0, 0.5))
    assert [f["accepted_length"] for f in sweep[:2]] == [whole["accepted_length"], 3] == [3.5, 3]


def test_short_blocks_verify_no_empty_places() -> None:
    short = make_round(draft_ids=(1,), confidence=(0.9,), num_verified=1, num_accepted=1)
    found = figures.threshold_sweep(make_table([short]), (0.0,))
    assert found[0]["verified_per_round"] == 1
    assert found[0]["acceptance"] == 1


def test_the_interval_covers_the_truth_and_repeats() -> None:
    """Prompts whose mean is 2: of 200 intervals about 95% must hold it."""
    random = np.random.default_rng(0)
    prompt = np.repeat(np.arange(50), 4)
    hits = 0
    for _ in range(200):
        tokens = np.repeat(random.normal(2, 0.5, 50), 4)
        low, high = interval_of_ratio(tokens, np.ones(200), prompt)
        assert low is not None
        assert high is not None
        assert (low, high) == interval_of_ratio(tokens, np.ones(200), prompt)
        hits += low <= 2 <= high
    assert 0.88 < hits / 200 < 0.99


def test_prompts_and_not_rounds_are_resampled() -> None:
    """Two prompts of many equal rounds: the interval is as wide as their distance."""
    prompt = np.repeat([0, 1], 1000)
    tokens = np.repeat([1, 3], 1000)
    assert interval_of_ratio(tokens, np.ones(2000), prompt) == (1, 3)


def test_one_prompt_tells_nothing_of_others() -> None:
    found = figures.accepted_length(make_table([make_round(), make_round(num_emitted=1)]))
    assert (found["accepted_length"], found["low"], found["high"]) == (2, None, None)


def test_the_quotient_is_paired() -> None:
    rounds, prompts = random_rounds()
    table = make_table(rounds, prompts)
    same = figures.quotients(table, table)
    assert [f["domain"] for f in same] == ["chat", "math", "all"]
    assert {(f["quotient"], f["low"], f["high"]) for f in same} == {(1.0, 1.0, 1.0)}
    doubled = [
        make_round(prompt=r.prompt, domain=r.domain, num_emitted=2 * r.num_emitted) for r in rounds
    ]
    twice = figures.quotients(make_table(doubled, prompts), table)
    assert [f["quotient"] for f in twice] == pytest.approx([2, 2, 2])
    assert [f["low"] for f in twice] == pytest.approx([2, 2, 2])


def test_honest_confidence_has_no_error_beyond_noise_and_biased_has_its_bias() -> None:
    honest = confidence_figures(make_table(*random_rounds(200, 25)))
    assert [f["position"] for f in honest["ece"]] == [1, 2, 3, 4]
    for figure in honest["ece"]:
        assert figure["survival"] < 2 * figure["survival_noise"]
        assert figure["conditional"] < 2 * figure["conditional_noise"]
    biased = confidence_figures(make_table(*random_rounds(200, 25, bias=0.2)))
    assert biased["ece"][0]["survival"] == pytest.approx(0.2, abs=0.02)
    assert biased["ece"][3]["conditional"] == pytest.approx(0.2, abs=0.04)
    assert biased["ece"][0]["rounds"] == 5000
    assert biased["ece"][3]["reached"] < biased["ece"][1]["reached"] < 5000


def test_auc_is_pooled_too_and_brier_is_of_each_position() -> None:
    found = confidence_figures(make_table(*random_rounds(200, 25)))
    assert [f["position"] for f in found["auc"]] == [1, 2, 3, 4, "pooled"]
    assert all(0.6 < f["survival"] < 0.95 for f in found["auc"])
    assert [f["position"] for f in found["brier"]] == [1, 2, 3, 4]
    shuffled = make_table([make_round(num_accepted=n) for n in (0, 4)])
    assert confidence_figures(shuffled)["auc"][-1]["survival"] == pytest.approx(0.5)


def test_reliability_of_honest_confidence_lies_on_the_diagonal() -> None:
    found = reliability(make_table(*random_rounds(200, 25)))
    assert [f["position"] for f in found] == [1, 2, 3, 4]
    for bins in found:
        assert sum(bins["rounds"]) == 5000
        assert bins["stated"] == sorted(bins["stated"])
        np.testing.assert_allclose(bins["observed"], bins["stated"], atol=0.08)


def test_plain_rounds_have_no_confidence_to_judge() -> None:
    plain = make_round(draft_ids=(), confidence=(), num_verified=0, num_accepted=0, num_emitted=1)
    table = make_table([plain], gamma=0)
    assert confidence_figures(table) == {"ece": [], "auc": [], "brier": []}
    assert reliability(table) == []
    assert figures.acceptance_by_position(table) == []
    assert figures.accepted_length(table)["accepted_length"] == 1

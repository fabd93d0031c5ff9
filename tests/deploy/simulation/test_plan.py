"""`dspark plan`: what must hold of its answers."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from deploy.simulation import plan_check
from deploy.simulation.plan import PlanSpec, built_in, load_plan, traffic_of
from deploy.simulation.plan_answer import Answer, answer, report_of
from deploy.simulation.plan_check import MOST_CHECKS, Check
from deploy.simulation.plan_kinds import COLOCATED, DISAGGREGATED, PLAIN, kinds_of
from deploy.simulation.plan_search import KindSearch, Offer, ladder
from deploy.simulation.plan_table import answer_table, sentences

TREE: dict[str, Any] = {
    "title": "small",
    "traffic": {"requests_per_s": 20, "prompt": {"mean": 200}, "output": {"mean": 200}},
    "slo": {"ttft_s": 1.0, "tokens_per_s": 60, "attainment": 0.9},
    "acceptance": {"domains": "paper_dspark_5"},
    "limits": {"max_requests": 16, "max_verifiers": 24, "max_drafters": 24},
    "devices": [
        {"name": "big", "datasheet": "h100-sxm", "dollars_per_hour": 3.0, "drafts": False},
        {"name": "small", "datasheet": "l4", "dollars_per_hour": 0.6, "verifies": False},
    ],
}


def plan_with(**sections: Any) -> PlanSpec:
    tree = copy.deepcopy(TREE)
    for name, value in sections.items():
        tree[name] = {**tree.get(name, {}), **value} if isinstance(value, dict) else value
    return load_plan(tree)


@pytest.fixture(scope="module")
def searches() -> dict[str, KindSearch]:
    plan = plan_with()
    return {kind.way: KindSearch(kind, plan) for kind in kinds_of(plan, traffic_of(plan.traffic))}


@pytest.fixture(scope="module")
def found() -> Answer:
    return answer(plan_with())


@pytest.mark.parametrize("way", [DISAGGREGATED, COLOCATED, PLAIN])
def test_more_load_never_costs_less(searches: dict[str, KindSearch], way: str) -> None:
    dollars = [searches[way].offer(2.0 * 1.7**n).dollars_per_hour for n in range(7)]
    assert dollars == sorted(dollars)
    assert dollars[0] < dollars[-1]


def test_the_offer_keeps_the_promise_and_nothing_smaller_does(
    searches: dict[str, KindSearch],
) -> None:
    for search in searches.values():
        offer = search.offer(20.0)
        assert offer.state is not None
        assert offer.size is not None
        assert offer.state.attainment >= 0.9
        assert offer.bears_per_s >= 20.0
        for size, bears in search._bears.items():
            if search.kind.dollars(size) < offer.dollars_per_hour:
                assert bears < 20.0


def test_a_million_tokens_cost_what_the_pools_do(found: Answer) -> None:
    for offer in found.offers:
        assert offer.state is not None
        per_hour = offer.state.tokens_per_s * 3600
        assert offer.dollars_per_mtok == pytest.approx(offer.dollars_per_hour / per_hour * 1e6)
        assert offer.state.tokens_per_s == pytest.approx(20 * 200, rel=0.01)
    assert [o.dollars_per_hour for o in found.offers] == sorted(
        o.dollars_per_hour for o in found.offers
    )


def test_the_report_is_json_and_the_words_name_the_best(found: Answer) -> None:
    report = json.loads(json.dumps(report_of(found), allow_nan=False))
    assert report["rows"][0]["way"] == found.offers[0].way
    assert set(report["costs"]) == {DISAGGREGATED, COLOCATED, PLAIN}
    text = list(sentences(found))
    assert text[1].startswith(f"best: {found.offers[0].way}")
    assert any("data sheet" in sentence for sentence in text)


def test_events_confirm_what_is_offered() -> None:
    sections = {"traffic": {"requests_per_s": 8, "prompt": {"mean": 64}}}
    slo = {"ttft_s": 1.0, "tokens_per_s": 60, "attainment": 0.9}
    plan = plan_with(**sections, slo=slo, devices=TREE["devices"][:1])
    found = answer(plan, check_s=15.0)
    assert {check.offer.way for check in found.checks} == {COLOCATED, PLAIN}
    for offer in found.recommended():
        check = found.check_of(offer)
        assert check is not None
        assert offer.state is not None
        assert check.confirmed
        assert check.kept >= 0.9
        assert check.user_tokens_per_s == pytest.approx(offer.state.user_tokens_per_s[0], rel=0.2)


def judged(offer: Offer, *, confirmed: bool) -> Check:
    return Check(
        offer=offer,
        kept=0.97 if confirmed else 0.5,
        confirmed=confirmed,
        user_tokens_per_s=70.0,
        ttft_s=0.2,
        tokens_per_s=4000.0,
    )


def test_an_offer_that_events_refute_is_replaced_by_the_next_cheapest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events that want one verifier more than the rate model of every way."""
    plan = plan_with(devices=TREE["devices"][:1], traffic={"requests_per_s": 4})
    least = {offer.way: offer for offer in answer(plan).offers}
    shares: list[float] = []

    def check(offer: Offer, *args: Any) -> Check:
        args[-1](1.0)  # progress
        assert offer.size is not None
        first = least[offer.way].size
        assert first is not None
        return judged(offer, confirmed=offer.size.verifiers > first.verifiers)

    monkeypatch.setattr(plan_check, "check", check)
    found = answer(plan, lambda share, _: shares.append(share), check_s=1.0)
    assert sum(shares) == pytest.approx(1)
    for way in (COLOCATED, PLAIN):
        played = [one for one in found.checks if one.offer.way == way]
        assert [one.confirmed for one in played] == [False] * (len(played) - 1) + [True]
        dollars = [one.offer.dollars_per_hour for one in played]
        assert dollars == sorted(set(dollars))
        assert found.best(way) == played[-1].offer
        assert played[-1].offer in found.offers
        assert not any(one.offer in found.offers for one in played[:-1])
    text = list(sentences(found))
    best = found.recommended()[0]
    assert any(line.startswith(f"refuted by events: {least[best.way].name}") for line in text)
    at = next(n for n, line in enumerate(text) if line.startswith(f"best: {best.name}"))
    assert text[at + 1].startswith("confirmed by events: kept for 97.0%")


def test_where_events_confirm_nothing_nothing_is_recommended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_check, "check", lambda offer, *_: judged(offer, confirmed=False))
    plan = plan_with(devices=TREE["devices"][:1], traffic={"requests_per_s": 4})
    found = answer(plan, check_s=1.0)
    assert found.recommended() == []
    for way in (COLOCATED, PLAIN):
        assert sum(one.offer.way == way for one in found.checks) == MOST_CHECKS
    text = list(sentences(found))
    assert "no offer was confirmed by events to keep the promise for 90%" in text
    assert not any(line.startswith("best: ") for line in text)


def test_checks_stop_when_they_have_taken_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "check", lambda offer, *_: judged(offer, confirmed=False))
    plan = plan_with()
    traffic = traffic_of(plan.traffic)
    searches = [KindSearch(k, plan) for k in kinds_of(plan, traffic) if k.way == PLAIN]
    hours = itertools.count(0.0, 3600.0)
    shares: list[float] = []
    played = plan_check.confirm(
        searches, plan, traffic, 1.0, lambda share, _: shares.append(share), clock=hours.__next__
    )
    assert len(played) == 1
    assert sum(shares) <= 1


def test_prices_read_alike_in_table_and_words(found: Answer) -> None:
    best = found.recommended()[0]
    price = f"{best.dollars_per_mtok:.3f}"
    assert any(f"${price} per million tokens" in line for line in sentences(found))
    assert price in list(answer_table(found).columns[4].cells)


def test_where_nothing_may_draft_two_ways_are_left() -> None:
    found = answer(plan_with(devices=TREE["devices"][:1]))
    assert set(found.costs) == {COLOCATED, PLAIN}


def test_the_picture_is_drawn(found: Answer) -> None:
    from deploy.simulation.plan_pictures import draw_plan

    assert draw_plan(report_of(found)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("sections", "bound"),
    [
        ({"slo": {"tokens_per_s": 2000}}, "tokens_per_s: even alone"),
        ({"slo": {"ttft_s": 0.001}}, "ttft_s: even alone"),
        ({"target": {"weights_gb": 90}}, "memory: "),
        ({"traffic": {"requests_per_s": 5000}}, "load: 5000 requests/s"),
    ],
)
def test_an_impossible_promise_names_the_bound_that_fails(
    sections: dict[str, Any], bound: str
) -> None:
    limits = {"max_requests": 16, "max_verifiers": 2, "max_drafters": 2}
    plan = plan_with(**sections, limits=limits)
    for kind in kinds_of(plan, traffic := traffic_of(plan.traffic)):
        offer = KindSearch(kind, plan).offer(traffic.peak_per_s)
        assert offer.size is None
        assert offer.reason.startswith(bound)


def test_a_trace_is_sized_for_its_busiest_window(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    at_ms = [*range(0, 10_000, 1000), *range(10_000, 20_000, 100), 25_000]
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": at, "input_length": 100, "output_length": 50 + at % 2000 // 20}
            )
            + "\n"
            for at in at_ms
        )
    )
    traffic = traffic_of(
        plan_with(traffic={"requests_per_s": 0, "trace": str(path), "window_s": 10}).traffic
    )
    assert traffic.windows_per_s == (1.0, 10.0)
    assert traffic.peak_per_s == 10.0
    assert traffic.lengths.prompt.mean == 100
    assert traffic.lengths.prompt.spread == 0


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"traffic": {"requests_per_s": 0}}, "traffic"),
        ({"traffic": {"trace": "x.jsonl"}}, "traffic"),
        ({"slo": {"inter_token_s": 0.02}}, "slo"),
        ({"slo": {"attainment": 1.5}}, "slo.attainment"),
        ({"slo": {"latency": 1}}, "slo.latency"),
        ({"devices": []}, "devices"),
        ({"devices": [*TREE["devices"], TREE["devices"][0]]}, "devices: two"),
        ({"acceptance": {"domains": "nothing"}}, "acceptance.domains"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(sections: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        plan_with(**sections)


def test_the_example_is_valid() -> None:
    plan = load_plan(built_in("chat_8b"))
    assert {kind.way for kind in kinds_of(plan, traffic_of(plan.traffic))} == {
        DISAGGREGATED,
        COLOCATED,
        PLAIN,
    }
    with pytest.raises(ConfigError, match="chat_8b"):
        built_in("none of this name")


def test_sizes_are_tried_one_by_one_first() -> None:
    sizes = list(ladder(200))
    assert sizes[:20] == list(range(1, 21))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= 200
    assert all(b - a <= a / 16 for a, b in itertools.pairwise(sizes[31:]))

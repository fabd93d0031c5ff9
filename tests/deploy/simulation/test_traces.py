"""Traffic."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest

from cluster.errors import ConfigError
from deploy.simulation.traces import Arrival, LengthSpec, ServiceSpec, Trace, TraceSpec, read_trace

FIXED = LengthSpec(kind="fixed", mean=10)


def first(spec: TraceSpec, count: int, **place: int) -> list[Arrival]:
    return list(itertools.islice(Trace(spec, **place).open_arrivals(), count))


def test_poisson_traffic_of_all_cells_together_has_its_rate() -> None:
    spec = TraceSpec(kind="poisson", rate=20.0)
    ends = [first(spec, 2000, cell=cell, num_cells=4)[-1].at_s for cell in range(4)]
    assert np.mean(ends) == pytest.approx(2000 / 5.0, rel=0.05)
    gaps = np.diff([arrival.at_s for arrival in first(spec, 4000)])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_bursts_swing_about_the_mean() -> None:
    spec = TraceSpec(kind="burst", rate=20.0, burst_factor=3.0, period_s=10.0)
    at = np.array([arrival.at_s for arrival in first(spec, 20_000)])
    assert len(at) / at[-1] == pytest.approx(20.0, rel=0.05)
    high = (at % 10 < 5).mean()
    assert high / (1 - high) == pytest.approx(3.0, rel=0.1)


def test_closed_loops_are_split_and_answered_users_come_again() -> None:
    spec = TraceSpec(kind="closed", users=7, prompt=FIXED, output=FIXED)
    arrivals = [first(spec, 99, cell=cell, num_cells=3) for cell in range(3)]
    assert [len(mine) for mine in arrivals] == [3, 2, 2]
    assert {arrival.at_s for mine in arrivals for arrival in mine} == {0.0}
    trace = Trace(spec)
    keys = [arrival.key for arrival in trace.open_arrivals()]
    again = trace.after(12.0)
    assert again is not None
    assert again.at_s == 12.0
    assert len({*keys, again.key}) == 8
    assert Trace(TraceSpec(kind="poisson")).after(1.0) is None


def test_no_two_requests_of_any_cells_have_one_key() -> None:
    spec = TraceSpec(kind="poisson")
    keys = [a.key for cell in range(5) for a in first(spec, 50, cell=cell, num_cells=5)]
    assert len(set(keys)) == 250


def test_users_may_think_and_start_one_by_one() -> None:
    spec = TraceSpec(kind="staggered", users=4, stagger_s=2.0, think_s=3.0)
    assert [arrival.at_s for arrival in first(spec, 9)] == [0.0, 0.5, 1.0, 1.5]
    trace = Trace(spec)
    pauses = [arrival.at_s for _ in range(2000) if (arrival := trace.after(0.0))]
    assert np.mean(pauses) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(("kind", "spread"), [("lognormal", 0.5), ("uniform", 0.5), ("fixed", 0.0)])
def test_lengths_have_their_mean(kind: str, spread: float) -> None:
    spec = LengthSpec(kind=kind, mean=200, spread=spread, most=100_000)
    rng = np.random.default_rng(0)
    drawn = [spec.draw(rng) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(200, rel=0.03)
    assert (np.std(drawn) > 20) == (kind != "fixed")
    assert max(LengthSpec(mean=1000, most=64).draw(rng) for _ in range(50)) == 64


def test_requests_ask_for_service_by_share() -> None:
    services = (
        ServiceSpec(share=0.25, tier="interactive", target_rate=40.0),
        ServiceSpec(share=0.5, tier="batch"),
    )
    asked = first(TraceSpec(kind="poisson", services=services), 4000)
    assert np.mean([a.tier == "batch" for a in asked]) == pytest.approx(0.5, abs=0.03)
    assert np.mean([a.target_rate == 40.0 for a in asked]) == pytest.approx(0.25, abs=0.03)
    assert {(a.tier, a.target_rate) for a in asked} == {
        ("interactive", 40.0),
        ("batch", 0.0),
        ("", 0.0),
    }
    with pytest.raises(ConfigError, match="shares"):
        TraceSpec(services=(ServiceSpec(), *services))


CSV = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:00:01.5000000,100,10\n2023-11-16 18:00:00.0000000,50,30\n"
)
JSONL = (
    '{"timestamp": 500, "input_length": 50, "output_length": 30, "hash_ids": [1]}\n'
    '{"timestamp": 2000, "input_length": 100, "output_length": 10, "hash_ids": []}\n'
)


@pytest.mark.parametrize(("name", "text"), [("a.csv", CSV), ("a.jsonl", JSONL)])
@pytest.mark.parametrize("packed", [False, True])
def test_recorded_traffic_is_read_in_order_and_scaled(
    tmp_path: Path, name: str, text: str, packed: bool
) -> None:
    path = tmp_path / (name + ".gz" if packed else name)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    spec = TraceSpec(kind="file", path=str(path), time_scale=2.0, length_scale=0.5)
    assert read_trace(spec) == (
        Arrival(key=0, at_s=0.0, num_prompt=25, num_output=15, max_new_tokens=15),
        Arrival(key=1, at_s=3.0, num_prompt=50, num_output=5, max_new_tokens=5),
    )
    assert [a.key for a in first(spec, 9, cell=1, num_cells=2)] == [1]
    asked = TraceSpec(kind="file", path=str(path), max_new_tokens=20)
    assert [(a.num_output, a.max_new_tokens) for a in read_trace(asked)] == [(20, 20), (10, 20)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', "{"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_trace(TraceSpec(kind="file", path=str(path)))
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(TraceSpec(kind="file", path=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="path"):
        TraceSpec(kind="file")

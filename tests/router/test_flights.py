"""Steps in the air: when they are expected back, and how early the next one goes."""

from __future__ import annotations

import math

import pytest

from router.flights import Flight, Flights

STEP_S = 0.02
LINK_S = 0.002
TURN_S = 0.001


def make_flight(step_id: int, sent: float, predicted_s: float = STEP_S) -> Flight:
    return Flight(
        step_id=step_id,
        rows={},
        blocks={},
        drafting=frozenset(),
        rebound=frozenset(),
        num_asked=0,
        num_admitted=0,
        num_prefill=0,
        sent=sent,
        predicted_s=predicted_s,
    )


def flown(num_steps: int, *, predicted_s: float = STEP_S) -> tuple[Flights, float]:
    """Steps one after the other, each sent to an idle verifier; and the time afterwards."""
    flights, now = Flights(), 10.0
    for step_id in range(num_steps):
        flights.take_off(make_flight(step_id, now, predicted_s))
        now += STEP_S + LINK_S
        assert flights.gap_s(now, STEP_S) >= 0
        flights.land(now, STEP_S)
        now += 0.005
    return flights, now


def test_nothing_is_expected_of_an_idle_verifier() -> None:
    flights, now = flown(3)
    assert flights.lands_at(now) == -math.inf
    assert flights.lead_s == 0.0


def test_the_road_is_learnt_and_the_next_step_goes_in_time() -> None:
    flights, now = flown(20)
    assert flights.link_s == pytest.approx(LINK_S)
    flights.take_off(make_flight(20, now))
    assert flights.lands_at(now) == pytest.approx(now + STEP_S + LINK_S)
    assert flights.lead_s == pytest.approx(LINK_S, abs=0.2 * STEP_S)


def test_a_queued_step_starts_where_the_one_before_it_ends() -> None:
    flights, now = flown(20)
    flights.take_off(make_flight(20, now))
    flights.take_off(make_flight(21, now + STEP_S - LINK_S))
    first = now + STEP_S + LINK_S
    assert flights.lands_at(now) == pytest.approx(first + STEP_S)
    flights.land(first, STEP_S)
    assert flights.lands_at(first) == pytest.approx(first + STEP_S)
    second = first + STEP_S + TURN_S
    assert flights.gap_s(second, STEP_S) == pytest.approx(TURN_S)
    flights.land(second, STEP_S)
    assert flights.turn_s == pytest.approx(TURN_S)
    assert flights.link_s == pytest.approx(LINK_S), "a queued step says nothing about the road"


def test_steps_that_end_earlier_than_predicted_widen_the_margin() -> None:
    known, now = flown(30)
    known.take_off(make_flight(30, now))
    early, now = flown(30, predicted_s=1.4 * STEP_S)
    early.take_off(make_flight(30, now, 1.4 * STEP_S))
    assert early.lead_s >= known.lead_s + 0.3 * STEP_S


def test_an_overdue_step_is_expected_any_moment() -> None:
    flights, now = flown(3)
    flights.take_off(make_flight(3, now))
    assert flights.lands_at(now + 1.0) == now + 1.0


def test_two_are_the_most() -> None:
    flights = Flights()
    for step_id in range(2):
        flights.take_off(make_flight(step_id, 1.0))
    with pytest.raises(AssertionError):
        flights.take_off(make_flight(2, 1.0))

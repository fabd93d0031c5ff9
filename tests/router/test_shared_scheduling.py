"""Routers agree on a scheduling that was changed while they serve."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import SchedulingConfig
from cluster.members import Member
from router.shared_scheduling import SharedScheduling

NONE = SchedulingConfig(policy="none")
FULL = SchedulingConfig(policy="full")


def heard(*routers: SharedScheduling) -> list[Member]:
    """What the directory lists of them."""
    return [
        Member(
            member_id=f"router-{i}",
            role="router",
            address="",
            incarnation=1,
            model="",
            drafter="",
            load=0.0,
            scheduling=router.announcement,
            scheduling_version=router.version,
        )
        for i, router in enumerate(routers)
    ]


def test_a_change_is_followed_and_learnt_by_who_starts_later() -> None:
    first, second = SharedScheduling(SchedulingConfig()), SharedScheduling(SchedulingConfig())
    assert not second.follow(heard(first, second))
    assert first.announcement == {}, "nothing to say while the configuration counts"
    first.change(NONE)
    assert second.follow(heard(first, second))
    assert second.current == NONE
    assert not second.follow(heard(first, second)), "no news"
    late = SharedScheduling(SchedulingConfig(min_gain=0.5))
    assert late.follow(heard(second))
    assert late.current == NONE


def test_the_latest_change_counts_wherever_it_was_made() -> None:
    first, second = SharedScheduling(SchedulingConfig()), SharedScheduling(SchedulingConfig())
    first.change(NONE)
    second.follow(heard(first))
    second.change(SchedulingConfig())  # back to what the configuration says is a change, too
    assert first.follow(heard(first, second))
    assert first.current == SchedulingConfig()
    assert not second.follow(heard(first, second))


def test_changes_made_at_once_end_in_one_of_them_everywhere() -> None:
    first, second = SharedScheduling(SchedulingConfig()), SharedScheduling(SchedulingConfig())
    first.change(NONE)
    second.change(FULL)
    members = heard(first, second)
    first.follow(members)
    second.follow(members)
    assert first.current == second.current
    assert first.current in (NONE, FULL)
    third = SharedScheduling(SchedulingConfig())
    third.follow(reversed(members))
    assert third.current == first.current


def test_a_router_of_another_release_is_passed_over() -> None:
    ours, theirs = SharedScheduling(SchedulingConfig()), SharedScheduling(SchedulingConfig())
    theirs.change(NONE)
    member = heard(theirs)[0]
    strange = replace(member, scheduling={**member.scheduling, "telepathy": "true"})
    assert not ours.follow([strange])
    assert ours.current == SchedulingConfig()
    assert not ours.follow([replace(member, role="verifier")])

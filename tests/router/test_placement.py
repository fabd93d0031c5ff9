"""Who takes which verifier, and where requests go."""

from __future__ import annotations

from typing import Any

from cluster.members import Member
from router.placement import LaneLoad, choose_lane, choose_peer, verifiers_to_acquire


def member(member_id: str, **changes: Any) -> Member:
    values: dict[str, Any] = {
        "member_id": member_id,
        "role": "verifier" if member_id[0] == "v" else "router",
        "address": "127.0.0.1:1",
        "incarnation": 1,
        "model": "m",
        "drafter": "",
        "load": 0.0,
    }
    return Member(**(values | changes))


def take(members: list[Member], held: set[str] = frozenset(), model: str = "m") -> list[str]:  # type: ignore[assignment]
    wanted = verifiers_to_acquire(members, me="r0", model=model, held=held)
    return [m.member_id for m in wanted]


def test_a_lone_router_takes_all() -> None:
    assert take([member("v0"), member("v1")]) == ["v0", "v1"]


def test_no_more_than_the_share() -> None:
    members = [member("r0"), member("r1"), member("v0"), member("v1"), member("v2")]
    assert len(take(members)) == 2


def test_the_last_free_one_is_left_to_a_router_without() -> None:
    members = [member("r0"), member("r1"), member("v0", lane_owner="r0"), member("v1")]
    assert take(members, held={"v0"}) == []
    assert take([*members, member("v2"), member("v3")], held={"v0"}) == ["v1"]


def test_others_lanes_other_models_and_draining_ones_are_not_taken() -> None:
    members = [
        member("v0", lane_owner="r1"),
        member("v1", model="x"),
        member("v2", draining=True),
        member("v3"),
    ]
    assert take(members) == ["v3"]
    assert take(members, model="") == ["v1", "v3"]


def test_a_verifier_listed_as_ours_that_we_do_not_hold_is_free() -> None:
    assert take([member("v0", lane_owner="r0")]) == ["v0"]


def test_a_draining_lane_does_not_count_against_the_share() -> None:
    members = [member("v0", lane_owner="r0", draining=True), member("v1")]
    assert take(members, held={"v0"}) == ["v1"]


def test_emptiest_lane_that_fits() -> None:
    def lane(lane_id: int, num: int, most: int, fits: bool = True) -> LaneLoad:
        return LaneLoad(lane_id=lane_id, fits=fits, num_requests=num, max_requests=most)

    assert choose_lane([]) is None
    assert choose_lane([lane(0, 1, 2, fits=False)]) is None
    assert choose_lane([lane(0, 2, 4), lane(1, 3, 8), lane(2, 0, 8, fits=False)]) == 1


def test_peer_with_the_most_free_slots() -> None:
    peers = [
        member("r1", details={"free_slots": 2.0}),
        member("r2", details={"free_slots": 5.0}, draining=True),
        member("r3", details={"free_slots": 4.0}),
        member("r4"),
    ]
    assert choose_peer(peers, avoid=()) == peers[2]
    assert choose_peer(peers, avoid={"r3"}) == peers[0]
    assert choose_peer(peers, avoid={"r1", "r3"}) is None

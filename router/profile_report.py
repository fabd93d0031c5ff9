"""What routers know of the speed of their verifiers and drafters, as plain data.

A router's own report, which other routers ask for:

* ``router``: its member id;
* ``verifiers``: those that it leads, ``{"verifier": id, "profile": a ProfileSnapshot}``;
* ``drafters``: its links, ``{"drafter": id, "sessions", "num_samples", "round_trip_s",
  "deviation_s", "draft_s": {blocks: seconds}}``, no times before the first block has come.

The report of all of them, which clients get, has the same keys, each verifier and each drafter
with the ``router`` that tells of it, and besides:

* ``routers``: whose reports are in it;
* ``unanswered``: the others, ``{"router": id, "why": text}``;
* ``untold``: live verifiers that no report tells of, ``{"verifier": id, "router": who leads it}``,
  the router empty where nobody does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cluster.errors import FrameError, InvalidRequest
from cluster.json_text import parse_json
from cluster.members import Member
from cluster.profile_snapshot import ProfileSnapshot
from router.drafter_book import DrafterBook
from router.lane import Lane

Report = dict[str, Any]

_BATCHES: Final = (1, 4, 16, 64)
"""Numbers of blocks whose expected draft time is told."""


def own_report(router_id: str, lanes: Iterable[Lane], book: DrafterBook) -> Report:
    """What this router knows."""
    num_bound = book.num_bound()
    return {
        "router": router_id,
        "verifiers": [
            {"verifier": lane.verifier_id, "profile": lane.state.profile.snapshot().to_json()}
            for lane in lanes
        ],
        "drafters": [
            {
                "drafter": drafter_id,
                "sessions": num_bound[drafter_id],
                "num_samples": link.num_samples,
                "round_trip_s": link.round_trip_s if link.num_samples else None,
                "deviation_s": link.deviation_s if link.num_samples else None,
                "draft_s": {str(n): link.draft_s(n) for n in _BATCHES if link.num_samples},
            }
            for drafter_id, link in sorted(book.links().items())
        ],
    }


def read_report(text: str, router_id: str) -> Report:
    """Another router's own report, as it came over the network.

    Raises:
        FrameError: it is something else.
    """
    try:
        found = parse_json(text)
    except ValueError as error:
        raise FrameError(f"the report of router {router_id!r} is no JSON") from error
    report: Report = found if isinstance(found, dict) else {}
    parts = [report.get(name) for name in _PARTS]
    if not all(isinstance(part, list) and all(map(_is_object, part)) for part in parts):
        raise FrameError(f"the report of router {router_id!r} is malformed")
    try:
        for item in report["verifiers"]:
            ProfileSnapshot.from_json(item.get("profile"))
            _require_name(item, "verifier")
        for item in report["drafters"]:
            _require_name(item, "drafter")
    except InvalidRequest as error:
        raise FrameError(f"the report of router {router_id!r}: {error.message}") from error
    return {"router": router_id, **{name: report[name] for name in _PARTS}}


def whole_report(
    own: Report,
    others: Sequence[Report],
    *,
    unanswered: Mapping[str, str],
    members: Iterable[Member],
) -> Report:
    """One report of all routers'.

    Args:
        own: of the router that answers the client.
        others: of those that it asked.
        unanswered: why, by the id of the router that gave none.
        members: of the cluster.
    """
    reports = sorted((own, *others), key=lambda report: str(report["router"]))
    whole: Report = {"router": own["router"], "routers": [r["router"] for r in reports]}
    for name in _PARTS:
        whole[name] = [{"router": r["router"], **item} for r in reports for item in r[name]]
    told = {item["verifier"] for item in whole["verifiers"]}
    return {
        **whole,
        "unanswered": [{"router": key, "why": unanswered[key]} for key in sorted(unanswered)],
        "untold": [
            {"verifier": member.member_id, "router": member.lane_owner}
            for member in members
            if member.role == "verifier" and member.member_id not in told
        ],
    }


_PARTS: Final = ("verifiers", "drafters")


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _require_name(item: Mapping[str, Any], key: str) -> None:
    if not isinstance(item.get(key), str):
        raise InvalidRequest(f"a {key} without a name")

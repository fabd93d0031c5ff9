"""What a router knows of the speed of its verifiers and drafters, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.drafter_book import DrafterBook
from router.lane import Lane

_BATCHES = (1, 4, 16, 64)
"""Numbers of blocks whose expected draft time is told."""


def profile_report(router_id: str, lanes: Iterable[Lane], book: DrafterBook) -> dict[str, Any]:
    """``router``; ``verifiers``: each with its ``profile``, a `ProfileSnapshot`; ``drafters``: each
    with its link, times in seconds, none of them before the first block has come."""
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

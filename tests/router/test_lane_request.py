"""A request as its lane sees it, and the figures that are told of it many times a round."""

from __future__ import annotations

import pytest

from cluster.sampling import REGIMES
from router.lane_request import LaneRequest, Phase
from tests.frames import make_sampling


def make_request(*, max_new_tokens: int = 6, draft: bool = True, **sampling: object) -> LaneRequest:
    return LaneRequest(
        rid=1,
        ids=[1, 2, 3],
        num_prompt=3,
        max_new_tokens=max_new_tokens,
        stop_ids=(),
        sampling=make_sampling(**sampling),
        draft=draft,
    )


@pytest.mark.parametrize(
    ("temperature", "mode", "regime"),
    [
        (0.0, "coupled", "greedy"),
        (0.0, "rejection", "greedy"),
        (0.7, "coupled", "coupled"),
        (0.7, "rejection", "rejection"),
    ],
)
def test_its_drafts_are_judged_as_it_is_sampled(temperature: float, mode: str, regime: str) -> None:
    assert REGIMES[make_request(temperature=temperature, mode=mode).regime] == regime


def test_what_is_left_shrinks_with_every_token() -> None:
    request = make_request()
    seen = []
    for token in range(6):
        seen.append((request.remaining, request.max_draft, request.wants_draft))
        request.commit((token,), 0, float(token))
    assert seen == [
        (6, 5, True), (5, 4, True), (4, 3, True), (3, 2, True), (2, 1, False), (1, 0, False),
    ]  # fmt: skip
    assert (request.remaining, request.max_draft, request.anchor) == (0, 0, 8)
    assert not make_request(draft=False).wants_draft


def test_phases_are_keys_of_their_own() -> None:
    assert len(dict.fromkeys(Phase, 0)) == len(Phase)
    assert {Phase.READY: 1}[Phase["READY"]] == 1

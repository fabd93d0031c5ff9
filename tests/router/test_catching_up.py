"""Blocks of sessions that were not asked for a while: the first one is not like those after it."""

from __future__ import annotations

import numpy as np
import pytest

from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_sessions import DraftSessions
from router.drafter_book import DrafterBook, DrafterRef
from router.lane_request import LaneRequest
from tests.frames import make_sampling

REF = DrafterRef(drafter_id="a", address="", fingerprint="f")


def make_request(rid: int) -> LaneRequest:
    return LaneRequest(
        rid=rid,
        ids=[1, 2, 3],
        num_prompt=3,
        max_new_tokens=100,
        stop_ids=(),
        sampling=make_sampling(),
        draft=True,
    )


class Asking:
    """Sessions of two requests at one drafter."""

    def __init__(self) -> None:
        self.book = DrafterBook(bound_s=10.0)
        self.book.up(REF)
        self.sessions = DraftSessions(fingerprint="f", book=self.book, counters=LaneCounters())
        self.requests = [make_request(1), make_request(2)]
        for request in self.requests:
            self.sessions.bind(request)

    def round(self, now: float, latency_s: float, *, behind: tuple[bool, bool]) -> None:
        """Ask for both blocks and get them."""
        for request, is_behind in zip(self.requests, behind, strict=True):
            request.behind = is_behind
            self.sessions.expect(request, now)
        for request in self.requests:
            block = DraftBlock(
                rid=request.rid,
                epoch=0,
                anchor=request.anchor,
                digest=request.digest,
                ids=(5,),
                confidence=np.ones(1),
                q=None,
                batch_size=2,
                draft_s=latency_s / 2,
            )
            self.sessions.take("a", request, block, now + latency_s)
            request.commit((7,), 0, now + latency_s)
            request.digest = block.digest

    @property
    def latency_s(self) -> float:
        link = self.book.link("a")
        assert link is not None
        return link.latency_s(2)


def test_one_session_that_is_behind_keeps_the_whole_batch_waiting() -> None:
    asking = Asking()
    for n in range(50):
        asking.round(float(n), 0.01, behind=(False, False))
    usual = asking.latency_s
    assert usual == pytest.approx(0.01, rel=1e-3)
    for n in range(50, 80):
        asking.round(float(n), 0.5, behind=(True, False))
        assert asking.sessions.catches_up(float(n))
    assert asking.latency_s == usual
    asking.round(80.0, 0.01, behind=(False, False))
    assert not asking.sessions.catches_up(80.0)


def test_without_one_a_slower_drafter_is_learnt() -> None:
    asking = Asking()
    for n in range(50):
        asking.round(float(n), 0.01, behind=(False, False))
    for n in range(50, 150):
        asking.round(float(n), 0.5, behind=(False, False))
    assert asking.latency_s == pytest.approx(0.5, rel=0.1)

"""Blocks that come late, in batches."""

from __future__ import annotations

from router.counters import LaneCounters
from router.draft_sessions import DraftSessions
from router.drafter_book import DrafterBook, DrafterRef
from router.lane_request import LaneRequest, Phase
from router.link_profile import LinkProfile
from tests.frames import make_sampling

REF = DrafterRef(drafter_id="a", address="", fingerprint="f")


class Lane:
    """The sessions of three requests of one lane."""

    def __init__(self, book: DrafterBook, first_rid: int) -> None:
        self.counters = LaneCounters()
        self.sessions = DraftSessions(fingerprint="f", book=book, counters=self.counters)
        self.requests = [
            LaneRequest(
                rid=first_rid + n,
                ids=[1, 2, 3],
                num_prompt=3,
                max_new_tokens=100,
                stop_ids=(),
                sampling=make_sampling(),
                draft=True,
            )
            for n in range(3)
        ]
        for request in self.requests:
            self.sessions.bind(request)

    def miss(self, asked: float) -> None:
        """Ask for one batch, which does not come."""
        for request in self.requests:
            self.sessions.expect(request, asked)
        for request in self.requests:
            assert request.phase is Phase.AWAITING
            self.sessions.expire(request, asked + 1.0)


def make_book() -> tuple[DrafterBook, LinkProfile]:
    book = DrafterBook(bound_s=1.0)
    book.up(REF)
    link = book.link("a")
    assert link is not None
    link.observe(3, 0.05, 0.1)
    return book, link


def test_a_late_batch_is_one_miss_however_many_rows_it_has() -> None:
    book, link = make_book()
    lane = Lane(book, 1)
    lane.miss(1.0)
    lane.miss(2.0)
    assert link.wait_s() > 0, "two batches of three rows are two misses"
    assert lane.counters.num_late_drafts == 6, "the counter tells of rows"
    lane.miss(3.0)
    assert link.wait_s() == 0, "the third batch that does not come ends the waiting"


def test_batches_of_two_lanes_are_misses_of_their_own() -> None:
    book, link = make_book()
    first, second = Lane(book, 1), Lane(book, 4)
    first.miss(1.0)
    second.miss(1.5)
    assert link.wait_s() > 0
    first.miss(2.0)
    assert link.wait_s() == 0

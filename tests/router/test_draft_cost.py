"""Drafting times from links."""

from __future__ import annotations

import numpy as np
import pytest

from router.draft_cost import drafting
from router.drafter_book import DrafterBook, DrafterRef

A, B = (DrafterRef(drafter_id=name, address="", fingerprint="f") for name in "ab")


def book(**fixed_s: float) -> DrafterBook:
    """Drafters that take a fixed time and 1 ms a block, 2 ms away."""
    made = DrafterBook(bound_s=10.0)
    for ref in (A, B):
        made.up(ref)
        link = made.link(ref.drafter_id)
        assert link is not None
        if ref.drafter_id in fixed_s:
            for n in (1, 8) * 40:
                draft_s = fixed_s[ref.drafter_id] + 1e-3 * n
                link.observe(n, draft_s, draft_s + 2e-3)
    return made


def test_drafting_takes_a_line_in_the_number_of_blocks() -> None:
    found = drafting(book(a=10e-3), [A] * 4, price=0.5)
    assert found.latency_s[0] == found.priced_s[0] == 0.0
    np.testing.assert_allclose(found.latency_s[1:], [13e-3, 14e-3, 15e-3, 16e-3], rtol=0.02)
    np.testing.assert_allclose(found.priced_s[1:], [5.5e-3, 6e-3, 6.5e-3, 7e-3], rtol=0.02)


def test_several_drafters_share_the_blocks_and_the_slowest_counts() -> None:
    found = drafting(book(a=10e-3, b=30e-3), [A, B, A, B], price=1.0)
    np.testing.assert_allclose(found.latency_s[4], 34e-3, rtol=0.02)
    np.testing.assert_allclose(found.priced_s[4], 12e-3 + 32e-3, rtol=0.02)


def test_a_drafter_that_was_never_heard_costs_nothing_yet() -> None:
    assert not drafting(book(a=10e-3), [B] * 3, price=1.0).latency_s.any()


def test_smaller_batches_than_were_ever_seen_are_hoped_to_take_less() -> None:
    made = DrafterBook(bound_s=10.0)
    made.up(A)
    link = made.link("a")
    assert link is not None
    for _ in range(50):
        link.observe(16, 0.16, 0.16)
    hoped = drafting(made, [A] * 16, price=0.0).latency_s
    assert hoped[2] == pytest.approx(0.02)
    assert hoped[16] == pytest.approx(0.16)
    for _ in range(2):
        link.observe(2, 0.12, 0.12)
    assert drafting(made, [A] * 16, price=0.0).latency_s[2] == pytest.approx(0.12, rel=0.1)

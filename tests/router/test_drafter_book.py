"""Choice of drafters, and the learnt wait."""

from __future__ import annotations

from router.drafter_book import DrafterBook, DrafterRef, DraftWait


def ref(drafter_id: str, fingerprint: str = "f") -> DrafterRef:
    return DrafterRef(drafter_id=drafter_id, address="127.0.0.1:1", fingerprint=fingerprint)


def test_wait_starts_at_the_bound_and_follows_the_latency() -> None:
    wait = DraftWait(bound_s=2.0)
    assert wait.wait_s == 2.0
    for _ in range(50):
        wait.observe(0.1)
    assert 0.1 < wait.wait_s < 0.3
    for _ in range(50):
        wait.observe(0.5)
    assert 0.5 < wait.wait_s < 1.5


def test_nobody_waits_for_a_drafter_that_cannot_make_it() -> None:
    wait = DraftWait(bound_s=0.1)
    for _ in range(10):
        wait.observe(0.5)
    assert wait.wait_s == 0
    for _ in range(100):
        wait.observe(0.01)
    assert wait.wait_s > 0.01


def test_silence_ends_the_waiting_until_a_block_comes() -> None:
    wait = DraftWait(bound_s=1.0)
    wait.observe(0.1)
    for _ in range(3):
        assert wait.wait_s > 0
        wait.miss()
    assert wait.wait_s == 0
    wait.observe(0.1)
    assert wait.wait_s > 0.1


def test_least_loaded_drafter_of_the_right_checkpoint() -> None:
    book = DrafterBook(bound_s=1.0)
    assert book.bind(1, "f") is None
    for drafter in (ref("a"), ref("b"), ref("other", "g")):
        book.up(drafter)
    chosen = [book.bind(rid, "f") for rid in range(4)]
    assert [c.drafter_id for c in chosen if c] == ["a", "b", "a", "b"]
    book.unbind(1, "b")
    book.unbind(3, "b")
    assert book.num_bound() == {"a": 2, "b": 0, "other": 0}
    book.set_load("b", 50.0, draining=True)
    assert book.bind(9, "f") == ref("a"), "a draining one takes nothing new"


def test_a_drafter_that_failed_is_taken_only_as_the_last_one() -> None:
    book = DrafterBook(bound_s=1.0)
    book.up(ref("a"))
    assert book.bind(1, "f", avoid="a") == ref("a")
    book.up(ref("b"))
    for rid in range(2, 5):
        assert book.bind(rid, "f", avoid="a") == ref("b")


def test_a_drafter_that_goes_down_takes_its_bindings_along() -> None:
    book = DrafterBook(bound_s=1.0)
    book.up(ref("a"))
    book.bind(1, "f")
    book.down("a")
    assert book.wait("a") is None
    book.down("a")

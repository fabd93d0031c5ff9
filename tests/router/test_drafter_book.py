"""Choice of drafters, and what is known of their links."""

from __future__ import annotations

from router.drafter_book import DrafterBook, DrafterRef


def ref(drafter_id: str, fingerprint: str = "f") -> DrafterRef:
    return DrafterRef(drafter_id=drafter_id, address="127.0.0.1:1", fingerprint=fingerprint)


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
    assert book.links() == {"a": book.link("a")}
    book.down("a")
    assert book.link("a") is None
    assert not book.links()
    book.down("a")

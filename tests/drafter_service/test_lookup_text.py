"""Longest match, latest place, bounded work, and confidence from history alone."""

from __future__ import annotations

import random

import pytest

from cluster.config import LookupConfig
from drafter_service.lookup_text import LookupText

SETTINGS = LookupConfig(gamma=4, max_ngram=4, min_ngram=2)


def text_of(ids: list[int], settings: LookupConfig = SETTINGS) -> LookupText:
    text = LookupText(settings, ids[0])
    text.extend(ids[1:])
    return text


def slow_search(ids: list[int], settings: LookupConfig) -> tuple[list[int], int] | None:
    """The definition, by trying everything."""
    for length in range(min(settings.max_ngram, len(ids) - 1), settings.min_ngram - 1, -1):
        for place in range(len(ids) - 1, length - 1, -1):
            if ids[place - length : place] == ids[-length:]:
                found = list(ids)
                for k in range(settings.gamma):
                    found.append(found[place + k])
                return found[len(ids) :], length
    return None


@pytest.mark.parametrize("alphabet", [2, 3, 6, 40])
def test_equals_the_definition(alphabet: int) -> None:
    rng = random.Random(alphabet)
    for _ in range(60):
        settings = LookupConfig(
            gamma=rng.randint(1, 6), min_ngram=(least := rng.randint(1, 3)), max_ngram=least + 2
        )
        ids = [rng.randrange(alphabet) for _ in range(rng.randint(1, 60))]
        text = LookupText(settings, ids[0])
        place = 1
        while place < len(ids):  # grown in pieces, searched at every size
            step = rng.randint(1, 5)
            text.extend(ids[place : place + step])
            place += step
            found = text.repetition()
            wanted = slow_search(ids[:place], settings)
            assert (None if found is None else (list(found.ids), found.length)) == wanted


def test_the_longest_match_goes_before_the_latest() -> None:
    assert text_of([7, 1, 2, 3, 9, 9, 2, 3, 8, 1, 2, 3]).draft()[0] == (9, 9, 2, 3)


def test_the_latest_of_equally_long_matches() -> None:
    assert text_of([1, 2, 5, 5, 5, 1, 2, 6, 6, 6, 3, 1, 2]).draft()[0] == (6, 6, 6, 3)


def test_a_match_that_reaches_the_end_repeats_with_its_period() -> None:
    assert text_of([4, 1, 2, 3, 1, 2, 3]).draft()[0] == (1, 2, 3, 1)


def test_nothing_found_drafts_nothing() -> None:
    assert text_of([1]).draft() == ((), ())
    assert text_of([1, 2, 3, 4, 2]).draft() == ((), ())


def test_work_is_bounded_however_often_an_ngram_occurs() -> None:
    """The better match lies beyond the places that are looked at: the text is not rescanned."""
    end = [9, 9, 1, 2]
    filler = [x for k in range(200) for x in (10 + k, 1, 2)]
    assert text_of([*end, 77, *filler, *end]).draft()[0] == (9, 9, 1, 2)
    assert text_of([*end, 77, *filler[:90], *end]).draft()[0] == (77, 10, 1, 2)


def test_longer_matches_are_trusted_more() -> None:
    short = text_of([5, 1, 2, 3, 4, 6, 9, 1, 2]).draft()[1]
    long = text_of([5, 1, 2, 3, 4, 6, 9, 5, 1, 2]).draft()[1]
    assert 0 < short[0] < long[0] < 1
    assert list(short) == sorted(short), "each right draft makes the match longer"
    assert short[1] == pytest.approx(long[0])


def test_confidence_follows_what_happened() -> None:
    settings = LookupConfig(gamma=3, max_ngram=2, min_ngram=2)
    loop = [1, 2, 3]
    right, wrong = text_of(loop * 3, settings), text_of(loop * 3, settings)
    before = right.draft()[1]
    assert wrong.draft()[1] == before
    for new in range(40, 60):
        right.extend(loop)
        right.draft()
        wrong.extend([new, *loop])  # the first draft fails: later ones were never reached
        wrong.draft()
    after_right, after_wrong = right.draft()[1], wrong.draft()[1]
    assert after_right[0] > before[0]
    assert after_right[0] < 1
    assert after_wrong[0] < 0.5 * before[0]
    assert after_wrong[1:] == before[1:]


def test_ids_past_what_was_drafted_teach_nothing() -> None:
    settings = LookupConfig(gamma=1, max_ngram=2, min_ngram=2)
    text, other = text_of([1, 2, 3, 1, 2], settings), text_of([1, 2, 3, 1, 2], settings)
    text.draft()
    other.draft()
    text.extend([3, 1, 2])
    other.extend([3])
    other.extend([1, 2])
    assert text.draft() == other.draft()

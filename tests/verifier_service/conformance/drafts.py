"""Drafts of every kind that a verifier meets, over texts that are known beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tests.verifier_service.conformance.rounds import Draft, Drafter

KINDS: Final = ("true", "corrupted", "short", "long", "late", "stale")
_BLOCK: Final = 5
_LONG: Final = 12


def another(token: int) -> int:
    """An id of any vocabulary that has this one, and not it."""
    return token - 1 if token else 1


class MixedDrafts:
    """A drafter that changes its ways from round to round; each request starts with another kind.

    * ``true``: a block of the text;
    * ``corrupted``: the same with one wrong token somewhere;
    * ``short``: one token of the text;
    * ``long``: more than a block, past the request's end where that is near;
    * ``late``: nothing in this round, and in the next one the block that should have come;
    * ``stale``: a block behind another anchor or, by turns, another prefix.

    Args:
        texts: by request: prompt and true text, one after the other.
        max_model_len: no draft lies beyond.
    """

    def __init__(
        self, texts: Mapping[int, Sequence[int]], *, vocab_size: int, max_model_len: int
    ) -> None:
        self._texts = texts
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._rounds: Counter[int] = Counter()
        self._late: dict[int, list[int]] = {}
        self.num: Counter[str] = Counter()
        """Rows sent, by kind."""

    def __call__(self, rid: int, ids: Sequence[int]) -> Draft:
        """What goes out for this request now."""
        if rid in self._late:
            behind = self._late.pop(rid)
            return Draft(ids=self._block(rid, behind, _BLOCK), behind=behind)
        turn = self._rounds[rid]
        self._rounds[rid] += 1
        kind = KINDS[(rid + turn) % len(KINDS)]
        self.num[kind] += 1
        if kind == "late":
            self._late[rid] = list(ids)
            return Draft()
        if kind == "stale":
            return self._stale(rid, ids, other_anchor=turn % 2 == 0)
        block = self._block(rid, ids, {"short": 1, "long": _LONG}.get(kind, _BLOCK))
        if kind == "corrupted" and block:
            place = (rid + turn) % len(block)
            block[place] = another(block[place])
        return Draft(ids=block)

    def _stale(self, rid: int, ids: Sequence[int], *, other_anchor: bool) -> Draft:
        behind = list(ids[:-1]) if other_anchor else [*ids[:-1], another(ids[-1])]
        return Draft(ids=self._block(rid, ids, _BLOCK), behind=behind)

    def _block(self, rid: int, ids: Sequence[int], size: int) -> list[int]:
        """The text behind ``ids``, and where it has ended anything."""
        text = list(self._texts[rid][len(ids) :])
        rng = np.random.default_rng([rid, len(ids)])
        text += rng.integers(0, self._vocab_size, _LONG).tolist()
        return text[: min(size, self._max_model_len - len(ids))]


def leaning(texts: Mapping[int, Sequence[int]]) -> Drafter:
    """The next tokens of these texts, the third of a block wrong."""

    def draft(rid: int, ids: Sequence[int]) -> Draft:
        block = list(texts[rid][len(ids) : len(ids) + _BLOCK])
        return Draft(ids=[another(token) if k == 2 else token for k, token in enumerate(block)])

    return draft

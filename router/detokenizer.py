"""Token ids to text, a few ids at a time, and stop strings in that text.

Two small state machines, both independent of how the ids were split over rounds:

* `Detokenizer` returns text as soon as it can no longer change. A token may hold part of a
  multi-byte character; such text decodes to U+FFFD for now and is held back until the rest
  arrives or the request ends.
* `StopScanner` finds stop strings that may straddle rounds. It holds back the longest tail that
  may still grow into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

_UNKNOWN: Final = "\ufffd"
_MAX_HELD_CHARS: Final = 4
"""A UTF-8 character has at most 4 bytes: of a longer run of U+FFFD the beginning is final."""


class Tokenizer(Protocol):
    """What the router needs of a tokenizer; `tokenizers.Tokenizer` and transformers' both fit."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Text of the ids."""
        ...


class Detokenizer:
    """Incremental ``tokenizer.decode(ids, skip_special_tokens=True)``.

    Ids are decoded together with those of the last settled piece of text, as context: some
    tokenizers (sentencepiece style) strip the space of whatever token comes first, so a piece
    decoded alone would lose it. The pieces, `flush` included, add up to the decoding of all ids,
    except where a byte-fallback tokenizer would take back characters that it had already decoded.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0
        """Leading ids of the window whose text has been returned completely."""
        self._num_sent = 0
        """Characters behind the context's text that have been returned too."""

    def push(self, ids: Sequence[int]) -> str:
        """Take more ids; return the text that has become final, often "" inside a character."""
        if not ids:
            return ""
        self._window.extend(ids)
        tail = self._tail()
        settled = max(len(tail.rstrip(_UNKNOWN)), len(tail) - _MAX_HELD_CHARS)
        text = tail[self._num_sent : settled]
        self._num_sent = max(self._num_sent, settled)
        if tail and settled == len(tail):
            del self._window[: self._num_context]
            self._num_context = len(self._window)
            self._num_sent = 0
        return text

    def flush(self) -> str:
        """The end: return what was held back (an incomplete character as U+FFFD)."""
        text = self._tail()[self._num_sent :]
        self._num_context = len(self._window)
        self._num_sent = 0
        return text

    def _tail(self) -> str:
        context = self._decode(self._window[: self._num_context])
        return self._decode(self._window)[len(context) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


class StopScanner:
    """Cuts a stream of text before the first stop string that is completed in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything: refused at admission"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._pending = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text.

        Returns:
            Text that is safe to show, and whether a stop string was found: then the text ends
            right before it, and nothing follows.
        """
        self._pending += text
        # The match that is complete first wins, so that the split into pieces does not matter.
        hits = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._pending.find(stop)) >= 0
        ]
        if hits:
            safe, self._pending = self._pending[: min(hits)[1]], ""
            return safe, True
        held = self._num_held()
        cut = len(self._pending) - held
        safe, self._pending = self._pending[:cut], self._pending[cut:]
        return safe, False

    def flush(self) -> str:
        """The end: the tail that did not become a stop string."""
        text, self._pending = self._pending, ""
        return text

    def _num_held(self) -> int:
        for length in range(min(self._longest - 1, len(self._pending)), 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

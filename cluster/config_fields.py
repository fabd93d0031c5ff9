"""Reading a foreign ``config.json`` field by field, forgetting none.

Every key is either read, or listed by the caller as one that does not matter, or refused by
`Fields.finish`: a key that nobody looked at is how a checkpoint is served wrong in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from cluster.errors import CheckpointError

_T = TypeVar("_T")


class Fields:
    """Typed access to a parsed JSON object. Every error is a `CheckpointError` naming the key.

    A key whose value is null counts as missing, as transformers has it.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def refuse(self, key: str, what: str, *, hint: str = "") -> NoReturn:
        """Raise a `CheckpointError` about ``key``."""
        raise CheckpointError(f"{self._prefix}{key}: {what}", hint=hint)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.raw(key) is not None

    def raw(self, key: str) -> Any:
        """The value, or None."""
        self._read.add(key)
        return self._values.get(key)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, default)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer from 0 up."""
        value = self._typed(key, int, default)
        if value < 0:
            self.refuse(key, f"{value} is negative")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """An integer from 1 up."""
        value = self.count(key, default)
        if value == 0:
            self.refuse(key, "0 is not allowed", hint="null means none" if default is None else "")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.raw(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self.refuse(key, f"expected a positive number, got {value!r}")
        return float(value)

    def integers(self, key: str) -> list[int]:
        """A list of integers with at least one entry."""
        value = self.raw(key)
        if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
            self.refuse(key, f"expected a list of integers, got {value!r}")
        return value

    def section(self, key: str) -> Fields:
        """A nested object."""
        return Fields(self._typed(key, dict, None), f"{self._prefix}{key}.")

    def finish(self, irrelevant: frozenset[str] = frozenset()) -> None:
        """Refuse the first key that was neither read nor is irrelevant."""
        for key in self._values:
            if key not in self._read and key not in irrelevant:
                self.refuse(
                    key,
                    "unknown key",
                    hint="it may change what the drafter computes, so it is not ignored",
                )

    def _typed(self, key: str, kind: type[_T], default: _T | None) -> _T:
        value = self.raw(key)
        if value is None:
            if default is None:
                self.refuse(key, "missing")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.refuse(key, f"expected {kind.__name__}, got {value!r}")
        return value

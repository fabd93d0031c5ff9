"""How fast a request has been decoding, as plain data that outlives its lanes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, eq=False)
class Progress:
    """Tokens and time since the first token. The lane that has the request writes it; its ticket
    keeps it from one lane to the next, so that a pause between them counts."""

    since: float | None = None
    """When the first token came, seconds; None: none has."""
    until: float = 0.0
    """When the latest ones came."""
    num_tokens: int = 0
    """Tokens after the first one."""

    def note(self, num_tokens: int, now: float) -> None:
        """A round emitted so many tokens, at least one."""
        if self.since is None:
            self.since, num_tokens = now, num_tokens - 1
        self.until = now
        self.num_tokens += num_tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first token to the latest."""
        return 0.0 if self.since is None else self.until - self.since

    @property
    def rate(self) -> float | None:
        """Tokens per second; None while there is too little to say."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else None

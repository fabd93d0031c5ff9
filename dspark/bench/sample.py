"""One request under load as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dspark.bench.asks import Ask
from dspark.messages import Chunk, Usage


@dataclass(frozen=True, kw_only=True)
class Window:
    """The stretch of a load that counts, in seconds of the load's clock: begin <= t < end."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.begin_s

    def holds(self, at_s: float) -> bool:
        """Whether a moment lies in it."""
        return self.begin_s <= at_s < self.end_s


@dataclass(kw_only=True, eq=False)
class Sample:
    """A request, running or over. Times are seconds of the load's clock."""

    ask: Ask
    scheduled_s: float
    """When it was to be sent. Waiting counts from here even if the client itself was late."""
    sent_s: float
    chunk_s: list[float] = field(default_factory=list)
    """When each message with tokens came. The first one brings the prefill's token, every other
    one a round's."""
    chunk_tokens: list[int] = field(default_factory=list)
    ended_s: float | None = None
    usage: Usage | None = None
    """Of a request that came to its end."""
    error: str = ""
    """Name of the error that it ended with."""

    def take(self, chunk: Chunk, now_s: float) -> None:
        """A message came."""
        if chunk.token_ids:
            self.chunk_s.append(now_s)
            self.chunk_tokens.append(len(chunk.token_ids))
        if chunk.usage is not None:
            self.usage, self.ended_s = chunk.usage, now_s

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return sum(self.chunk_tokens)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return self.chunk_s[0] - self.scheduled_s if self.chunk_s else None

    @property
    def user_rate(self) -> float:
        """Tokens/s of a request that is over, waiting for the first one included."""
        assert self.ended_s is not None, "only of a request that is over"
        return self.num_tokens / (self.ended_s - self.scheduled_s)

    @property
    def decode_rate(self) -> float | None:
        """Tokens/s from the first to the last message; None with fewer than two."""
        if len(self.chunk_s) < 2:
            return None
        return sum(self.chunk_tokens[1:]) / (self.chunk_s[-1] - self.chunk_s[0])

    def running_s(self, window: Window) -> float:
        """Seconds of the window in which it was waiting or running."""
        end_s = window.end_s if self.ended_s is None else min(self.ended_s, window.end_s)
        return max(end_s - max(self.scheduled_s, window.begin_s), 0.0)

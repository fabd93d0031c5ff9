"""How a router's requests ended, and how they were served: totals since it started."""

from __future__ import annotations

from collections import Counter

from router.slo import Attainment
from router.ticket import Ticket


class Outcomes:
    """Told of every request whose stream is over."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()
        """Requests by how they ended: a finish reason or an error's name."""
        self._ttft_s = 0.0
        """Sum over requests of the time to the first token."""
        self._num_started = 0
        self._attainment = Attainment()
        """Of requests with a target rate that were decoded here."""

    def add(self, ticket: Ticket) -> None:
        """This one is over."""
        self._ended[ticket.outcome] += 1
        if ticket.first_token_at is not None:
            self._num_started += 1
            self._ttft_s += ticket.first_token_at - ticket.submitted
            self._attainment.add(ticket.request.target_rate, ticket.progress)

    def figures(self) -> dict[str, float]:
        """Flat, for metrics."""
        figures = {"num_started": float(self._num_started), "ttft_s": self._ttft_s}
        figures |= {f"slo.{name}": value for name, value in self._attainment.figures().items()}
        return figures | {f"ended.{how}": float(n) for how, n in sorted(self._ended.items())}

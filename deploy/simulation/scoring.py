"""Keeps the score of one cell while it runs; nothing before the end of the warm-up counts."""

from __future__ import annotations

from cluster.wire import StepResult
from deploy.simulation.clock import Clock
from deploy.simulation.lane import SimLane
from deploy.simulation.tally import NUM_BINS, Tally
from router.counters import LaneCounters
from router.progress import Progress


class Scorer:
    """Fills a `Tally`.

    Args:
        counters: of the cell's lanes.
        duration_s: of the run, warm-up included.
    """

    def __init__(
        self, *, clock: Clock, counters: LaneCounters, duration_s: float, warmup_s: float
    ) -> None:
        self.tally = Tally(window_s=duration_s - warmup_s)
        self._clock = clock
        self._counters = counters
        self._bin_s = duration_s / NUM_BINS
        self._warmup_s = warmup_s
        self._predicted_s = 0.0
        self._before: dict[str, float] = {}
        self._num_running = 0
        self._since = warmup_s

    @property
    def counts(self) -> bool:
        """Whether the warm-up is over."""
        return self._clock.now >= self._warmup_s

    def begin(self) -> None:
        """The warm-up is over: forget it."""
        self._before = self._counters.snapshot()
        fresh = Tally(window_s=self.tally.window_s)
        fresh.timeline = self.tally.timeline
        self.tally = fresh

    def end(self) -> Tally:
        """The run is over."""
        self.running(0)
        after = self._counters.snapshot()
        self.tally.counters = {
            name: value - self._before.get(name, 0.0) for name, value in after.items()
        }
        return self.tally

    def step(self, lane: SimLane, result: StepResult, gaps: list[float]) -> None:
        """A result was applied.

        Args:
            gaps: seconds since the last emission, of each request that got tokens again.
        """
        predicted_s = self._counters.predicted_step_s - self._predicted_s
        self._predicted_s = self._counters.predicted_step_s
        line, place = self.tally.timeline, min(int(self._clock.now / self._bin_s), NUM_BINS - 1)
        num_tokens = len(result.token_ids)
        line.tokens[place] += num_tokens
        if result.num_real_tokens:
            num_rows = len(result.rid)
            line.steps[place] += 1
            line.rows[place] += num_rows
            line.verified[place] += max(
                result.num_real_tokens - result.num_prefill_tokens - num_rows, 0
            )
            line.step_s[place] += result.step_s
            line.predicted_s[place] += predicted_s
            self.tally.errors.add([abs(predicted_s - result.step_s) / result.step_s])
        self.tally.num_tokens += num_tokens
        if gaps:
            self.tally.gaps.add(gaps)

    def first_token(self, ttft_s: float) -> None:
        """A request got its first token."""
        self.tally.ttft_s.append(ttft_s)

    def finished(self, progress: Progress, target_rate: float) -> None:
        """A request got its last token.

        Args:
            target_rate: tokens per second that it should have had, 0 for no target.
        """
        self.tally.num_finished += 1
        if (rate := progress.rate) is not None:
            self.tally.rates.append(rate)
            if target_rate:
                self.tally.target_shares.append(rate / target_rate)

    def running(self, num_running: int) -> None:
        """So many requests are in lanes from now on."""
        now = self._clock.now
        if now > self._warmup_s:
            self.tally.num_running_s += self._num_running * (now - max(self._since, self._warmup_s))
        self._num_running, self._since = num_running, now

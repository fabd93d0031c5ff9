"""What a lane learns from the steps that ran (not from those that were planned). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.wire import StepResult
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths, Judged
from router.flights import Flight
from router.gating import DraftGate
from router.lane_request import Emission, Outcome
from router.round_times import StepTimed
from router.row_means import RowMeans
from router.step_load import StepLoad
from router.step_result import load_of
from router.throughput import ThroughputProfile


class Learning:
    """Hands out what is known after a step to those who learn from it.

    Args:
        gate: None if the lane has none.
        means: of the lane's rows.
    """

    def __init__(
        self,
        *,
        profile: ThroughputProfile,
        lengths: DraftLengths,
        gate: DraftGate | None,
        means: RowMeans,
        counters: LaneCounters,
    ) -> None:
        self._profile = profile
        self._lengths = lengths
        self._gate = gate
        self._means = means
        self._counters = counters

    def gap(self, gap_s: float, num_asked: int) -> None:
        """The verifier lay idle for so long though requests were in decode.

        Args:
            num_asked: blocks that the step before the gap had asked for.
        """
        self._profile.record_gap(gap_s)
        if self._gate is not None:
            self._gate.time_gap(gap_s, num_asked)

    def step(self, result: StepResult, flight: Flight, outcomes: Sequence[Outcome]) -> None:
        """A step is back."""
        rounds = [o for o in outcomes if isinstance(o, Emission) and o.is_round]
        self._counters.count_rounds(rounds)
        self._lengths.learn(
            [
                Judged(flight.blocks[o.rid], flight.rows[o.rid].request.regime, o)
                for o in rounds
                if o.rid in flight.blocks
            ]
        )
        drafting = [o for o in rounds if o.rid in flight.drafting]
        self._means.learn(
            len(drafting),
            sum(1 + o.num_verified for o in drafting),
            sum(len(o.token_ids) for o in drafting),
        )
        # Rows sent ahead whose requests had ended were not computed.
        num_failed = sum(failed.rid in flight.rows for failed in result.failures)
        load = load_of(result, num_rows=len(flight.rows) - num_failed)
        predicted_s = self._profile.step_s(load)
        self._counters.count_step(result, predicted_s)
        if self._gate is not None:
            self._gate.judge(rounds)
            num_draft = sum([o.num_verified for o in rounds])
            self._gate.time_step(
                StepTimed(
                    num_rows=load.num_rows,
                    num_drafted=sum([o.num_proposed > 0 for o in rounds]),
                    asked=flight.drafting,
                    num_accepted=sum([o.num_accepted for o in rounds]),
                    step_s=result.step_s,
                    predicted_s=predicted_s,
                    plain_s=self._profile.step_s(_plain(load, num_draft))
                    if num_draft
                    else predicted_s,
                )
            )
        self._profile.record(load, result.step_s)


def _plain(load: StepLoad, num_draft: int) -> StepLoad:
    """The same step without its drafts."""
    return StepLoad(
        num_rows=load.num_rows,
        num_tokens=load.num_rows + load.num_prefill,
        num_prefill=load.num_prefill,
        sum_context=max(load.sum_context - num_draft, 0),
    )

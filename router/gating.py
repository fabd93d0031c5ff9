"""Whether to ask for a draft at all: per request and round, from history only. Pure.

The paper drafts for every request in every round, also where no block can pay. Here a lane asks
for as many blocks as raise its expected tokens per second (`router.draft_plan`), by what blocks
were worth to each request so far (`router.draft_worth`), what verifying them costs by the live
profile, and what drafting exposes, takes from a shared device, and is priced at
(`router.draft_cost`). To ask for none is plain decoding: with right figures a lane is never slower
than that but for its probes.

Probes keep the figures right. A lane that asks for nothing drafts for a few of its rows now and
then, and more rarely for all; how often falls with what that is known to lose, to a fixed share of
throughput in all. A request passed over beside others is asked once in a while. A lane whose
drafter shares the verifier's device goes without drafts once in a while, to know what that would be
like. A lane starts by drafting for everybody; a load that it meets for the first time is judged by
what is known of others, and a few rows are asked in any case. A request that was not asked is asked
again only if that pays a little more, and likewise a lane: near the point where it makes no
difference nothing flaps.

Exactness (rejection mode): the decision about a block is made before it is drafted, from load,
times and blocks of earlier steps; probes are keyed draws of their own stream. It is the *asking*
that is decided; a block that came is never dropped for what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import SchedulingConfig
from cluster.sampling import REGIMES
from router.counters import LaneCounters
from router.draft_cost import Drafting
from router.draft_outlook import Decoding, DraftOutlook, draftable
from router.draft_plan import DraftPlan
from router.draft_probes import ProbeLosses, probe, sample
from router.draft_worth import DraftWorth
from router.drafter_book import DrafterBook
from router.gate_rhythm import GateRhythm
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.round_times import RoundTimes, StepTimed


class DraftGate:
    """The draft decisions of one lane.

    Args:
        book: drafters, with the profiles of their links.
        recalibrator: of the confidences that blocks report.
        counters: of the router.
        device: identity of the verifier's device (`cluster.device_identity`); empty: not known, and
            taken for one that no drafter is on.
        scheduling: see `configure`.
    """

    def __init__(
        self,
        *,
        book: DrafterBook,
        recalibrator: Recalibrator,
        counters: LaneCounters,
        scheduling: SchedulingConfig,
        device: str = "",
    ) -> None:
        self._counters = counters
        self._worth = DraftWorth(recalibrator)
        self._round_times = RoundTimes()
        self._outlook = DraftOutlook(
            book=book, worth=self._worth, times=self._round_times, device=device
        )
        self._asked: set[int] = set()
        """Requests whose blocks were asked for behind their present anchors."""
        self._chosen: set[int] = set()
        """Requests for which asking was last expected to pay."""
        self._promised: dict[int, NDArray[np.float64]] = {}
        """By request: promised survival of the drafts that are in a step now."""
        self._probed_once: set[int] = set()
        """Requests of a lane without drafts that are to be asked for once more."""
        self._probed: set[int] = set()
        """Requests for which was decided otherwise, to learn from the round that comes of it."""
        self._tried: set[int] = set()
        """Requests asked for last by a probe of a lane that would ask for nothing."""
        self._on_trial: set[int] = set()
        """Those whose blocks, or lack of them, are in a step now."""
        self._losses = ProbeLosses()
        self._rhythm = GateRhythm()
        self._drafting = Drafting(np.zeros(1), np.zeros(1))
        self._gain = self._gain_of_all = 1.0
        self.configure(scheduling)

    def configure(self, scheduling: SchedulingConfig) -> None:
        """Follow this from the next step on."""
        if self._outlook.scheduling.gate_drafts != scheduling.gate_drafts:
            self._chosen.clear()  # nobody was chosen while all were asked
        self._scheduling = scheduling
        self._outlook.scheduling = scheduling

    # --- decide -------------------------------------------------------------------------------

    def ask(
        self, rows: Sequence[LaneRequest], lengths: Sequence[int], decoding: Decoding
    ) -> list[bool]:
        """Whether to ask for a block behind each row of the step that goes now; learns from the
        blocks that go with it.

        Args:
            rows: of the step.
            lengths: draft tokens of each that are verified in it.
            decoding: with these rows.
        """
        mine = draftable(rows)
        rids = {request.rid for request in mine}
        due = self._rhythm.tick(decoding.load.num_rows)
        gates = self._scheduling.gate_drafts
        tried = self._asked.intersection([request.rid for request in rows])
        if tried and tried <= self._tried:
            self._on_trial |= tried
        self._tried -= tried
        chosen = rids & self._chosen if gates else rids
        if due or not self._probed.isdisjoint(request.rid for request in rows):
            if gates and mine:
                chosen = self._choose(mine, rids, decoding)
            self._see(rows, lengths)
        self._asked.difference_update(request.rid for request in rows)
        self._asked.update(chosen)
        self._count(len(chosen), len(rids))
        return [request.rid in chosen for request in rows]

    def ask_first(self, requests: Sequence[LaneRequest], decoding: Decoding) -> list[bool]:
        """Whether to ask for the blocks behind the prompts of requests that are admitted now.

        Args:
            decoding: with these requests and all whose prompts are being computed: by the time
                that these decode, the others do.
        """
        mine = draftable(requests)
        if not mine:
            return [False] * len(requests)
        chosen = {request.rid for request in mine}
        if self._scheduling.gate_drafts and self._worth.is_known(mine):
            plan = self._plan(mine, decoding)
            chosen = {r.rid for r, yes in zip(mine, plan.chosen, strict=False) if yes}
        self._asked |= chosen
        self._chosen |= chosen
        self._count(len(chosen), len(mine))
        return [request.rid in chosen for request in requests]

    def _choose(self, mine: Sequence[LaneRequest], rids: set[int], decoding: Decoding) -> set[int]:
        """Which of ``mine``, rows that can be drafted for, to ask for: request ids."""
        self._probed -= rids
        num_rows = decoding.load.num_rows
        if not self._worth.is_known(mine):
            self._drafting = self._outlook.drafting_of(mine)
            self._probed |= rids
            self._chosen |= rids
            return set() if self._rhythm.begin(num_rows) and self._outlook.shares(mine) else rids
        plan = self._plan(mine, decoding)
        self._gain, self._gain_of_all = float(plan.gains.max()), float(plan.gains[-1])
        self._rhythm.round_s = plan.plain_s
        chosen = {r.rid for r, yes in zip(mine, plan.chosen, strict=False) if yes}
        self._counters.expected_gain += (
            self._rhythm.num_since * plan.accepted * len(mine) / len(plan.chosen)
        )
        self._chosen = (self._chosen - rids) | chosen
        probed = self._probe(mine, chosen, plan, num_rows)
        if not chosen:
            self._tried |= probed
        self._counters.num_draft_probes += len(probed ^ chosen)
        self._probed |= probed ^ chosen
        return probed

    def _probe(
        self, mine: Sequence[LaneRequest], chosen: set[int], plan: DraftPlan, num_rows: int
    ) -> set[int]:
        """Whom to ask for in the end where ``chosen`` would pay."""
        shares = self._outlook.shares(mine)
        if self._rhythm.is_new(num_rows):
            contrary = self._rhythm.begin(num_rows) and shares
            probed = chosen or sample(mine)
            probed = set() if contrary and chosen else probed
        else:
            probed = probe(
                mine,
                chosen,
                plan,
                self._losses,
                num_rows=num_rows,
                num_rounds=self._rhythm.num_since,
                shared=shares,
            )
        if not chosen:
            # A second round: before the blocks of the first one the drafter had to catch up.
            here = {request.rid for request in mine}
            again, self._probed_once = here & self._probed_once, probed - self._probed_once
            probed = probed | again
        return probed

    def _plan(self, mine: Sequence[LaneRequest], decoding: Decoding) -> DraftPlan:
        """The best plan for these and all others that can be drafted for, these first."""
        plan, self._drafting = self._outlook.plan(mine, decoding, chosen=self._chosen)
        return plan

    def _count(self, num_asked: int, num_wanted: int) -> None:
        self._counters.num_draft_asks += num_asked
        self._counters.num_drafts_gated += num_wanted - num_asked

    # --- learn --------------------------------------------------------------------------------

    def _see(self, rows: Sequence[LaneRequest], lengths: Sequence[int]) -> None:
        """Learn from the blocks that go into a step, and from those that should have."""
        drafted, verified, late, plain = [], [], [], []
        for request, length in zip(rows, lengths, strict=True):
            if request.block is not None:
                drafted.append(request)
                verified.append(length)
            elif request.rid in self._asked and request.drafter is not None:
                if not request.behind:
                    late.append(request)
            else:
                plain.append(request)
        self._worth.pass_over(draftable(plain), num_rounds=self._rhythm.num_since)
        self._rhythm.num_since = 0
        self._worth.miss(late)
        promised = self._worth.see(drafted, np.array(verified, np.int64))
        self._promised.update(zip((r.rid for r in drafted), promised, strict=True))

    def judge(self, emissions: Iterable[Emission]) -> None:
        """What the rows of a step came to."""
        told = [e for e in emissions if e.num_verified and e.rid in self._promised]
        promised = [self._promised.pop(e.rid) for e in told]
        self._worth.judge(
            [e.rid for e in told],
            promised,
            np.array([e.num_accepted for e in told], np.int64),
        )

    def time_step(self, step: StepTimed) -> None:
        """How long a step took, after the gap of which `time_gap` was told."""
        round_s = self._round_times.step(step)
        trial = bool(step.asked) and step.asked <= self._on_trial
        self._on_trial -= step.asked
        if round_s is not None and trial:
            plain_s = step.plain_s + self._round_times.rest.seconds
            tokens = 1 + step.num_accepted / step.num_rows
            self._losses.observe(step.num_rows, len(step.asked), round_s / plain_s - tokens)

    def time_gap(self, gap_s: float, num_asked: int) -> None:
        """How long the verifier lay idle though there was work.

        Args:
            num_asked: blocks that the step before had asked for.
        """
        latency_n = self._drafting.latency_s
        latency_s = float(latency_n[min(num_asked, len(latency_n) - 1)])
        # No latency though blocks were asked for: the drafter is new, and nothing was expected.
        known = latency_s > 0 or not num_asked
        self._round_times.gap(gap_s, latency_s if known else None)

    def forget(self, rid: int) -> None:
        """A request is over."""
        self._worth.forget(rid)
        self._asked.discard(rid)
        self._chosen.discard(rid)
        self._probed.discard(rid)
        self._probed_once.discard(rid)
        self._tried.discard(rid)
        self._on_trial.discard(rid)
        self._promised.pop(rid, None)

    def figures(self) -> dict[str, float]:
        """What the gate goes by, for metrics.

        ``gain`` is the expected tokens per second of what it chose, ``gain_of_all`` of asking for
        every block, both over plain decoding; ``slow_down`` how many times longer drafted rounds
        take on a shared device, beyond what is predicted, at the load where it is most; ``gap_s``
        the time between steps, drafting apart; ``accepted`` and ``honesty`` of each
        regime the drafts of a whole block that are expected to be accepted, and how many are for
        one that is promised.
        """
        figures = {
            "gain": self._gain,
            "gain_of_all": self._gain_of_all,
            "slow_down": self._round_times.slow_down,
            "gap_s": self._round_times.rest.seconds,
        }
        for regime in REGIMES:
            accepted, honesty = self._worth.mean(regime)
            figures |= {f"{regime}.accepted": accepted, f"{regime}.honesty": honesty}
        return figures

"""A lane on a virtual clock: the real `LaneState`, a verifier and a drafter that only take time.

For questions of timing: who goes when, and what comes of it. Text is made up as it goes; drafts are
right with one probability, each by itself. Seeded, so a run is a function of its arguments.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster import digest
from cluster.config import SchedulingConfig
from cluster.wire import FINISH_NONE, Lease, Sampling, Step, StepResult
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths
from router.drafter_book import DrafterBook, DrafterRef
from router.lane_request import Emission, LaneRequest, Outcome
from router.recalibration import Recalibrator
from router.rounds import LaneState
from router.throughput import ThroughputProfile
from tests.frames import make_result, make_sampling

DRAFTER = DrafterRef(drafter_id="a", address="127.0.0.1:1", fingerprint="f")
SIZES = tuple(sorted({*range(1, 17), *(round(16 * 1.25**n) for n in range(26))}))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made of. Times in seconds."""

    step_s: Callable[[int], float]
    """Of a step of so many tokens."""
    num_requests: int
    draft_s: float
    hop_s: float = 1e-3 / 3
    """One way between any two members."""
    gamma: int = 7
    survival: float = 0.84
    """Of each draft token, if all before it survived."""
    step_jitter: float = 0.02
    draft_jitter: float = 0.15
    num_new_tokens: tuple[int, int] = (100, 400)
    """Least and most of a request; the next one follows when it ends."""
    num_prompt: int = 8
    stagger_s: float = 0.1
    """Requests start within this time."""
    prefill_budget: int = 256
    max_step_tokens: int = 4096
    share_plain: float = 0.0
    """Requests that decode without drafts."""
    sampling: Sampling = field(default_factory=make_sampling)
    seed: int = 0

    @property
    def cycle_s(self) -> float:
        """Of everybody together, whole blocks."""
        num_tokens = self.num_requests * (1 + self.gamma)
        return self.step_s(num_tokens) + self.draft_s + 3 * self.hop_s


class LaneWorld:
    """One run."""

    def __init__(self, setting: Setting, scheduling: SchedulingConfig) -> None:
        self.setting = setting
        self.now = 0.0
        self.worth = 0.0
        """Tokens that the rows so far are expected to emit: less noise than what they did emit."""
        self.emitted_at: dict[int, list[float]] = {}
        """By request: when its tokens came, one entry a round."""
        self.first_token_s: dict[int, float] = {}
        """By request: time from submission to the first token."""
        self.steps: list[tuple[float, int, int]] = []
        """Of each step: seconds, rows, tokens."""
        self.counters = LaneCounters()
        self.confidence: Callable[[], NDArray[np.float64]] = lambda: np.full(
            setting.gamma, setting.survival
        )
        """Of the next block."""
        self.closed: Callable[[int], bool] = lambda rid: True
        """Whether another request follows when this one ends."""
        self._rng = random.Random(setting.seed)
        self._rids = itertools.count(1)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._queue: deque[Step] = deque()
        self._running = False
        self._wake_at = math.inf
        """When the lane is looked at in any case."""
        self._pending: dict[int, int] = {}
        """By request: prompt tokens left to compute."""
        self._submitted: dict[int, float] = {}
        self._texts: dict[int, tuple[int, int]] = {}
        """By request: anchor and digest as the verifier knows them."""
        self._undrafted: list[list[int]] = []
        """What the drafter has been asked for; while it drafts, an empty first entry."""
        self.state = self._make_state(scheduling)
        for _ in range(setting.num_requests):
            self.at(self._rng.uniform(0.0, setting.stagger_s), self.submit)

    # --- driving ------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        """Go on to this time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self._go()
        self.now = until

    def at(self, time: float, happen: Callable[[], None]) -> None:
        """Have something happen."""
        heapq.heappush(self._events, (time, next(self._order), happen))

    def submit(self, **changes: Any) -> None:
        """A new request."""
        rid = next(self._rids)
        num_prompt = changes.pop("num_prompt", self.setting.num_prompt)
        values: dict[str, Any] = {
            "rid": rid,
            "ids": list(range(2, 2 + num_prompt)),
            "num_prompt": num_prompt,
            "max_new_tokens": self._rng.randint(*self.setting.num_new_tokens),
            "stop_ids": (),
            "sampling": self.setting.sampling,
            "draft": rid * 0.618 % 1.0 >= self.setting.share_plain,
        }
        self._submitted[rid] = self.now
        self.state.add(LaneRequest(**(values | changes)), self.now)

    def _go(self) -> None:
        """What `router.lane.Lane` does after every event."""
        while (at := self.state.next_step_at(self.now)) <= self.now:
            rows = self.state.ready_rows(self.now)
            lengths = self.state.schedule(rows, now=self.now)
            step = self.state.dispatch(rows, lengths, self.now)
            self.at(self.now + self.setting.hop_s, functools.partial(self._take, step))
        if at < self._wake_at or self._wake_at <= self.now:
            self._wake_at = at
            if at < math.inf:
                self.at(at, lambda: None)

    # --- the verifier -------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        self._queue.append(step)
        assert len(self._queue) <= 1 + (not self._running), "one runs, one waits"
        if not self._running:
            self._begin()

    def _begin(self) -> None:
        step = self._queue.popleft()
        self._running = True
        for rid in step.releases.tolist():
            self._pending.pop(rid, None)
            self._texts.pop(rid, None)
        for admission in step.admissions:
            self._pending[admission.rid] = len(admission.ids)
            self._texts[admission.rid] = (len(admission.ids) - 1, digest.of(admission.ids.tolist()))
        budget, done = step.prefill_budget, []
        for rid, left in list(self._pending.items()):
            chunk = min(left, budget)
            budget -= chunk
            self._pending[rid] = left - chunk
            if left == chunk:
                del self._pending[rid]
                done.append(rid)
        num_prefill = step.prefill_budget - budget
        num_tokens = len(step.rid) + int(step.num_draft.sum()) + num_prefill
        noise = math.exp(self._rng.gauss(0.0, self.setting.step_jitter))
        step_s = self.setting.step_s(num_tokens) * noise if num_tokens else 1e-4
        self.steps.append((step_s, len(step.rid), num_tokens))
        self.at(self.now + step_s, lambda: self._finish(step, done, num_prefill, step_s))

    def _finish(self, step: Step, done: list[int], num_prefill: int, step_s: float) -> None:
        self._running = False
        rids = [*step.rid.tolist(), *done]
        lengths = [*step.num_draft.tolist(), *(0 for _ in done)]
        wanted = [*step.want_draft.tolist(), *(1 for _ in done)]
        accepted = [self._num_accepted(length) for length in lengths]
        first, token_ids, anchors, digests = 0, [], [], []
        drafts = step.draft_ids.tolist()
        for rid, length, num in zip(rids, lengths, accepted, strict=True):
            anchor, prefix = self._texts.get(rid, (0, 0))
            mine = [*drafts[first : first + num], 1]
            first += length
            if (request := self.state.requests.get(rid)) is not None:
                mine = mine[: request.remaining]
            self._texts[rid] = anchor + len(mine), digest.extend(prefix, mine)
            token_ids.append(mine)
            anchors.append(anchor + len(mine))
            digests.append(self._texts[rid][1])
        result = make_result(
            lane_epoch=step.lane_epoch,
            step_id=step.step_id,
            rid=np.array(rids, np.int64),
            num_accepted=np.array(
                [min(n, len(ids)) for n, ids in zip(accepted, token_ids, strict=True)], np.int32
            ),
            num_emitted=np.array([len(ids) for ids in token_ids], np.int32),
            token_ids=np.array([token for ids in token_ids for token in ids], np.int32),
            logprobs=np.zeros(sum(map(len, token_ids)), np.float32),
            anchor=np.array(anchors, np.int32),
            digest=np.array(digests, np.uint64),
            finish=np.full(len(rids), FINISH_NONE, np.uint8),
            num_real_tokens=len(step.rid) + int(step.num_draft.sum()) + num_prefill,
            num_prefill_tokens=num_prefill,
            step_s=step_s,
            pending_prefill_tokens=sum(self._pending.values()),
        )
        asked = [rid for rid, want in zip(rids, wanted, strict=True) if want]
        self._draft(asked)
        self.at(self.now + self.setting.hop_s, lambda: self._answer(result))
        if self._queue:
            self._begin()

    def _num_accepted(self, length: int) -> int:
        num = 0
        while num < length and self._rng.random() < self.setting.survival:
            num += 1
        return num

    # --- the drafter --------------------------------------------------------------------------

    def _draft(self, rids: list[int]) -> None:
        """Blocks for these requests: one batch after the other, each of all that waits."""
        self._undrafted.append(rids)
        if len(self._undrafted) == 1:
            self.at(self.now + self.setting.hop_s, self._draft_batch)

    def _draft_batch(self) -> None:
        asked = dict.fromkeys(rid for rids in self._undrafted for rid in rids)
        batch = [rid for rid in asked if self._has_session(rid)]
        noise = math.exp(self._rng.gauss(0.0, self.setting.draft_jitter))
        draft_s = self.setting.draft_s * noise
        blocks = [self._block(rid, len(batch), draft_s) for rid in batch]
        self._undrafted = [[]]  # what is asked for meanwhile waits
        self.at(self.now + draft_s + self.setting.hop_s, self._deliver(blocks))
        self.at(self.now + draft_s, self._end_batch)

    def _end_batch(self) -> None:
        waiting, self._undrafted = self._undrafted[1:], []
        if waiting:
            self._undrafted = waiting
            self._draft_batch()

    def _has_session(self, rid: int) -> bool:
        request = self.state.requests.get(rid)
        return request is not None and request.drafter is not None

    def _block(self, rid: int, batch_size: int, draft_s: float) -> DraftBlock:
        anchor, prefix = self._texts[rid]
        return DraftBlock(
            rid=rid,
            epoch=self.state.requests[rid].session_epoch,
            anchor=anchor,
            digest=prefix,
            ids=(5,) * self.setting.gamma,
            confidence=self.confidence(),
            q=None,
            batch_size=batch_size,
            draft_s=draft_s,
        )

    def _deliver(self, blocks: list[DraftBlock]) -> Callable[[], None]:
        def deliver() -> None:
            for block in blocks:
                self.state.take_block(DRAFTER.drafter_id, block, self.now)

        return deliver

    # --- the router ---------------------------------------------------------------------------

    def _answer(self, result: StepResult) -> None:
        for outcome in self.state.apply(result, self.now):
            self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        assert isinstance(outcome, Emission), outcome
        self.worth += sum(self.setting.survival**n for n in range(outcome.num_verified + 1))
        self.emitted_at.setdefault(outcome.rid, []).append(self.now)
        if not outcome.is_round:
            self.first_token_s[outcome.rid] = self.now - self._submitted[outcome.rid]
        if outcome.finish != FINISH_NONE and self.closed(outcome.rid):
            self.at(self.now, self.submit)

    def _make_state(self, scheduling: SchedulingConfig) -> LaneState:
        book = DrafterBook(bound_s=1.0)
        book.up(DRAFTER)
        lease = Lease(
            lane_epoch=1,
            ttl_s=5.0,
            max_model_len=1 << 16,
            vocab_size=1 << 16,
            max_requests=1024,
            max_step_tokens=self.setting.max_step_tokens,
            kv_block_tokens=16,
            kv_blocks=1 << 20,
            profile_tokens=np.array(SIZES, np.int32),
            profile_step_s=np.array([self.setting.step_s(n) for n in SIZES], np.float32),
        )
        profile = ThroughputProfile(lease.profile_tokens, lease.profile_step_s)
        lengths = DraftLengths(
            recalibrator=Recalibrator(),
            profile=profile,
            counters=self.counters,
            explore_fraction=0.0,
            scheduling=scheduling,
        )
        return LaneState(
            lease=lease,
            fingerprint=DRAFTER.fingerprint,
            prefill_budget=self.setting.prefill_budget,
            profile=profile,
            book=book,
            counters=self.counters,
            lengths=lengths,
            scheduling=scheduling,
        )


def throughput(setting: Setting, scheduling: SchedulingConfig, *, num_cycles: float = 60) -> float:
    """Tokens per second once the run has settled."""
    world = LaneWorld(setting, scheduling)
    warm_s = setting.stagger_s + 20 * setting.cycle_s
    world.run(warm_s)
    before = world.worth
    world.run(warm_s + num_cycles * setting.cycle_s)
    return (world.worth - before) / (num_cycles * setting.cycle_s)

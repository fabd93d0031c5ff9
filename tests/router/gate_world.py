"""A lane reduced to what a draft gate sees: rounds of one group on a virtual clock.

The verifier's steps, the drafter's latency and what becomes of drafts are given; lengths are the
best for the survival that blocks promise. Decisions and learning are production's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.config import SchedulingConfig
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_outlook import Decoding
from router.drafter_book import DrafterBook, DrafterRef
from router.gating import DraftGate
from router.lane_request import Emission, LaneRequest
from router.recalibration import Recalibrator
from router.round_times import StepTimed
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from tests.frames import make_sampling

ONE_GROUP = SchedulingConfig(gather="wait_for_all")
GAMMA = 7
Text = Callable[[LaneRequest, np.random.Generator], float]
"""Probability of each next draft of the block behind this request's anchor, given those before."""


@dataclass(kw_only=True)
class GateWorld:
    """One lane and its drafter.

    Attributes:
        step_s: seconds of a step of so many tokens.
        latency_s: from a result to its blocks, by their number.
        slow_down: how many times longer a step takes whose rows were all drafted for.
        promise: makes a reported confidence of the true one.
    """

    step_s: Callable[[int], float]
    latency_s: Callable[[int], float]
    text: Text
    slow_down: float = 1.0
    promise: Callable[[float], float] = lambda p: p
    shared: bool = False
    seed: int = 0
    scheduling: SchedulingConfig = ONE_GROUP
    late: bool = False
    catch_up_s: float = 0.0
    """Of a row, for each round since its last block."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.book = DrafterBook(bound_s=10.0)
        self.ref = DrafterRef(
            drafter_id="a", address="", fingerprint="f", device="d" if self.shared else "other"
        )
        self.book.up(self.ref)
        sizes = np.array([1, 8, 64, 512], np.int32)
        self.profile = ThroughputProfile(
            sizes, np.array([self.step_s(int(n)) for n in sizes], np.float32)
        )
        self.counters = LaneCounters()
        self.gate = DraftGate(
            book=self.book,
            recalibrator=Recalibrator(min_samples=np.inf),
            counters=self.counters,
            scheduling=self.scheduling,
            device="d",
        )
        self.requests: list[LaneRequest] = []
        self._waiting: list[int] = []
        self._missed: dict[int, int] = {}
        self.num_asked: list[int] = []
        self.now = 0.0
        self.num_tokens = 0
        self._num_rids = 0

    def resize(self, num_requests: int) -> None:
        """So many requests from now on; new ones come, the oldest go."""
        while len(self.requests) > num_requests:
            self.gate.forget(self.requests.pop(0).rid)
        while len(self.requests) < num_requests:
            self.requests.append(self._request())
            self._num_rids += 1

    def run(self, num_rounds: int) -> float:
        """Tokens per second of these rounds."""
        now, num_tokens = self.now, self.num_tokens
        for _ in range(num_rounds):
            self.round()
        return (self.num_tokens - num_tokens) / (self.now - now)

    def round(self) -> None:
        rows = self.requests
        lengths = self._lengths()
        load = StepLoad(num_rows=len(rows), num_tokens=len(rows))
        num_drafted = sum(request.block is not None for request in rows)
        asked = self.gate.ask(
            rows, lengths, Decoding(load=load, times=self.profile, room=1024 - len(rows))
        )
        slower = self.slow_down ** (num_drafted / len(rows))
        step_s = self.step_s(len(rows) + sum(lengths)) * slower
        done = StepLoad(num_rows=len(rows), num_tokens=len(rows) + sum(lengths))
        outcomes = [self._verify(r, n) for r, n in zip(rows, lengths, strict=True)]
        self.gate.judge(outcomes)
        self.gate.time_step(
            StepTimed(
                num_rows=len(rows),
                num_drafted=num_drafted,
                asked=frozenset(self._waiting),
                num_accepted=sum(outcome.num_accepted for outcome in outcomes),
                step_s=step_s,
                predicted_s=self.profile.step_s(done),
                plain_s=self.profile.step_s(load),
            )
        )
        self.profile.record(done, step_s)
        self.now += step_s
        self.num_asked.append(sum(asked))
        wanted = [r for r, yes in zip(rows, asked, strict=True) if yes]
        self._waiting = [request.rid for request in wanted]
        self._draft(wanted)

    def _draft(self, wanted: list[LaneRequest]) -> None:
        latency_s = self.latency_s(len(wanted)) if wanted else 0.0
        for request in self.requests:
            self._missed[request.rid] = self._missed.get(request.rid, 0) + 1
        latency_s += self.catch_up_s * sum(self._missed.pop(r.rid) - 1 for r in wanted)
        self.gate.time_gap(latency_s, len(wanted))
        self.now += latency_s
        for request in wanted:
            link = self.book.link("a")
            assert link is not None
            link.observe(len(wanted), latency_s, latency_s, weight=1 / len(wanted))
            if self.late:
                continue
            p = self.text(request, self.random)
            request.block = DraftBlock(
                rid=request.rid,
                epoch=0,
                anchor=request.anchor,
                digest=0,
                ids=(1,) * GAMMA,
                confidence=np.full(GAMMA, self.promise(p)),
                q=None,
            )
            request.truth = p  # type: ignore[attr-defined]

    def _lengths(self) -> list[int]:
        """The best cut of the promised survival."""
        num = len(self.requests)
        survival = np.zeros((num, GAMMA))
        for row, request in enumerate(self.requests):
            if request.block is not None:
                survival[row] = request.block.confidence.cumprod()
        order = np.argsort(-survival, axis=None, kind="stable")
        gains = survival.ravel()[order]
        gains = gains[: np.count_nonzero(gains)]
        seconds = self.profile.curve_s(StepLoad(num_rows=num, num_tokens=num), num + len(gains))[
            num:
        ]
        rate = (num + np.concatenate([[0.0], gains.cumsum()])) / seconds
        rows = order[: int(rate.argmax())] // GAMMA
        lengths: list[int] = np.bincount(rows, minlength=num).tolist()
        return lengths

    def _verify(self, request: LaneRequest, length: int) -> Emission:
        accepted = 0
        block, request.block = request.block, None
        while accepted < length and self.random.random() < request.truth:  # type: ignore[attr-defined]
            accepted += 1
        request.ids.extend([1] * (accepted + 1))
        self.num_tokens += accepted + 1
        return Emission(
            rid=request.rid,
            token_ids=(1,) * (accepted + 1),
            logprobs=(0.0,) * (accepted + 1),
            finish=0,
            is_round=True,
            num_proposed=0 if block is None else GAMMA,
            num_verified=length,
            num_accepted=accepted,
        )

    def _request(self, **changes: Any) -> LaneRequest:
        values: dict[str, Any] = {
            "rid": self._num_rids,
            "ids": [1, 2, 3],
            "num_prompt": 3,
            "max_new_tokens": 10**9,
            "stop_ids": (),
            "sampling": make_sampling(),
            "draft": True,
        }
        request = LaneRequest(**(values | changes))
        request.drafter = self.ref
        return request


def steady(p: float) -> Text:
    """A text in which every draft holds with this probability, and the drafter knows it."""
    return lambda request, random: p


def mixed(*choices: float) -> Text:
    """A text of easy and hard places; the drafter knows which is which."""
    return lambda request, random: float(random.choice(choices))

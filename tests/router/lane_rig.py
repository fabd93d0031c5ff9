"""A lane state with a clock of the test's own, a verifier that emits what it is told, a drafter."""

from __future__ import annotations

from typing import Any

import numpy as np

from cluster import digest
from cluster.config import SchedulingConfig
from cluster.wire import Lease, Step, StepResult
from router.blocks import DraftBlock
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths
from router.drafter_book import DrafterBook, DrafterRef
from router.lane_request import LaneRequest, Phase
from router.recalibration import Recalibrator
from router.rounds import LaneState
from router.throughput import ThroughputProfile
from tests.frames import make_result, make_sampling

A = DrafterRef(drafter_id="a", address="127.0.0.1:1", fingerprint="f")
B = DrafterRef(drafter_id="b", address="127.0.0.1:2", fingerprint="f")


class Rig:
    """A lane state with a clock, a verifier that always emits the token 1, and drafter ``a``."""

    def __init__(self, *, drafters: tuple[DrafterRef, ...] = (A,), **lease: Any) -> None:
        self.now = 100.0
        self.counters = LaneCounters()
        self.recalibrator = Recalibrator()
        self.book = DrafterBook(bound_s=1.0)
        for ref in drafters:
            self.book.up(ref)
        profile = ThroughputProfile(np.array([1], np.int32), np.array([0.01], np.float32))
        self.state = LaneState(
            lease=make_lease(**lease),
            fingerprint="f",
            prefill_budget=8,
            profile=profile,
            book=self.book,
            counters=self.counters,
            lengths=DraftLengths(
                recalibrator=self.recalibrator,
                profile=profile,
                counters=self.counters,
                explore_fraction=0.0,
                scheduling=SchedulingConfig(),
            ),
        )

    def add(
        self, rid: int, *, num_prompt: int = 3, max_new_tokens: int = 20, **changes: Any
    ) -> LaneRequest:
        values: dict[str, Any] = {
            "rid": rid,
            "ids": list(range(2, 2 + num_prompt)),
            "num_prompt": num_prompt,
            "max_new_tokens": max_new_tokens,
            "stop_ids": (),
            "sampling": make_sampling(),
            "draft": True,
        }
        request = LaneRequest(**(values | changes))
        self.state.add(request, self.now)
        return request

    def step(self, lengths: int = 0) -> Step:
        rows = self.state.ready_rows(self.now)
        return self.state.dispatch(rows, [lengths] * len(rows), self.now)

    def result(self, step: Step, *, prefilled: tuple[int, ...] = (), **changes: Any) -> StepResult:
        """Every row and every request in ``prefilled`` gets one token more than accepted drafts."""
        rids = [*step.rid.tolist(), *prefilled]
        accepted = [*step.num_draft.tolist(), *(0 for _ in prefilled)]
        tokens, anchors, digests = [], [], []
        drafts = step.draft_ids.tolist()
        for rid, n in zip(rids, accepted, strict=True):
            request = self.state.requests[rid]
            mine, drafts = [*drafts[:n], 1], drafts[n:]
            tokens += mine
            anchors.append(request.anchor + len(mine))
            digests.append(digest.extend(request.digest, mine))
        values: dict[str, Any] = {
            "lane_epoch": step.lane_epoch,
            "step_id": step.step_id,
            "rid": np.array(rids, np.int64),
            "num_accepted": np.array(accepted, np.int32),
            "num_emitted": np.array(accepted, np.int32) + np.int32(1),
            "token_ids": np.array(tokens, np.int32),
            "logprobs": np.zeros(len(tokens), np.float32),
            "anchor": np.array(anchors, np.int32),
            "digest": np.array(digests, np.uint64),
            "finish": np.zeros(len(rids), np.uint8),
            "num_real_tokens": max(len(tokens), 1),
            "step_s": 0.01,
        }
        return make_result(**(values | changes))

    def prefill(self, *rids: int) -> list[Any]:
        return self.state.apply(self.result(self.step(), prefilled=rids), self.now)

    def learn_latency(self, rid: int, latency_s: float, *, num_rounds: int = 12) -> None:
        """Have a request answered by its drafter so late a few times, and end."""
        self.add(rid, max_new_tokens=200)
        self.prefill(rid)
        for _ in range(num_rounds):
            self.now += latency_s
            self.state.take_block("a", self.block(rid), self.now)
            self.now += 0.01
            self.state.apply(self.result(self.step()), self.now)
        self.state.end(rid)
        self.state.apply(self.result(self.step()), self.now)

    def answer(self, rid: int) -> None:
        """A request's own drafter sends the block that it waits for."""
        drafter = self.state.requests[rid].drafter
        assert drafter is not None
        self.state.take_block(drafter.drafter_id, self.block(rid), self.now)

    def block(self, rid: int, num_draft: int = 4, **changes: Any) -> DraftBlock:
        request = self.state.requests[rid]
        values: dict[str, Any] = {
            "rid": rid,
            "epoch": request.session_epoch,
            "anchor": request.anchor,
            "digest": request.digest,
            "ids": (5,) * num_draft,
            "confidence": np.full(num_draft, 0.9),
            "q": None,
        }
        return DraftBlock(**(values | changes))

    def phases(self) -> dict[int, Phase]:
        return {rid: request.phase for rid, request in self.state.requests.items()}


def make_lease(**changes: Any) -> Lease:
    values: dict[str, Any] = {
        "lane_epoch": 9,
        "ttl_s": 5.0,
        "max_model_len": 64,
        "vocab_size": 50,
        "max_requests": 4,
        "max_step_tokens": 16,
        "kv_block_tokens": 8,
        "kv_blocks": 16,
        "profile_tokens": np.array([1], np.int32),
        "profile_step_s": np.array([0.01], np.float32),
    }
    return Lease(**(values | changes))

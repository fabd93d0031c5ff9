"""The requests of a lane, by id, by phase, and what they hold and wait for. Pure.

Kept up to date as requests change their phase, so that no decision has to look at all of them: with
R requests there are R blocks a round, and a scan per block would be R squared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from router.lane_request import LaneRequest, Phase

_QUEUED, _AWAITING, _READY = Phase.QUEUED, Phase.AWAITING, Phase.READY
"""Looked up once: an enum's members take their time."""


class Latency(NamedTuple):
    """How long after the result of a step its blocks are expected."""

    mean_s: float
    deviation_s: float


@dataclass(kw_only=True)
class Wave:
    """Blocks that one drafter was asked for by one step, as far as they are still under way."""

    key: tuple[str, float] = ("", 0.0)
    """The drafter, and when it was asked."""
    expected: float
    """When they should be here."""
    deviation_s: float
    """Mean deviation of that."""
    due: float
    """Until when they may come."""
    num_rows: int = 0


class Roster:
    """Requests of one lane.

    Args:
        kv_block_tokens: positions per KV block.
        latency: of the blocks of a drafter, named by its id, that are asked for now.
    """

    def __init__(self, *, kv_block_tokens: int, latency: Callable[[str], Latency]) -> None:
        self.kv_blocks = 0
        """Reserved: a request holds what its whole length needs from the start."""
        self.num_queued_tokens = 0
        """Prompt tokens that the verifier has not been told of."""
        self._requests: dict[int, LaneRequest] = {}
        self._by_phase: dict[Phase, dict[int, LaneRequest]] = {phase: {} for phase in Phase}
        self._ready = self._by_phase[Phase.READY]
        self._with_block: set[int] = set()
        self._waves: dict[tuple[str, float], Wave] = {}
        self._wave_of: dict[int, Wave] = {}
        self._kv_block_tokens = max(kv_block_tokens, 1)
        self._latency = latency

    @property
    def requests(self) -> Mapping[int, LaneRequest]:
        """All of them, oldest first."""
        return self._requests

    @property
    def num_ready(self) -> int:
        """Requests that may go into the next step."""
        return len(self._ready)

    @property
    def num_awaiting(self) -> int:
        """Requests whose blocks are under way."""
        return len(self._wave_of)

    @property
    def num_ready_blocks(self) -> int:
        """Ready requests that have a block in hand."""
        return len(self._with_block)

    @property
    def waves(self) -> Iterable[Wave]:
        """Blocks under way, in the order in which they were asked for."""
        return self._waves.values()

    def within(self, phase: Phase) -> Mapping[int, LaneRequest]:
        """The requests of one phase, in the order in which they came into it."""
        return self._by_phase[phase]

    def kv_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of at most so many positions reserves."""
        return -(-num_tokens // self._kv_block_tokens)

    def add(self, request: LaneRequest, now: float) -> None:
        """Take a request in, as queued."""
        assert request.rid not in self._requests, f"request {request.rid} is here already"
        self._requests[request.rid] = request
        self._by_phase[Phase.QUEUED][request.rid] = request
        self.kv_blocks += self.kv_blocks_for(request.max_len)
        self.num_queued_tokens += len(request.ids)
        request.phase, request.since = Phase.QUEUED, now
        request.on_enter = self._enter

    def remove(self, rid: int) -> LaneRequest | None:
        """Forget a request; None if it is unknown."""
        request = self._requests.pop(rid, None)
        if request is not None:
            self._leave(request)
            request.on_enter = None
            self.kv_blocks -= self.kv_blocks_for(request.max_len)
        return request

    def first_due(self) -> float:
        """When the first of the awaited blocks is given up; inf if there are none."""
        return min((wave.due for wave in self._waves.values()), default=math.inf)

    def _enter(self, request: LaneRequest, phase: Phase, now: float) -> None:
        self._leave(request)
        self._by_phase[phase][request.rid] = request
        if phase is _READY:
            if request.block is not None:
                self._with_block.add(request.rid)
        elif phase is _AWAITING:
            self._await(request, now)

    def _leave(self, request: LaneRequest) -> None:
        rid, phase = request.rid, request.phase
        del self._by_phase[phase][rid]
        if phase is _READY:
            self._with_block.discard(rid)
        elif phase is _AWAITING:
            wave = self._wave_of.pop(rid)
            wave.num_rows -= 1
            if wave.num_rows == 0:
                del self._waves[wave.key]
        elif phase is _QUEUED:
            self.num_queued_tokens -= len(request.ids)

    def _await(self, request: LaneRequest, now: float) -> None:
        assert request.drafter is not None, "awaiting a block of nobody"
        drafter_id = request.drafter.drafter_id
        key = drafter_id, now
        wave = self._waves.get(key)
        if wave is None:
            latency = self._latency(drafter_id)
            wave = self._waves[key] = Wave(
                key=key,
                expected=now + latency.mean_s,
                deviation_s=latency.deviation_s,
                due=request.due,
            )
        # Asked for together, given up together. A wave whose deadline were the earliest of several
        # would keep it when that row is gone, and the lane would go for nobody's sake.
        request.due = wave.due
        wave.num_rows += 1
        self._wave_of[request.rid] = wave

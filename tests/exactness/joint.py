"""The joint law of several requests over several steps, whatever schedules them."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cluster.config import SchedulingConfig
from drafter_service.sampling import Block
from router.counters import LaneCounters
from router.draft_lengths import DraftLengths
from router.lane_request import LaneRequest
from router.recalibration import Recalibrator
from router.step_load import StepLoad
from router.throughput import ThroughputProfile
from tests.exactness.players import Ids, Player

Texts = tuple[Ids, ...]
TEXT = 4
"""Tokens of each text that are compared."""


class Scheduler(Protocol):
    """Chooses lengths step by step; `fork` where outcomes part."""

    def choose(
        self, players: Sequence[Player], texts: Sequence[Ids], blocks: Sequence[Block], step: int
    ) -> list[int]: ...

    def fork(self) -> Scheduler: ...


class Production:
    """`DraftLengths` as a lane has it, over a table of step times."""

    def __init__(
        self, policy: str, step_s: Sequence[float], *, min_gain: float = 0.02, live: bool = False
    ) -> None:
        tokens = np.arange(1, len(step_s) + 1, dtype=np.int32)
        profile = ThroughputProfile(tokens, np.array(step_s, np.float32))
        profile.live = live
        self.counters = LaneCounters()
        self.lengths = DraftLengths(
            recalibrator=Recalibrator(),
            profile=profile,
            counters=self.counters,
            explore_fraction=0.0,
            scheduling=SchedulingConfig(policy=policy, min_gain=min_gain),
        )

    def choose(
        self, players: Sequence[Player], texts: Sequence[Ids], blocks: Sequence[Block], step: int
    ) -> list[int]:
        rows = self.rows(players, texts, blocks, step)
        load = StepLoad(num_rows=len(rows), num_tokens=len(rows))
        return self.lengths.choose(rows, load=load, room=99)

    def rows(
        self, players: Sequence[Player], texts: Sequence[Ids], blocks: Sequence[Block], step: int
    ) -> list[LaneRequest]:
        """The requests as their lane has them."""
        return [
            player.request(ids, block, step)
            for player, ids, block in zip(players, texts, blocks, strict=True)
        ]

    def fork(self) -> Production:
        other = copy.copy(self)
        other.lengths = copy.copy(self.lengths)
        other.lengths._policy = copy.deepcopy(self.lengths._policy)
        return other


@dataclass
class Node:
    """All outcomes that a scheduler cannot tell apart."""

    scheduler: Scheduler
    lengths: list[int]
    """Its latest choice."""
    law: dict[Texts, float]
    """Ids of every player, prompt included, with their probabilities."""


class Joint:
    """All outcomes of the players over these steps.

    Args:
        players: all of them.
        steps: who takes part in each, as indices into ``players``.
    """

    def __init__(self, players: Sequence[Player], steps: Sequence[Sequence[int]]) -> None:
        self.players = players
        self.steps = steps
        self.seen: list[set[tuple[int, ...]]] = [set() for _ in steps]
        """Schedules of each step over all outcomes."""

    def law(self, scheduler: Scheduler) -> dict[Texts, float]:
        """Joint law of all texts when this schedules them."""
        ended: dict[Texts, float] = {}
        start = tuple((player.first,) for player in self.players)
        for worlds in itertools.product(*(player.worlds() for player in self.players)):
            nodes: dict[Any, Node] = {(): Node(scheduler, [], {start: 1.0})}
            for n in range(len(self.steps)):
                nodes = self._step(n, [world for world, _ in worlds], nodes)
            weight = math.prod(share for _, share in worlds)
            for node in nodes.values():
                for texts, share in node.law.items():
                    ended[texts] = ended.get(texts, 0.0) + weight * share
        return self._completed(ended)

    def target(self) -> dict[Texts, float]:
        """What it must be: every request by itself, decoded plainly."""
        return self._completed({tuple((player.first,) for player in self.players): 1.0})

    def _step(self, n: int, worlds: list[Any], nodes: dict[Any, Node]) -> dict[Any, Node]:
        """Draft, schedule, judge: all outcomes of one step."""
        after: dict[Any, Node] = {}
        members = self.steps[n]
        rows = [self.players[r] for r in members]
        for path, node in nodes.items():
            for texts, weight in node.law.items():
                mine = [texts[r] for r in members]
                drafts = [self.players[r].drafts(worlds[r], texts[r]) for r in members]
                for draw in itertools.product(*drafts):
                    blocks = [block for block, _ in draw]
                    # What a scheduler can tell apart: the blocks, and what a weight depends on.
                    counts = [len(texts[r]) * bool(self.players[r].target_rate) for r in members]
                    key = (path, tuple(map(id, blocks)), tuple(counts))
                    if key not in after:
                        scheduler = node.scheduler.fork()
                        lengths = scheduler.choose(rows, mine, blocks, n)
                        self.seen[n].add(tuple(lengths))
                        after[key] = Node(scheduler, lengths, {})
                    drawn = weight * math.prod(share for _, share in draw)
                    self._judge(members, worlds, texts, blocks, drawn, after[key])
        return after

    def _judge(
        self,
        members: Sequence[int],
        worlds: list[Any],
        texts: Texts,
        blocks: Sequence[Block],
        weight: float,
        node: Node,
    ) -> None:
        """Add to the node's law what the verdicts over the chosen lengths may be."""
        judged = [
            self.players[r].verdicts(worlds[r], texts[r], block, length)
            for r, block, length in zip(members, blocks, node.lengths, strict=True)
        ]
        for verdict in itertools.product(*judged):
            grown = list(texts)
            for r, (ids, _) in zip(members, verdict, strict=True):
                grown[r] = texts[r] + ids
            key = tuple(grown)
            share = weight * math.prod(part for _, part in verdict)
            node.law[key] = node.law.get(key, 0.0) + share

    def _completed(self, law: dict[Texts, float]) -> dict[Texts, float]:
        """Texts continued by the target itself, or cut, to `TEXT` tokens."""
        full: dict[Texts, float] = {}
        rest = functools.cache(lambda r, ids: tuple(self.players[r].law(ids, TEXT).items()))
        for texts, weight in law.items():
            for ends in itertools.product(*(rest(r, ids) for r, ids in enumerate(texts))):
                key = tuple(text for text, _ in ends)
                share = weight * math.prod(part for _, part in ends)
                full[key] = full.get(key, 0.0) + share
        return full

"""Requests of every kind, enumerated round by round behind the production functions.

A player is one request. What chance decides about it comes in three parts, each with its
probability: its *world* (coupled noise, the same in every round), the *block* that is drafted in a
round, and the *verdict* over as much of it as is verified. Players share nothing, so the joint law
of several is the product of their parts, once a schedule is given.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.noise import Stream
from cluster.sparse import SparseQ
from drafter_service.sampling import Block
from router.blocks import DraftBlock
from router.lane_request import LaneRequest
from tests.exactness.cells import intervals, partial_sums, product, race_cells
from tests.exactness.test_coupled import Stripped
from tests.exactness.test_rejection import draft_all, markov_pair, verify_cells
from tests.exactness.tiny import Injected, Pair, sampling

PAIR = markov_pair()
GAMMA = PAIR.gamma
Ids = tuple[int, ...]
Weighed = list[tuple[Any, float]]
NUM_NOISE = 2
"""Positions whose coupled noise is enumerated: as many tokens of a coupled text are compared."""
_FAR = 12


@dataclass(frozen=True)
class Player:
    """A request of one kind: ``rejection``, ``coupled``, ``greedy`` or ``one-hot``."""

    rid: int
    kind: str
    first: int = 0
    target_rate: float = 0.0
    tier: str = ""

    @property
    def sampling(self) -> Any:
        mode = "coupled" if self.kind == "coupled" else "rejection"
        return sampling(mode=mode, temperature=0.0 if self.kind == "greedy" else 1.0)

    def worlds(self) -> Weighed:
        if self.kind != "coupled":
            return [(None, 1.0)]
        return [(n, float(weight)) for n, weight in enumerate(_noises(self.first)[1])]

    def drafts(self, world: Any, ids: Ids) -> Weighed:
        """Blocks of one row that may be drafted behind ``ids``."""
        if self.kind == "rejection":
            return _sampled(ids[-1])
        if self.kind == "coupled":
            return [(_coupled_block(world, ids), 1.0)]
        return [(_fixed_block(ids[-1]), 1.0)]

    def verdicts(self, world: Any, ids: Ids, block: Block, length: int) -> Weighed:
        """What may be emitted when so much of the block is verified."""
        if self.kind == "coupled":
            return [(_coupled_verdict(world, ids, _key(block), length), 1.0)]
        return list(_verdicts(self.kind, ids[-1], _key(block), length).items())

    def request(self, ids: Ids, block: Block, step: int) -> LaneRequest:
        """As its lane has it in a step; every step takes a second."""
        request = LaneRequest(
            rid=self.rid,
            ids=list(ids),
            num_prompt=1,
            max_new_tokens=100,
            stop_ids=(),
            sampling=self.sampling,
            draft=True,
            target_rate=self.target_rate,
            tier=self.tier,
        )
        if len(ids) > 1:
            request.progress.note(1, 0.0)
            request.progress.note(len(ids) - 1, float(step))
        q = SparseQ(ids=block.q_ids[0], probs=block.q_probs[0]) if block.has_q[0] else None
        request.block = DraftBlock(
            rid=self.rid,
            epoch=0,
            anchor=request.anchor,
            digest=0,
            ids=tuple(block.ids[0].tolist()),
            confidence=block.confidence[0].astype(np.float64),
            q=q,
        )
        return request

    def law(self, ids: Ids, length: int) -> dict[Ids, float]:
        """The target's own law of the text, given its start; ``length`` tokens of it count."""
        length = min(length, NUM_NOISE) if self.kind == "coupled" else length
        text = ids[1:]
        if self.kind == "greedy":
            while len(text) < length:
                text = (*text, int(PAIR.p[(*ids[:1], *text)[-1]].argmax()))
            return {text[:length]: 1.0}
        if len(text) >= length:
            return {text[:length]: 1.0}
        rest = PAIR.sequence_law(ids[-1], length - len(text))
        return {text + more: weight for more, weight in rest.items()}


# --- the production functions, one row at a time -------------------------------------------------


@functools.cache
def _sampled(anchor: int) -> Weighed:
    return draft_all(PAIR, 1, anchor)


@functools.cache
def _fixed_block(anchor: int) -> Block:
    """Drafted by argmax, with the same confidences; no q."""
    block = PAIR.draft([(anchor,)], [sampling(temperature=0.0)], Injected({}))
    assert not block.has_q[0]
    return block


@functools.cache
def _noises(first: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise cells: position 1 meets the laws behind the first id only, position 2 all of them."""
    near = race_cells(np.stack([PAIR.p[first], PAIR.q[first]]), ends=False)
    points, weights = product([near, race_cells(np.concatenate([PAIR.p, PAIR.q]), ends=False)])
    return points, weights


@functools.cache
def _noise(world: int, first: int) -> Injected:
    """Beyond the enumerated positions any numbers do: they may move schedules, not what counts."""
    points, _ = _noises(first)
    table = np.random.default_rng(world).random((1, _FAR, PAIR.vocab_size))
    table[0, 1 : NUM_NOISE + 1] = points[world]
    return Injected({Stream.GUMBEL: table, Stream.REST: np.full((1, _FAR, 1), 0.5)})


@functools.cache
def _coupled_block(world: int, ids: Ids) -> Block:
    return PAIR.draft([ids], [sampling()], Stripped(_noise(world, ids[0])))


@functools.cache
def _coupled_verdict(world: int, ids: Ids, key: _Key, length: int) -> Ids:
    verdict = PAIR.verify([ids], [sampling()], key.block, np.array([length]), _noise(world, ids[0]))
    return verdict[0].token_ids


@dataclass(frozen=True, eq=False)
class _Key:
    """A block that can be looked up: blocks are made once each, so identity tells them apart."""

    block: Block


_KEYS: dict[int, _Key] = {}


def _key(block: Block) -> _Key:
    return _KEYS.setdefault(id(block), _Key(block))


@functools.cache
def _verdicts(kind: str, anchor: int, key: _Key, length: int) -> dict[Ids, float]:
    return verdict_law(PAIR, kind, anchor, key.block, length)


def verdict_law(pair: Pair, kind: str, anchor: int, block: Block, length: int) -> dict[Ids, float]:
    """Law of what is emitted, over all numbers that acceptance may draw."""
    drafts = block.ids[0, :length].tolist()
    if kind == "greedy":
        points, shares = np.full((1, length + 1), 0.5), np.ones(1)
    elif kind == "one-hot":
        points, shares = product(list(_one_hot_cells(pair, anchor, drafts)))
    else:
        points, shares = verify_cells(pair, anchor, drafts, ends=True)
    num = len(shares)
    accepts, finals = np.zeros((num, 1, pair.gamma + 2)), np.zeros((num, 1, pair.gamma + 2))
    accepts[:, 0, 1 : length + 1] = points[:, :-1]
    finals[:] = points[:, -1, None, None]
    temperature = 0.0 if kind == "greedy" else 1.0
    verdicts = pair.verify(
        [(anchor,)] * num,
        [sampling(seed=n, mode="rejection", temperature=temperature) for n in range(num)],
        Block(**{name: np.repeat(part, num, axis=0) for name, part in vars(block).items()}),
        np.full(num, length),
        Injected({Stream.ACCEPT: accepts, Stream.RESIDUAL: finals, Stream.BONUS: finals}),
    )
    law: dict[Ids, float] = {}
    for verdict, share in zip(verdicts, shares, strict=True):
        law[verdict.token_ids] = law.get(verdict.token_ids, 0.0) + float(share)
    return law


def _one_hot_cells(
    pair: Pair, anchor: int, drafts: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Numbers that judge drafts without q: accepted by p, else drawn from the rest of p."""
    previous = [anchor, *drafts]
    finals = [t for x in previous for t in partial_sums(pair.p[x])]
    for x, y in zip(previous, drafts, strict=False):
        yield intervals([pair.p[x, y]], ends=True)
        rest = pair.p[x].copy()
        rest[y] = 0
        finals += partial_sums(rest / rest.sum())
    yield intervals(finals, ends=True)

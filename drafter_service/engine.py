"""The DSpark drafter: a batch of commits in, a batch of blocks out (paper sections 2.2 and 3.1).

One batch, in reading order (`DraftEngine.run`): advance sessions, compute keys and values of all
newly committed rows in one pass, then the backbone over all wanted blocks in one pass, then the
sequential and confidence heads (`drafter_service.sampling`).

Shape legend: S sessions, N rows of all sessions, D hidden size, G gamma.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.linear import pack_linears
from cluster.wire import Commit, Open, Release
from drafter_service.attention import BlockAttention
from drafter_service.backbone import DSparkModel
from drafter_service.draft_kv import DraftKV
from drafter_service.drafter import Drafted, DrafterLimits, DraftOutcome, Work
from drafter_service.sampling import Block, sample_blocks
from drafter_service.sessions import DraftSession, Key, SessionCounters, SessionTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """Projected rows that one commit added to a session."""

    session: DraftSession
    first_position: int
    features: Tensor
    """[N, D]."""


@dataclass(slots=True, kw_only=True)
class _Staged:
    """What a batch has to do for one session."""

    session: DraftSession
    rows: list[NewRows] = field(default_factory=list)
    want_draft: bool = False


class DraftEngine:
    """A `drafter_service.drafter.Drafter` around one `DSparkModel`.

    Args:
        model: taken over: its linear layers are repacked for the device where that helps, so it
            can neither be trained nor saved afterwards.
        max_sessions, max_session_tokens, idle_session_s, busy_s: see `SessionTable`.
        q_top_k: width of the sparse q in rejection mode.
    """

    def __init__(
        self,
        model: DSparkModel,
        *,
        max_sessions: int,
        max_session_tokens: int,
        idle_session_s: float,
        q_top_k: int,
        busy_s: float = 1.0,
    ) -> None:
        self.model = model
        self.spec = model.spec
        self._device = model.embed_tokens.weight.device
        self._dtype = model.embed_tokens.weight.dtype
        self._q_top_k = q_top_k
        self.sessions = SessionTable(
            max_sessions=max_sessions,
            max_tokens=max_session_tokens,
            max_positions=self.spec.max_position_embeddings - self.spec.block_width,
            idle_s=idle_session_s,
            busy_s=busy_s,
        )
        self.kv = DraftKV(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            device=self._device,
            dtype=self._dtype,
        )
        windows = self.spec.sliding_windows
        self._window = None if None in windows else max(w for w in windows if w is not None)
        pack_linears(model, keep=frozenset({"fc"}))

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            gamma=self.spec.gamma,
            vocab_size=self.spec.vocab_size,
            feature_size=self.spec.hidden_size,
        )

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def counters(self) -> SessionCounters:
        return self.sessions.counters

    @torch.inference_mode()
    def run(self, work: Sequence[Work], now_s: float) -> DraftOutcome:
        """See `drafter_service.drafter.Drafter.run`."""
        staged: dict[Key, _Staged] = {}
        drafted: tuple[Drafted, ...] = ()
        block: Block | None = None
        try:
            self._advance(work, now_s, staged)
            alive = [one for one in staged.values() if self._is_live(one.session)]
            self.extend([rows for one in alive for rows in one.rows])
            wanted = [one.session for one in alive if one.want_draft]
            if wanted:
                hidden_SGD = self.block_hidden(wanted)
                sound = self._lose_broken(wanted, hidden_SGD)
                wanted = [wanted[i] for i in sound]
                block = self._sample(wanted, hidden_SGD[sound]) if wanted else None
                drafted = tuple(map(_describe, wanted))
        except Exception:  # an allocation that failed, say: other sessions and the replica live on
            logger.exception("a draft batch of %d sessions failed", len(staged))
            drafted, block = (), None
            for one in staged.values():
                self.sessions.counters.failed += 1
                self.sessions.lose(one.session, "error while drafting")
        return DraftOutcome(
            drafted=drafted,
            block=block,
            num_draft=np.full(len(drafted), self.spec.gamma, np.int32),
            lost=self.sessions.take_lost(),
        )

    @torch.inference_mode()
    def extend(self, new_rows: Sequence[NewRows]) -> None:
        """Compute and keep keys and values of newly committed rows, all sessions in one pass."""
        new_rows = [rows for rows in new_rows if len(rows.features)]
        if not new_rows:
            return
        allocator = self.sessions.allocator
        self.kv.ensure(allocator.high_water, allocator.num_blocks + 1)
        positions_N = np.concatenate(
            [np.arange(r.first_position, r.first_position + len(r.features)) for r in new_rows]
        )
        slots_N = np.concatenate(
            [
                r.session.slots(r.first_position, r.first_position + len(r.features))
                for r in new_rows
            ]
        )
        context_ND = torch.cat([r.features.to(self._device, self._dtype) for r in new_rows])
        per_layer = self.model.context_key_values(
            context_ND, torch.from_numpy(positions_N).to(self._device)
        )
        self.kv.write(torch.from_numpy(slots_N).to(self._device), per_layer)
        if self._window is not None:
            for session in {id(r.session): r.session for r in new_rows}.values():
                self.sessions.trim(session, session.covered - self._window)

    @torch.inference_mode()
    def draft(self, sessions: Sequence[DraftSession]) -> Block:
        """One block for each session, in their order. Leaves the draft KV as it was."""
        return self._sample(sessions, self.block_hidden(sessions))

    @torch.inference_mode()
    def block_hidden(self, sessions: Sequence[DraftSession]) -> Tensor:
        """Backbone output [S, G, D] at the predicting slots of each session's block."""
        order = sorted(range(len(sessions)), key=lambda i: sessions[i].covered)
        ranked = [sessions[i] for i in order]
        width = self.spec.block_width
        ids = np.full((len(ranked), width), self.spec.mask_token_id)
        ids[:, 0] = [s.last_id for s in ranked]
        positions = np.array([[s.covered] for s in ranked]) + np.arange(width)
        hidden_ND = self.model.forward_block(
            torch.from_numpy(ids.reshape(-1)).to(self._device),
            torch.from_numpy(positions.reshape(-1)).to(self._device),
            BlockAttention(self.spec, self.kv, ranked),
        )
        hidden_SGD = hidden_ND.view(len(ranked), width, -1)[:, width - self.spec.gamma :]
        back = torch.from_numpy(np.argsort(order)).to(self._device)
        return hidden_SGD.index_select(0, back)

    def _sample(self, sessions: Sequence[DraftSession], hidden_SGD: Tensor) -> Block:
        return sample_blocks(
            self.model,
            hidden_SGD,
            [s.last_id for s in sessions],
            [s.covered for s in sessions],
            [s.sampling for s in sessions],
            q_top_k=self._q_top_k,
        )

    def _lose_broken(self, sessions: Sequence[DraftSession], hidden_SGD: Tensor) -> list[int]:
        """Lose sessions whose features made no finite hidden states; indices of the others."""
        sound = hidden_SGD.isfinite().flatten(1).all(dim=1).tolist()
        for session, is_sound in zip(sessions, sound, strict=True):
            if not is_sound:
                self.sessions.counters.failed += 1
                self.sessions.lose(session, "features gave hidden states that are not finite")
        return [index for index, is_sound in enumerate(sound) if is_sound]

    def _advance(self, work: Sequence[Work], now_s: float, staged: dict[Key, _Staged]) -> None:
        """Bookkeeping of a batch, in order; rows to compute end up in ``staged``."""
        for item in work:
            frame = item.frame
            if isinstance(frame, Open):
                self.sessions.open(frame, item.owner, now_s)
            elif isinstance(frame, Commit):
                self._stage(frame, item.owner, now_s, staged)
            elif isinstance(frame, Release):
                self.sessions.release(frame.lane_id, frame.rid.tolist(), item.owner)
            else:
                self.sessions.hang_up(item.owner)
        self.sessions.expire(now_s)

    def _stage(self, frame: Commit, owner: int, now_s: float, staged: dict[Key, _Staged]) -> None:
        """Advance the sessions of one commit and note their rows."""
        features_TD = to_tensor(frame.features)
        stops = np.cumsum(frame.num_rows)
        for index, stop in enumerate(stops.tolist()):
            start = stop - int(frame.num_rows[index])
            key = (frame.lane_id, int(frame.rid[index]))
            first = int(frame.first_position[index])
            session = self.sessions.commit(
                key=key,
                epoch=int(frame.epoch[index]),
                owner=owner,
                first_position=first,
                ids=frame.ids[start:stop].tolist(),
                digest_after=int(frame.digest[index]),
                now_s=now_s,
            )
            if session is None:
                continue
            one = staged.get(key)
            if one is None or one.session is not session:
                one = staged[key] = _Staged(session=session)
            one.rows.append(
                NewRows(session=session, first_position=first, features=features_TD[start:stop])
            )
            one.want_draft = bool(frame.want_draft[index])

    def _is_live(self, session: DraftSession) -> bool:
        return self.sessions.get(session.lane_id, session.rid) is session


def to_tensor(features: NDArray[Any]) -> Tensor:
    """Rows as they crossed the wire: ``f4``, ``f2``, or ``u2`` for the bits of bfloat16."""
    rows = torch.from_numpy(features.copy())
    return rows.view(torch.bfloat16) if features.dtype == np.uint16 else rows


def _describe(session: DraftSession) -> Drafted:
    return Drafted(
        lane_id=session.lane_id,
        rid=session.rid,
        epoch=session.epoch,
        anchor=session.covered,
        digest=session.digest,
    )

"""The DSpark drafter: a batch of commits in, a batch of blocks out (paper sections 2.2 and 3.1).

One batch, in reading order (`DraftEngine.run`): advance sessions, compute keys and values of all
rows of the sessions that want a block in one pass (others' rows wait, `PendingRows`), then the
backbone over those blocks in one pass, then the sequential and confidence heads
(`drafter_service.sampling`).

Shape legend: S sessions, N rows of all sessions, D hidden size, G gamma.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.linear import pack_linears
from drafter_service.attention import BlockAttention
from drafter_service.backbone import DSparkModel
from drafter_service.calibration.calibration import Calibration
from drafter_service.draft_kv import DraftKV
from drafter_service.drafter import DrafterLimits, DraftOutcome, Work
from drafter_service.pending_rows import MAX_PENDING_BYTES, NewRows, PendingRows, join
from drafter_service.sampling import Block, sample_blocks
from drafter_service.sessions import DraftSession, SessionCounters, SessionTable
from drafter_service.staging import Computed, Staged, run_batch


class DraftEngine:
    """A `drafter_service.drafter.Drafter` around one `DSparkModel`.

    Args:
        model: taken over: its linear layers are repacked for the device where that helps, so it
            can neither be trained nor saved afterwards.
        max_sessions, max_session_tokens, idle_session_s, busy_s: see `SessionTable`.
        q_top_k: width of the sparse q in rejection mode.
        calibration: of the model's confidence; None reports it raw.
        max_pending_bytes: of rows that wait for a draft to be asked for, see `PendingRows`.

    Raises:
        CheckpointError: a calibration of blocks of another length.
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
        calibration: Calibration | None = None,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        if calibration is not None:
            calibration.check(model.spec.gamma)
        self.model = model
        self.spec = model.spec
        self._device = model.embed_tokens.weight.device
        self._dtype = model.embed_tokens.weight.dtype
        self._q_top_k = q_top_k
        self._calibration = calibration
        self.sessions = SessionTable(
            max_sessions=max_sessions,
            max_tokens=max_session_tokens,
            max_positions=self.spec.max_position_embeddings - self.spec.block_width,
            idle_s=idle_session_s,
            busy_s=busy_s,
        )
        self.pending = PendingRows(max_pending_bytes)
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
        return run_batch(
            self.sessions, self.pending, work, now_s, self._compute, window=self._window
        )

    def _compute(self, staged: Sequence[Staged]) -> Computed:
        """Take in new rows, then draft for whoever asked."""
        self.extend([rows for one in staged for rows in one.rows])
        wanted = [one.session for one in staged if one.want_draft]
        block: Block | None = None
        if wanted:
            hidden_SGD = self.block_hidden(wanted)
            sound = self._lose_broken(wanted, hidden_SGD)
            wanted = [wanted[i] for i in sound]
            block = self._sample(wanted, hidden_SGD[sound]) if wanted else None
        return Computed(
            sessions=wanted,
            block=block,
            num_draft=np.full(len(wanted), self.spec.gamma, np.int32),
        )

    @torch.inference_mode()
    def extend(self, new_rows: Sequence[NewRows]) -> None:
        """Compute and keep keys and values of newly committed rows, all sessions in one pass."""
        new_rows = join([rows for rows in new_rows if len(rows.features)])
        if not new_rows:
            return
        allocator = self.sessions.allocator
        self.kv.ensure(allocator.high_water, allocator.num_blocks + 1)
        positions_N = np.concatenate([np.arange(r.first_position, r.stop) for r in new_rows])
        slots_N = np.concatenate([r.session.slots(r.first_position, r.stop) for r in new_rows])
        context_ND = torch.cat([r.features.to(self._device, self._dtype) for r in new_rows])
        per_layer = self.model.context_key_values(
            context_ND, torch.from_numpy(positions_N).to(self._device)
        )
        self.kv.write(torch.from_numpy(slots_N).to(self._device), per_layer)
        if self._window is not None:
            for rows in new_rows:
                self.sessions.trim(rows.session, rows.session.covered - self._window)

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
            calibration=self._calibration,
        )

    def _lose_broken(self, sessions: Sequence[DraftSession], hidden_SGD: Tensor) -> list[int]:
        """Lose sessions whose features made no finite hidden states; indices of the others."""
        sound = hidden_SGD.isfinite().flatten(1).all(dim=1).tolist()
        for session, is_sound in zip(sessions, sound, strict=True):
            if not is_sound:
                self.sessions.counters.failed += 1
                self.sessions.lose(session, "features gave hidden states that are not finite")
        return [index for index, is_sound in enumerate(sound) if is_sound]

"""The autoregressive drafter: a batch of commits in, a batch of blocks out, one step per token.

Shape legend: S sessions, N rows of all sessions, D hidden size, G gamma.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.linear import pack_linears
from drafter_service.autoregressive.attention import RolloutAttention
from drafter_service.autoregressive.model import AutoregressiveModel
from drafter_service.calibration.calibration import Calibration
from drafter_service.draft_kv import DraftKV
from drafter_service.drafter import DrafterLimits, DraftOutcome, Work
from drafter_service.pending_rows import MAX_PENDING_BYTES, NewRows, PendingRows, join
from drafter_service.sampling import Block, Draw
from drafter_service.sessions import DraftSession, Key, SessionCounters, SessionTable
from drafter_service.staging import Computed, Staged, is_live, run_batch


class AutoregressiveEngine:
    """A `drafter_service.drafter.Drafter` around one `AutoregressiveModel`.

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
        model: AutoregressiveModel,
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
        self._calibration = calibration
        self.model = model
        self.spec = model.spec
        self._device = model.embed_tokens.weight.device
        self._dtype = model.embed_tokens.weight.dtype
        self._q_top_k = q_top_k
        self.sessions = SessionTable(
            max_sessions=max_sessions,
            max_tokens=max_session_tokens,
            max_positions=self.spec.max_position_embeddings - self.spec.gamma,
            idle_s=idle_session_s,
            busy_s=busy_s,
        )
        self.pending = PendingRows(max_pending_bytes)
        self.kv = DraftKV(
            num_layers=1,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            device=self._device,
            dtype=self._dtype,
        )
        self._last: dict[Key, tuple[DraftSession, Tensor]] = {}
        """Projected feature [D] of each session's last row: where its next block starts."""
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
        return run_batch(self.sessions, self.pending, work, now_s, self._compute)

    def _compute(self, staged: Sequence[Staged]) -> Computed:
        """Take in new rows, then draft for whoever asked and has any."""
        self._last = {
            key: (session, feature_D)
            for key, (session, feature_D) in self._last.items()
            if is_live(self.sessions, session)
        }
        self._extend([rows for one in staged for rows in one.rows])
        wanted = [
            one.session
            for one in staged
            if one.want_draft and one.session.covered and is_live(self.sessions, one.session)
        ]
        wanted.sort(key=lambda session: session.covered)
        block: Block | None = None
        while wanted and block is None:
            block, sound = self._draft(wanted)
            if not all(sound):  # rare: what the others get is drafted again without the broken ones
                self._lose_broken(wanted, sound)
                wanted = list(itertools.compress(wanted, sound))
                block = None
        return Computed(
            sessions=wanted,
            block=block,
            num_draft=np.full(len(wanted), self.spec.gamma, np.int32),
        )

    def _lose_broken(self, sessions: Sequence[DraftSession], sound: Sequence[bool]) -> None:
        """A confidence that is not finite would cost the whole frame, and so all other sessions."""
        for session, is_sound in zip(sessions, sound, strict=True):
            if not is_sound:
                self.sessions.counters.failed += 1
                self.sessions.lose(session, "features gave hidden states that are not finite")

    def _extend(self, new_rows: Sequence[NewRows]) -> None:
        """Keep keys and values of newly committed rows, all sessions in one pass.

        They come from the target's own features: nothing that was drafted is ever kept.
        """
        sound = []
        for rows in join(new_rows):
            features_ND = rows.features.to(self._device, self._dtype)
            if not bool(features_ND.isfinite().all()):  # too large for our dtype
                self.sessions.counters.failed += 1
                self.sessions.lose(rows.session, "features are not finite")
            elif len(features_ND) and is_live(self.sessions, rows.session):
                sound.append((rows, features_ND))
                self._last[rows.session.key] = (rows.session, features_ND[-1].clone())
        if not sound:
            return
        allocator = self.sessions.allocator
        self.kv.ensure(allocator.high_water, allocator.num_blocks + 1)
        spans = [
            (rows.session, rows.first_position, rows.first_position + len(features_ND))
            for rows, features_ND in sound
        ]
        slots_N = np.concatenate([session.slots(start, stop) for session, start, stop in spans])
        positions_N = np.concatenate([np.arange(start + 1, stop + 1) for _, start, stop in spans])
        ids_N = torch.tensor([token for rows, _ in sound for token in rows.ids])
        keys_values = self.model.key_values(
            ids_N.to(self._device),
            torch.cat([features_ND for _, features_ND in sound]),
            torch.from_numpy(positions_N).to(self._device),
        )
        self.kv.write(torch.from_numpy(slots_N).to(self._device), [keys_values])

    def _draft(self, sessions: Sequence[DraftSession]) -> tuple[Block, list[bool]]:
        """Roll out one block per session, in order of rising context. Leaves the draft KV alone.

        Returns:
            (block, whether each session's hidden states were finite all along).
        """
        model, spec = self.model, self.spec
        attend = RolloutAttention(spec, self.kv, sessions)
        draw = Draw(
            [s.covered for s in sessions],
            [s.sampling for s in sessions],
            gamma=spec.gamma,
            vocab_size=spec.draft_vocab_size,
            q_top_k=self._q_top_k,
            device=self._device,
        )
        ids_S = torch.tensor([s.last_id for s in sessions], device=self._device)
        positions_S = torch.tensor([s.covered for s in sessions], device=self._device)
        features_SD = torch.stack([self._last[s.key][1] for s in sessions])
        ids, confidences = [], []
        sound_S = torch.ones(len(sessions), dtype=torch.bool, device=self._device)
        for k in range(spec.gamma):
            hidden_SD, features_SD = model.step(ids_S, features_SD, positions_S + k, attend)
            sound_S &= hidden_SD.isfinite().all(dim=1)
            logits_SV = model.lm_head(hidden_SD)
            if model.confidence_head is not None:
                confidences.append(model.confidence_head(hidden_SD, None).float().sigmoid())
            else:
                confidences.append(draw.peak(logits_SV))
            ids_S = draw.step(k, logits_SV, model.d2t)
            ids.append(ids_S)
        return draw.block(ids, confidences, self._calibration), sound_S.tolist()

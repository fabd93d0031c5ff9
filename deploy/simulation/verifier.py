"""A simulated verifier: takes `Step` frames, one runs and one waits, and answers `StepResult`.

It does what `verifier_service.step_runner` does around the engine, over all rows at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from cluster.errors import StaleFrame, Unavailable
from cluster.wire import FINISH_NONE, Admission, Failure, Rebind, Step, StepResult
from deploy.simulation.acceptance import AcceptanceModel
from deploy.simulation.clock import Clock, Device, Link
from deploy.simulation.drafter import BlockTaker, Commits, SimDrafter, jitter
from deploy.simulation.prompts import PromptQueue
from deploy.simulation.specs import VerifierSpec
from deploy.simulation.table import I64, NOBODY, RequestTable, Rounds, emitted, keys_of
from router.step_load import StepLoad

KV_BLOCK_TOKENS: Final = 16
_EMPTY_S: Final = 1e-4
"""A step without tokens."""


class SimVerifier:
    """One replica under the lease of its lane.

    Args:
        num_outputs: length of every request's text, by its key.
        drafters: live ones by name; shared with the pools.
        link: to the router; ``to_drafters`` likewise.
    """

    def __init__(
        self,
        spec: VerifierSpec,
        *,
        model: AcceptanceModel,
        num_outputs: Mapping[int, int],
        drafters: Mapping[str, SimDrafter],
        clock: Clock,
        device: Device,
        link: Link,
        to_drafters: Link,
        rng: np.random.Generator,
    ) -> None:
        self.device = device
        self.slowness = 1.0
        self.busy_s = 0.0
        self.live = True
        self._spec = spec
        self._model = model
        self._num_outputs = num_outputs
        self._drafters = drafters
        self._clock = clock
        self._link = link
        self._to_drafters = to_drafters
        self._rng = rng
        # Requests of the lane, and those that it has ended but not yet released.
        self._table = RequestTable(4 * spec.max_requests, model.gamma)
        self._prompts = PromptQueue(self._table)
        self._sessions: list[tuple[SimDrafter, int] | None] = [None]
        """Drafter and its incarnation; `RequestTable.session` points here."""
        self._steps: deque[Step] = deque()
        self._running = False
        self._failures: list[Failure] = []
        self._lane: BlockTaker | None = None
        self._answer: Callable[[StepResult], None] = _nobody

    def serve(self, lane: BlockTaker, answer: Callable[[StepResult], None]) -> None:
        """Name who gets blocks and results."""
        self._lane, self._answer = lane, answer

    def take(self, step: Step) -> None:
        """A frame of the lane."""
        if not self.live:
            return
        assert not self._steps, "one step runs and one waits already"
        self._steps.append(step)
        if not self._running:
            self._begin()

    def die(self) -> None:
        """Lose everything."""
        self.live = False
        self._steps.clear()
        self.device.cancel(self._finish)

    # --- a step -------------------------------------------------------------------------------

    def _begin(self) -> None:
        step = self._steps.popleft()
        self._running = True
        for rid in step.releases.tolist():
            self._table.remove(rid)
        for rebind in step.rebinds:
            self._rebind(rebind)
        for admission in step.admissions:
            self._admit(admission)
        slot_R = np.array([self._table.slot_of.get(rid, NOBODY) for rid in step.rid.tolist()], int)
        stale_R = (self._table.anchor[slot_R] != step.anchor) | (
            (self._table.digest[slot_R] != step.digest)
            & (self._table.digest_before[slot_R] != step.digest)
        )
        self._failures = [
            Failure(rid=rid, code=StaleFrame.__name__, message="another prefix")
            for rid in step.rid[stale_R].tolist()
        ]
        num_draft_R = np.where(stale_R, 0, step.num_draft)
        drafts_T = step.draft_ids[np.repeat(~stale_R, step.num_draft)]
        ends_R = self._table.anchor[slot_R] + 1 + num_draft_R
        chunks = self._prompts.take(step.prefill_budget)
        good_R = ~stale_R
        ends_R = ends_R[good_R]
        load = StepLoad(
            num_rows=len(ends_R),
            num_tokens=len(ends_R) + int(num_draft_R.sum()) + chunks.num_tokens,
            num_prefill=chunks.num_tokens,
            sum_context=int(ends_R.sum()) + chunks.sum_context,
            num_pairs=int(((num_draft_R[good_R] + 1) * ends_R).sum()) + chunks.num_pairs,
        )
        self._table.want_draft[slot_R] = step.want_draft != 0
        slot_R = np.concatenate([slot_R[good_R], np.array(chunks.done, int)])
        num_draft_R = np.concatenate([num_draft_R[good_R], np.zeros(len(chunks.done), int)])
        work_s = self._spec.curve.step_s(load) if load.num_tokens else _EMPTY_S
        work_s *= self.slowness * jitter(self._rng, self._spec.jitter)
        began_s = self._clock.now
        self.device.run(work_s, self._finish, step, load, slot_R, num_draft_R, drafts_T, began_s)

    def _finish(
        self,
        step: Step,
        load: StepLoad,
        slot_R: I64,
        num_draft_R: I64,
        drafts_T: I64,
        began_s: float,
    ) -> None:
        self._running = False
        self.busy_s += self._clock.now - began_s
        rounds = self._table.rounds(slot_R, num_draft_R, drafts_T.astype(np.int32))
        unbound = self._commit(rounds)
        result = self._result(step, load, rounds, unbound, self._clock.now - began_s)
        for slot in rounds.slot_R[rounds.finish_R != FINISH_NONE].tolist():
            self._table.remove(int(self._table.rid[slot]))
        self._link.send(self._answer, result)
        if self._steps:
            self._begin()

    def _result(
        self, step: Step, load: StepLoad, rounds: Rounds, unbound: I64, step_s: float
    ) -> StepResult:
        ids_T = emitted(rounds)
        table, slot_R = self._table, rounds.slot_R
        return StepResult(
            lane_epoch=step.lane_epoch,
            step_id=step.step_id,
            rid=table.rid[slot_R],
            num_accepted=rounds.num_accepted_R.astype(np.int32),
            num_emitted=rounds.num_emitted_R.astype(np.int32),
            token_ids=ids_T,
            logprobs=np.zeros(len(ids_T), np.float32),
            anchor=table.anchor[slot_R].astype(np.int32),
            digest=table.digest[slot_R],
            finish=rounds.finish_R.astype(np.uint8),
            failures=tuple(self._failures),
            unbound=unbound,
            num_real_tokens=load.num_tokens,
            num_padded_tokens=self._spec.curve.padded(load.num_tokens),
            num_prefill_tokens=load.num_prefill,
            sum_context=load.sum_context,
            step_s=step_s,
            free_kv_blocks=self._spec.kv_tokens // KV_BLOCK_TOKENS,
            pending_prefill_tokens=self._prompts.num_tokens,
        )

    # --- requests -----------------------------------------------------------------------------

    def _admit(self, admission: Admission) -> None:
        key = admission.sampling.seed
        traits_G = self._model.traits(keys_of([key]))[0]
        num_output = self._num_outputs[key]
        slot = self._table.add(admission, num_output=num_output, traits_G=traits_G)
        self._table.session[slot] = self._session(admission.drafter_id)
        self._prompts.add(admission.rid)

    def _rebind(self, rebind: Rebind) -> None:
        slot = self._table.slot_of.get(rebind.rid, NOBODY)
        if slot != NOBODY:
            self._table.session[slot] = self._session(rebind.drafter_id)
            self._table.epoch[slot] = rebind.session_epoch
            self._table.behind[slot] = self._table.anchor[slot]
            self._table.want_draft[slot] = rebind.want_draft

    def _session(self, drafter_id: str) -> int:
        """Index of the sessions at this drafter as it is now."""
        drafter = self._drafters.get(drafter_id)
        if drafter is None:
            return 0
        peer = (drafter, drafter.incarnation)
        if peer not in self._sessions:
            self._sessions.append(peer)
        return self._sessions.index(peer)

    # --- drafts -------------------------------------------------------------------------------

    def _commit(self, rounds: Rounds) -> I64:
        """Ask the drafters for blocks; ids of requests whose drafter is not there any more."""
        table = self._table
        going_R = (rounds.finish_R == FINISH_NONE) & (table.session[rounds.slot_R] != 0)
        slot_S = rounds.slot_R[going_R]
        unbound = np.zeros(0, np.int64)
        for session in sorted(set(table.session[slot_S].tolist())):
            mine_S = slot_S[table.session[slot_S] == session]
            peer = self._sessions[session]
            assert peer is not None
            assert self._lane is not None
            drafter, incarnation = peer
            if not drafter.live or drafter.incarnation != incarnation:
                table.session[mine_S] = 0
                unbound = np.concatenate([unbound, table.rid[mine_S]])
                continue
            asked_S = mine_S[table.want_draft[mine_S]]
            if len(asked_S):
                commits = Commits(
                    lane=self._lane,
                    rid_S=table.rid[asked_S],
                    epoch_S=table.epoch[asked_S],
                    anchor_S=table.anchor[asked_S],
                    digest_S=table.digest[asked_S],
                    key_S=table.key[asked_S],
                    traits_SG=table.traits[asked_S],
                    num_rows=int(table.behind[asked_S].sum()),
                )
                table.behind[asked_S] = 0
                self._to_drafters.send(drafter.take, incarnation, commits)
        return unbound


def _nobody(result: StepResult) -> None:
    raise Unavailable("a verifier without a lane")

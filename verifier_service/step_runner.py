"""One step of a verifier replica: the engine's work, and what goes to the drafters around it.

The whole round on this side, in reading order: `StepRunner.run`. Sessions are opened and moved
before the engine runs (dialling overlaps with computing), commits are handed to the links after
it, and only then is the result given back to be sent, so that a router never learns of a token
before the drafters' queues have it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cluster import digest
from cluster.errors import DSparkError, FrameError, InvalidRequest
from cluster.wire import Admission, Failure, Rebind, Sampling, Step, StepResult
from verifier_service.draft_links import DraftLinks, Update
from verifier_service.engine import CommittedRows, Engine, StepOutcome
from verifier_service.feature_cache import Chunk, FeatureCache, features_to_wire
from verifier_service.step_frames import empty_result, failure, release_only

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class _Live:
    """What the replica remembers of a request that its engine holds."""

    first_id: int
    sampling: Sampling
    want_draft: bool
    prefill_done: bool = False


@dataclass(frozen=True, kw_only=True)
class _Computed:
    """What comes back from the engine thread."""

    outcome: StepOutcome
    chunks: tuple[Chunk | None, ...]
    """Per `StepOutcome.committed`, in wire form; None if the features are unfit."""
    failures: tuple[Failure, ...]
    """Admissions refused before the engine saw them, or everything a crash took along."""
    ended: frozenset[int]
    """Requests that the engine no longer holds because of those failures."""
    crashed: bool = False


class StepRunner:
    """Runs steps one at a time, the engine in a thread of its own.

    `run` and `reset` exclude each other, so no frame of a past lease can touch the state of the
    next one.

    Args:
        prepare: called in the engine's thread before anything else.
    """

    def __init__(
        self,
        engine: Engine,
        links: DraftLinks,
        cache: FeatureCache,
        *,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.links = links
        self.cache = cache
        self.free_kv_blocks = engine.limits.kv_blocks
        self.gauges: Mapping[str, float] = {}
        """Of the engine, behind its last step."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()
        self.num_crashes = 0
        """Steps that died in the engine, one after the other, up to now."""
        self._engine = engine
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=prepare
        )
        self._lock = asyncio.Lock()
        self._live: dict[int, _Live] = {}
        self._closed = False

    @property
    def num_live(self) -> int:
        """Requests in the engine."""
        return len(self._live)

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call something that touches the engine, in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    async def run(self, lane_id: str, step: Step) -> StepResult:
        """Run one step of the lane that holds the lease. Never raises for what a step holds."""
        async with self._lock:
            self._forget(step.releases.tolist())
            for rebind in step.rebinds:
                self._rebind(lane_id, rebind)
            step, refused = self._admit(lane_id, step)
            computed = await self.call(self._compute, step, self._prefilling(step))
            self.num_crashes = self.num_crashes + 1 if computed.crashed else 0
            self._commit(step, computed)
            self._forget(computed.ended)
            self.free_kv_blocks = computed.outcome.result.free_kv_blocks
            self.gauges = computed.outcome.gauges
            self._mark_idle()
            return self._result(computed, refused)

    async def reset(self) -> None:
        """Drop every request and session (the lease is gone), after the step that is running."""
        async with self._lock:
            self.links.release_all()
            self.cache.clear()
            self._live.clear()
            await self.call(self._engine.release_all)
            self.free_kv_blocks = self._engine.limits.kv_blocks
            self._mark_idle()

    async def close(self) -> None:
        """End the links and, when it has finished its step, the engine's thread. Idempotent."""
        await self.links.close()
        if self._closed:
            return
        self._closed = True
        await self.call(self._engine.release_all)
        await asyncio.get_running_loop().run_in_executor(None, self._worker.shutdown)

    # --- before the engine runs ---------------------------------------------------------------

    def _admit(self, lane_id: str, step: Step) -> tuple[Step, tuple[Failure, ...]]:
        """Open sessions for the admissions; refuse those that are empty or repeat an id."""
        fresh, refused = [], []
        for admission in step.admissions:
            if admission.rid in self._live:
                error = FrameError(f"request {admission.rid} is live already")
                refused.append(failure(admission.rid, error))
                continue
            if len(admission.ids) == 0:
                refused.append(failure(admission.rid, InvalidRequest("no prompt")))
                continue
            fresh.append(admission)
            self._live[admission.rid] = _Live(
                first_id=int(admission.ids[0]),
                sampling=admission.sampling,
                want_draft=admission.want_draft,
            )
            if admission.drafter_id:
                self._open(lane_id, admission)
        return dataclasses.replace(step, admissions=tuple(fresh)), tuple(refused)

    def _rebind(self, lane_id: str, rebind: Rebind) -> None:
        """Move a session: a new one, told everything so far from the cache."""
        live = self._live.get(rebind.rid)
        if live is None:
            return  # it finished while the frame was on its way
        live.want_draft = rebind.want_draft
        if not rebind.drafter_id:
            self.links.release([rebind.rid])
            return
        rows = self.cache.rows(rebind.rid)
        if rows is None:
            self.links.unbind(rebind.rid)
            return
        self._open(lane_id, rebind)
        everything = digest.of((live.first_id, *rows.ids.tolist()))
        want_draft = rebind.want_draft and live.prefill_done
        self.links.commit(
            [Update(rid=rebind.rid, chunk=rows, digest=everything, want_draft=want_draft)]
        )

    def _open(self, lane_id: str, source: Admission | Rebind) -> None:
        live = self._live[source.rid]
        self.links.open(
            rid=source.rid,
            lane_id=lane_id,
            epoch=source.session_epoch,
            drafter_id=source.drafter_id,
            address=source.drafter_address,
            first_id=live.first_id,
            sampling=live.sampling,
        )

    def _prefilling(self, step: Step) -> frozenset[int]:
        """Requests that the step computes for without their being in a row."""
        return frozenset(rid for rid, live in self._live.items() if not live.prefill_done)

    # --- in the engine's thread ---------------------------------------------------------------

    def _compute(self, step: Step, prefilling: frozenset[int]) -> _Computed:
        good, failures = [], []
        for admission in step.admissions:
            try:
                self._engine.check(admission)
                good.append(admission)
            except DSparkError as error:
                failures.append(failure(admission.rid, error))
        ended = {failed.rid for failed in failures}
        try:
            outcome = self._engine.step(dataclasses.replace(step, admissions=tuple(good)))
        except Exception as error:  # whatever it was, the replica stays up
            logger.exception("step %d failed in the engine", step.step_id)
            affected = {*prefilling, *step.rid.tolist()} - ended
            outcome, affected = self._recover(step, affected)
            failures += [failure(rid, error) for rid in sorted(affected)]
            return _Computed(
                outcome=outcome,
                chunks=(),
                failures=tuple(failures),
                ended=frozenset(ended | affected),
                crashed=True,
            )
        admitted = {admission.rid for admission in good}
        ended |= {failed.rid for failed in outcome.result.failures} & admitted
        return _Computed(
            outcome=outcome,
            chunks=tuple(_chunk(rows) for rows in outcome.committed),
            failures=tuple(failures),
            ended=frozenset(ended),
        )

    def _recover(self, step: Step, affected: set[int]) -> tuple[StepOutcome, set[int]]:
        """Rid the engine of the requests that a crash may have left half done."""
        releases = np.array(sorted(affected), np.int64)
        try:
            return self._engine.step(release_only(step, releases)), affected
        except Exception:
            logger.exception("the engine cannot release single requests: dropping all")
            self._engine.release_all()
            everyone = affected | self._live.keys()
            free = self._engine.limits.kv_blocks
            return StepOutcome(result=empty_result(step, free), committed=()), everyone

    # --- after it -----------------------------------------------------------------------------

    def _commit(self, step: Step, computed: _Computed) -> None:
        """Keep new rows for later moves and hand them to the links; forget what finished."""
        wanted = dict(zip(step.rid.tolist(), step.want_draft.tolist(), strict=True))
        updates = []
        for rows, chunk in zip(computed.outcome.committed, computed.chunks, strict=False):
            live = self._live.get(rows.rid)
            if live is None:
                continue
            if rows.finished:
                self._forget([rows.rid])
                continue
            want_draft = wanted.get(rows.rid, live.want_draft)
            live.prefill_done = rows.prefill_done
            if chunk is None:
                self.cache.forget(rows.rid)
                if self.links.bound(rows.rid):
                    self.links.unbind(rows.rid)
                continue
            self.cache.append(rows.rid, chunk)
            updates.append(
                Update(
                    rid=rows.rid,
                    chunk=chunk,
                    digest=rows.digest,
                    want_draft=bool(want_draft) and rows.prefill_done,
                )
            )
        self.links.commit(updates)

    def _forget(self, rids: list[int] | frozenset[int]) -> None:
        for rid in rids:
            self._live.pop(rid, None)
            self.cache.forget(rid)
        self.links.release(rids)

    def _result(self, computed: _Computed, refused: tuple[Failure, ...]) -> StepResult:
        result = computed.outcome.result
        unbound = sorted(rid for rid in self.links.take_unbound() if rid in self._live)
        return dataclasses.replace(
            result,
            failures=(*refused, *computed.failures, *result.failures),
            unbound=np.array(unbound, np.int64),
        )

    def _mark_idle(self) -> None:
        if self._live:
            self.idle.clear()
        else:
            self.idle.set()


def _chunk(rows: CommittedRows) -> Chunk | None:
    try:
        features = features_to_wire(rows.features)
        if rows.features is not None and len(features) != len(rows.ids):
            raise FrameError(f"{len(features)} feature rows for {len(rows.ids)} ids")
    except FrameError as error:
        logger.error("request %d: %s", rows.rid, error)
        return None
    ids = np.array(rows.ids, np.int32)
    return Chunk(first_position=rows.first_position, ids=ids, features=features)

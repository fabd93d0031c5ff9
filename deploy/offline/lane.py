"""One lane without streams: whole blocks, everything that is ready in every step.

The verifier's engine runs `Step` frames packed by the router's own functions, and the drafter
answers the commits of each step (`deploy.offline.drafting`). Only the decisions differ from a
served lane: all of a block is verified, so that the fate of every draft token can be known. One
round, in reading order: `OfflineLane.rounds`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from cluster.errors import error_for
from cluster.sampling import regime_of
from cluster.wire import FINISH_NONE, FINISH_REASONS, Step, StepResult
from deploy.offline.drafting import DraftingHalf, OfflineBlock
from deploy.offline.prompts import Prompt
from deploy.offline.records import Answer, Round
from router.lane_request import LaneRequest, Phase
from router.step_frame import PlannedRow, admission_of, pack_step
from router.step_result import ResultRow, read_result
from verifier_service.engine import Engine


class OfflineLane:
    """Requests that wait, and those in flight.

    Args:
        engine: holding no request.
        half: the drafter's half of the pair, None to decode plainly.
        prompts: of the requests, whose ids are indices into them.
        prefill_budget: prompt tokens per step beside the verify rows.
    """

    def __init__(
        self,
        engine: Engine,
        half: DraftingHalf | None,
        prompts: Sequence[Prompt],
        requests: Sequence[LaneRequest],
        prefill_budget: int,
    ) -> None:
        self._engine = engine
        self._half = half
        self._prompts = prompts
        self._prefill_budget = prefill_budget
        self._waiting = deque(requests)
        self._live: dict[int, LaneRequest] = {}
        self._free_blocks = engine.limits.kv_blocks
        self._num_steps = 0

    def rounds(self, concurrency: int, draft_batch: int | None) -> Iterator[Round | Answer]:
        """Step after step until every request has ended."""
        while self._waiting or self._live:
            admitted = self._admit(concurrency)
            rows = self._rows()
            step = self._pack(rows, admitted)
            outcome = self._engine.step(step)
            _check_failures(outcome.result, self._prompts)
            self._free_blocks = outcome.result.free_kv_blocks
            yield from self._apply(outcome.result, {row.request.rid: row for row in rows})
            if self._half is not None:
                wanted = [
                    request.rid
                    for request in self._live.values()
                    if request.phase is Phase.READY and request.max_draft > 0
                ]
                self._half.feed(outcome.committed, wanted=wanted, draft_batch=draft_batch)

    def _admit(self, concurrency: int) -> list[LaneRequest]:
        """The next requests in order, for as long as there is room (KV is reserved in full)."""
        admitted: list[LaneRequest] = []
        free = self._free_blocks
        while self._waiting and len(self._live) < concurrency:
            request = self._waiting[0]
            num_tokens = request.num_prompt + request.max_new_tokens
            free -= -(-num_tokens // self._engine.limits.kv_block_tokens)
            if free < 0:
                break
            admitted.append(self._waiting.popleft())
            request.enter(Phase.PREFILLING, self._num_steps)
            self._live[request.rid] = request
            if self._half is not None:
                self._half.open(request.rid, request.ids[0], request.sampling)
        return admitted

    def _rows(self) -> list[PlannedRow]:
        """Everything that is ready, whole blocks, longest waiting first, as far as a step goes."""
        room = self._engine.limits.max_step_tokens
        rows = []
        ready = [r for r in self._live.values() if r.phase is Phase.READY]
        for request in sorted(ready, key=lambda r: r.since):
            held = self._block(request)
            request.block = None if held is None else held.block
            num_draft = 0 if held is None else min(len(held.block.ids), request.max_draft)
            room -= 1 + num_draft
            if room < 0:
                break
            rows.append(PlannedRow(request=request, num_draft=num_draft, want_draft=False))
        return rows

    def _pack(self, rows: Sequence[PlannedRow], admitted: Sequence[LaneRequest]) -> Step:
        num_verify = sum(1 + row.num_draft for row in rows)
        left = self._engine.limits.max_step_tokens - num_verify
        self._num_steps += 1
        return pack_step(
            rows,
            lane_epoch=1,
            step_id=self._num_steps,
            admissions=[admission_of(request) for request in admitted],
            rebinds=(),
            releases=(),
            prefill_budget=min(self._prefill_budget, left),
        )

    def _apply(
        self, result: StepResult, planned: dict[int, PlannedRow]
    ) -> Iterator[Round | Answer]:
        for row in read_result(result, vocab_size=self._engine.limits.vocab_size):
            request = self._live[row.rid]
            num_draft = planned[row.rid].num_draft if row.rid in planned else 0
            assert row.follows(request, num_draft), (row, request)
            if row.rid in planned:
                yield self._round(request, row, num_draft)
            request.commit(row.token_ids, row.digest, self._num_steps)
            request.enter(Phase.READY, self._num_steps)
            if row.finish != FINISH_NONE:
                del self._live[row.rid]
                yield Answer(
                    prompt=row.rid,
                    token_ids=tuple(request.ids[request.num_prompt :]),
                    finish=FINISH_REASONS[row.finish],
                )

    def _round(self, request: LaneRequest, row: ResultRow, num_draft: int) -> Round:
        prompt, held = self._prompts[request.rid], self._block(request)
        num_emitted = len(row.token_ids)
        return Round(
            prompt=request.rid,
            source=prompt.source,
            domain=prompt.domain,
            regime=regime_of(request.sampling),
            anchor=request.anchor,
            draft_ids=held.block.ids if held else (),
            confidence=tuple(held.block.confidence.tolist()) if held else (),
            num_verified=num_draft,
            num_accepted=row.num_accepted,
            # A block cut at a stop id among its drafts emits accepted ones only; else the last
            # token stands where the first draft was refused.
            reached=min(num_emitted, num_draft),
            num_emitted=num_emitted,
            draft_batch=held.draft_batch if held else 0,
        )

    def _block(self, request: LaneRequest) -> OfflineBlock | None:
        return self._half.blocks.get(request.rid) if self._half is not None else None


def _check_failures(result: StepResult, prompts: Sequence[Prompt]) -> None:
    """Nothing an offline run sends should fail: the first failure ends it."""
    for failure in result.failures:
        source = prompts[failure.rid].source
        raise error_for(failure.code, f"prompt {failure.rid} ({source}): {failure.message}")

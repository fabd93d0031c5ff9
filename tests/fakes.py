"""Fakes of the seams: a verifier engine and a drafter replica that need no model.

Their common target is a made-up law: the logits behind a prefix are normal numbers seeded by its
digest. So every test can compute the right text by itself (`greedy_continuation`), and any fault
in positions, prefixes or order changes the text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from cluster import digest
from cluster.errors import (
    DSparkError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    StaleFrame,
    TokenOutOfVocabulary,
)
from cluster.streams import DataServer, FrameStream
from cluster.wire import (
    FINISH_NONE,
    Admission,
    Commit,
    Failure,
    Lost,
    Open,
    Ping,
    Pong,
    Release,
    Sampling,
    Step,
)
from tests.frames import (
    Row,
    make_admission,
    make_blocks,
    make_commit,
    make_hello,
    make_result,
    make_sampling,
    make_step,
)
from verifier_service.acceptance import (
    RowVerdict,
    SparseQ,
    VerifyRow,
    accept,
    check_draft,
    check_sampling,
    truncate,
)
from verifier_service.engine import CommittedRows, EngineLimits, StepOutcome, StepShape
from verifier_service.live_request import check_offered

__all__ = [
    "FakeDrafter",
    "FakeEngine",
    "Row",
    "fake_features",
    "greedy_continuation",
    "make_admission",
    "make_blocks",
    "make_commit",
    "make_hello",
    "make_result",
    "make_sampling",
    "make_step",
    "target_logits",
]

VOCAB_SIZE = 97


def target_logits(prefix_digest: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Logits [V] of the token behind the prefix with this digest."""
    rng = np.random.default_rng(prefix_digest)
    return torch.from_numpy(2.0 * rng.standard_normal(vocab_size))


def greedy_continuation(
    ids: Sequence[int], num_tokens: int, vocab_size: int = VOCAB_SIZE
) -> list[int]:
    """The ``num_tokens`` ids that greedy decoding puts behind ``ids``."""
    out: list[int] = []
    state = digest.of(ids)
    for _ in range(num_tokens):
        out.append(int(target_logits(state, vocab_size).argmax()))
        state = digest.extend(state, out[-1:])
    return out


def fake_features(ids: Sequence[int], first: int, end: int) -> torch.Tensor:
    """Feature rows [end - first, 2] of positions first..end-1: the position and the id there."""
    return torch.tensor([[p, ids[p]] for p in range(first, end)], dtype=torch.float32)


@dataclass
class _Request:
    """One request in the fake's memory."""

    admission: Admission
    ids: list[int]
    num_computed: int = 0
    num_blocks: int = 0

    @property
    def prefilled(self) -> bool:
        return self.num_computed >= len(self.admission.ids)

    @property
    def remaining(self) -> int:
        return self.admission.max_new_tokens - (len(self.ids) - self.admission.num_prompt)


@dataclass
class _Step:
    """What a step gathers on its way."""

    failures: list[Failure] = field(default_factory=list)
    rows: list[tuple[_Request, VerifyRow, int]] = field(default_factory=list)
    """With the position of the first row that judging it commits."""
    committed: list[CommittedRows] = field(default_factory=list)
    emitted: list[tuple[int, RowVerdict, int, int, int]] = field(default_factory=list)
    """rid, verdict, anchor, digest, finish."""
    num_prefill: int = 0
    num_tokens: int = 0

    def fail(self, rid: int, error: DSparkError) -> None:
        self.failures.append(Failure(rid=rid, code=type(error).__name__, message=str(error)))


class FakeEngine:
    """`verifier_service.engine.Engine` over the made-up law, with the real acceptance code.

    Args:
        delay_s: seconds that a step of so many tokens takes.
        sleep: how it takes them.
        has_projection: False gives no features.
        constraint_kinds, adapters: what it says it can do. It takes such requests, no more: its
            text is that of the law.

    Set ``fail_next`` to have the next step raise it.
    """

    def __init__(
        self,
        *,
        vocab_size: int = VOCAB_SIZE,
        max_model_len: int = 256,
        max_requests: int = 16,
        max_step_tokens: int = 128,
        kv_block_tokens: int = 16,
        kv_blocks: int = 256,
        delay_s: Callable[[int], float] = lambda num_tokens: 0.0,
        sleep: Callable[[float], None] = time.sleep,
        has_projection: bool = True,
        constraint_kinds: tuple[str, ...] = (),
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.limits = EngineLimits(
            model_fingerprint="fake-target",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            kv_block_tokens=kv_block_tokens,
            kv_blocks=kv_blocks,
            constraint_kinds=constraint_kinds,
            adapters=adapters,
        )
        self.fail_next: Exception | None = None
        self.num_steps = 0
        self._delay_s = delay_s
        self._sleep = sleep
        self._has_projection = has_projection
        self._requests: dict[int, _Request] = {}

    @property
    def live(self) -> frozenset[int]:
        """Request ids held."""
        return frozenset(self._requests)

    @property
    def free_kv_blocks(self) -> int:
        """Blocks that no request has reserved."""
        return self.limits.kv_blocks - sum(r.num_blocks for r in self._requests.values())

    def check(self, admission: Admission) -> None:
        """See `Engine.check`."""
        check_sampling(admission.sampling, self.limits.vocab_size)
        check_offered(admission, self.limits)
        num_ids = len(admission.ids)
        if num_ids == 0 or admission.num_prompt > num_ids or admission.num_prompt == 0:
            raise InvalidRequest("no prompt")
        if admission.ids.max() >= self.limits.vocab_size:
            raise TokenOutOfVocabulary(f"id {admission.ids.max()}")
        if num_ids >= self.limits.max_model_len:
            raise PromptTooLong(f"{num_ids} tokens, limit {self.limits.max_model_len - 1}")
        if num_ids - admission.num_prompt >= admission.max_new_tokens:
            raise InvalidRequest("nothing left to generate")

    def step(self, step: Step) -> StepOutcome:
        """See `Engine.step`."""
        self.num_steps += 1
        for rid in step.releases.tolist():
            self._requests.pop(rid, None)
        gathered = _Step()
        self._admit(step, gathered)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._take_rows(step, gathered)
        sum_context = sum(len(request.ids) for request, *_ in gathered.rows)
        num_verify = sum(row.num_laws for _, row, _ in gathered.rows)
        self._prefill(min(step.prefill_budget, self.limits.max_step_tokens - num_verify), gathered)
        gathered.num_tokens = num_verify + gathered.num_prefill
        delay_s = self._delay_s(gathered.num_tokens)
        if delay_s > 0:
            self._sleep(delay_s)
        self._judge(gathered)
        return self._outcome(step, gathered, sum_context, delay_s)

    def release_all(self) -> None:
        """See `Engine.release_all`."""
        self._requests.clear()

    def measure_step(self, shape: StepShape) -> float:
        """See `Engine.measure_step`."""
        assert not self._requests, "profiling with requests in hand"
        return max(self._delay_s(shape.num_tokens + shape.num_prefill), 1e-6)

    def _admit(self, step: Step, gathered: _Step) -> None:
        for admission in step.admissions:
            length = min(admission.num_prompt + admission.max_new_tokens, self.limits.max_model_len)
            num_blocks = -(-length // self.limits.kv_block_tokens)
            try:
                self.check(admission)
                if len(self._requests) >= self.limits.max_requests:
                    raise Overloaded("no free request slot")
                if num_blocks > self.free_kv_blocks:
                    raise Overloaded("no free KV blocks")
            except DSparkError as error:
                gathered.fail(admission.rid, error)
                continue
            request = _Request(admission, admission.ids.tolist(), num_blocks=num_blocks)
            self._requests[admission.rid] = request

    def _take_rows(self, step: Step, gathered: _Step) -> None:
        drafts, qs = 0, 0
        for i, rid in enumerate(step.rid.tolist()):
            num_draft = int(step.num_draft[i])
            draft_ids = tuple(step.draft_ids[drafts : drafts + num_draft].tolist())
            drafts += num_draft
            q = None
            if step.has_q[i]:
                rows = slice(qs, qs + num_draft)
                q = SparseQ(ids=step.q_ids[rows], probs=step.q_probs[rows])
                qs += num_draft
            try:
                request = self._match(rid, int(step.anchor[i]), int(step.digest[i]))
                check_draft(draft_ids, q, self.limits.vocab_size)
            except DSparkError as error:
                gathered.fail(rid, error)
                continue
            row = _verify_row(request, draft_ids, q)
            gathered.rows.append((request, row, len(request.ids) - 1))

    def _match(self, rid: int, anchor: int, prefix_digest: int) -> _Request:
        request = self._requests.get(rid)
        if request is None or not request.prefilled:
            raise StaleFrame(f"request {rid} is not decoding here")
        # A row sent ahead of the step that emitted its anchor knows the text up to there.
        known = (digest.of(request.ids), digest.of(request.ids[:-1]))
        if anchor != len(request.ids) - 1 or prefix_digest not in known:
            raise StaleFrame(f"request {rid} is at {len(request.ids) - 1}, not at {anchor}")
        return request

    def _prefill(self, budget: int, gathered: _Step) -> None:
        for rid, request in self._requests.items():
            if request.prefilled or budget <= 0:
                continue
            start = request.num_computed
            end = min(start + budget, len(request.ids))
            budget -= end - start
            gathered.num_prefill += end - start
            request.num_computed = end
            if request.prefilled:  # its first token is judged with the verify rows
                gathered.rows.append((request, _verify_row(request, (), None), start))
            else:
                gathered.committed.append(self._commit(rid, request, start, end))

    def _judge(self, gathered: _Step) -> None:
        """Sample all rows, commit, forget what finished."""
        if not gathered.rows:
            return
        logits_TV = torch.stack([law for _, row, _ in gathered.rows for law in self._laws(row)])
        verdicts = accept(logits_TV, [row for _, row, _ in gathered.rows])
        for (request, _, start), raw in zip(gathered.rows, verdicts, strict=True):
            rid = request.admission.rid
            room = self.limits.max_model_len - len(request.ids)
            verdict, finish = truncate(
                raw,
                stop_ids=frozenset(request.admission.stop_ids.tolist()),
                remaining=min(request.remaining, room),
            )
            request.ids += verdict.token_ids
            anchor = request.num_computed = len(request.ids) - 1
            finished = finish != FINISH_NONE
            gathered.committed.append(
                self._commit(rid, request, start, anchor, done=True, finished=finished)
            )
            gathered.emitted.append((rid, verdict, anchor, digest.of(request.ids), finish))
            if finished:
                del self._requests[rid]

    def _laws(self, row: VerifyRow) -> list[torch.Tensor]:
        states = [digest.of(row.ids)]
        for token in row.draft_ids:
            states.append(digest.extend(states[-1], [token]))
        return [target_logits(state, self.limits.vocab_size) for state in states]

    def _commit(
        self,
        rid: int,
        request: _Request,
        start: int,
        end: int,
        *,
        done: bool = False,
        finished: bool = False,
    ) -> CommittedRows:
        return CommittedRows(
            rid=rid,
            first_position=start,
            ids=tuple(request.ids[start + 1 : end + 1]),
            digest=digest.of(request.ids[: end + 1]),
            features=fake_features(request.ids, start, end) if self._has_projection else None,
            prefill_done=done,
            finished=finished,
        )

    def _outcome(self, step: Step, gathered: _Step, sum_context: int, step_s: float) -> StepOutcome:
        emitted = gathered.emitted
        verdicts = [verdict for _, verdict, *_ in emitted]
        num_tokens = gathered.num_tokens
        result = make_result(
            lane_epoch=step.lane_epoch,
            step_id=step.step_id,
            rid=np.array([rid for rid, *_ in emitted], np.int64),
            num_accepted=np.array([v.num_accepted for v in verdicts], np.int32),
            num_emitted=np.array([len(v.token_ids) for v in verdicts], np.int32),
            token_ids=np.array([t for v in verdicts for t in v.token_ids], np.int32),
            logprobs=np.array([x for v in verdicts for x in v.logprobs], np.float32),
            anchor=np.array([anchor for _, _, anchor, _, _ in emitted], np.int32),
            digest=np.array([prefix for _, _, _, prefix, _ in emitted], np.uint64),
            finish=np.array([finish for *_, finish in emitted], np.uint8),
            failures=tuple(gathered.failures),
            num_real_tokens=num_tokens,
            num_padded_tokens=num_tokens,
            num_prefill_tokens=gathered.num_prefill,
            sum_context=sum_context,
            step_s=max(step_s, 1e-6),
            free_kv_blocks=self.free_kv_blocks,
            pending_prefill_tokens=sum(
                len(r.admission.ids) - r.num_computed
                for r in self._requests.values()
                if not r.prefilled
            ),
        )
        return StepOutcome(result=result, committed=tuple(gathered.committed))


def _verify_row(request: _Request, draft_ids: tuple[int, ...], q: SparseQ | None) -> VerifyRow:
    return VerifyRow(
        sampling=request.admission.sampling,
        ids=tuple(request.ids),
        num_prompt=request.admission.num_prompt,
        draft_ids=draft_ids,
        q=q,
    )


@dataclass
class _Session:
    """A draft session of the fake: what it has been told."""

    epoch: int
    ids: list[int]
    sampling: Sampling


class FakeDrafter:
    """A drafter replica on real loopback streams, that drafts the made-up law's greedy text.

    It refuses to be misled: every commit must continue its session, carry the digest of what it
    then holds, and bring the features of exactly those positions; what does not is listed in
    ``faults`` and answered with `Lost`.

    Args:
        num_right: leading drafts of each block that are right; the others are wrong on purpose.
        sends_blocks: False drafts nothing (all drafts are late for ever).
        confidence: that it reports for each draft, right or wrong.
    """

    def __init__(
        self,
        *,
        member_id: str = "drafter-0",
        gamma: int = 4,
        num_right: int = 4,
        sends_blocks: bool = True,
        confidence: float = 0.9,
        vocab_size: int = VOCAB_SIZE,
        drafter: str = "",
        token: str = "",
    ) -> None:
        self.member_id = member_id
        self.faults: list[str] = []
        self.sessions: dict[tuple[str, int], _Session] = {}
        self.num_opens = 0
        self.num_blocks = 0
        self._gamma = gamma
        self._num_right = num_right
        self._sends_blocks = sends_blocks
        self._confidence = np.full((1, gamma), confidence, np.float32)
        self._vocab_size = vocab_size
        self._routers: dict[str, FrameStream] = {}
        self._verifiers: dict[str, FrameStream] = {}
        hello = make_hello("drafter", member_id, drafter=drafter, token=token)
        self._server = DataServer(hello=hello, on_stream=self._serve)

    @property
    def address(self) -> str:
        """Where to dial it."""
        return self._server.address

    async def start(self) -> None:
        """Listen."""
        await self._server.start()

    async def stop(self) -> None:
        """Go away at once; peers see their streams end."""
        await self._server.stop(0.0)

    async def lose(self, lane_id: str, rid: int) -> None:
        """Forget a session, as if out of memory, and say so to router and verifier."""
        session = self.sessions.pop((lane_id, rid))
        await self._send_lost(lane_id, rid, session.epoch, "asked to")

    async def _serve(self, stream: FrameStream) -> None:
        known = self._routers if stream.peer.role == "router" else self._verifiers
        known[stream.peer.member_id] = stream
        while True:
            frame = await stream.recv()
            if isinstance(frame, Open):
                self.num_opens += 1
                session = _Session(epoch=frame.epoch, ids=[frame.first_id], sampling=frame.sampling)
                self.sessions[frame.lane_id, frame.rid] = session
            elif isinstance(frame, Commit):
                await self._commit(frame)
            elif isinstance(frame, Release):
                for rid in frame.rid.tolist():
                    self.sessions.pop((frame.lane_id, rid), None)
            elif isinstance(frame, Ping):
                await stream.send(Pong(nonce=frame.nonce))

    async def _commit(self, frame: Commit) -> None:
        start = 0
        for i, rid in enumerate(frame.rid.tolist()):
            end = start + int(frame.num_rows[i])
            session = self.sessions.get((frame.lane_id, rid))
            fault = self._extend(session, frame, i, start, end)
            if fault or session is None:
                self.faults.append(f"{rid}: {fault}")
                self.sessions.pop((frame.lane_id, rid), None)
                await self._send_lost(frame.lane_id, rid, int(frame.epoch[i]), fault)
            elif frame.want_draft[i]:
                await self._draft(frame.lane_id, rid, session)
            start = end

    def _extend(self, session: _Session | None, frame: Commit, i: int, start: int, end: int) -> str:
        """Take one session's rows in; say what is wrong with them, if anything."""
        if session is None:
            return "no such session"
        first, epoch = int(frame.first_position[i]), int(frame.epoch[i])
        if epoch != session.epoch or first != len(session.ids) - 1:
            return f"at {session.epoch}:{len(session.ids) - 1}, told {epoch}:{first}"
        session.ids += frame.ids[start:end].tolist()
        if digest.of(session.ids) != int(frame.digest[i]):
            return "digest differs"
        expected = fake_features(session.ids, first, first + end - start).numpy()
        if frame.features.size and not np.array_equal(frame.features[start:end], expected):
            return f"features of other positions: {frame.features[start:end].tolist()}"
        return ""

    async def _draft(self, lane_id: str, rid: int, session: _Session) -> None:
        router = self._routers.get(lane_id)
        if router is None or not self._sends_blocks:
            return
        draft = greedy_continuation(session.ids, self._gamma, self._vocab_size)
        for k in range(self._num_right, self._gamma):
            draft[k] = (draft[k] + 1) % self._vocab_size
        self.num_blocks += 1
        block = make_blocks(
            rid,
            session.epoch,
            session.ids,
            draft,
            drafter_id=self.member_id,
            confidence=self._confidence,
        )
        with contextlib.suppress(DSparkError):
            await router.send(block)

    async def _send_lost(self, lane_id: str, rid: int, epoch: int, reason: str) -> None:
        lost = Lost(
            lane_id=lane_id,
            rid=np.array([rid], np.int64),
            epoch=np.array([epoch], np.int32),
            reason=reason,
        )
        for stream in (self._routers.get(lane_id), *self._verifiers.values()):
            if stream is not None:
                with contextlib.suppress(DSparkError):
                    await stream.send(lost)

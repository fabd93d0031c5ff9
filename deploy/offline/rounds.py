"""Rounds of the whole pair in one process: no Ray, no sockets, every block verified in full.

Production code does both halves; see `deploy.offline.lane` for the round itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.errors import ConfigError, DSparkError
from cluster.sampling import check_sampling, plain_sampling
from cluster.wire import Sampling
from deploy.offline.drafting import DraftingHalf
from deploy.offline.lane import OfflineLane
from deploy.offline.opening import open_drafting, open_engine, resolve_drafter
from deploy.offline.prompts import Prompt
from deploy.offline.records import Answer, Round
from deploy.text_model import load_eos_ids
from drafter_service.drafter import Drafter
from router.lane_request import LaneRequest
from router.step_frame import admission_of
from verifier_service.engine import Engine

__all__ = ["Answer", "LocalPair", "Prompt", "Round"]


class LocalPair:
    """A target and, with it, a drafter.

    Args:
        engine: holding no request; from now on used by this object only.
        drafter: that fits the engine's projection; None decodes plainly.
        stop_ids: that end an answer.
        prefill_budget: prompt tokens per step beside the verify rows.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        *,
        stop_ids: Sequence[int] = (),
        prefill_budget: int = 512,
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._stop_ids = tuple(stop_ids)
        self._prefill_budget = prefill_budget
        self.num_lost = 0
        """Draft sessions lost in all runs so far; their requests went on plainly."""

    @property
    def gamma(self) -> int:
        """Most drafts in a block, 0 without a drafter."""
        return 0 if self._drafter is None else self._drafter.limits.gamma

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self._stop_ids

    @classmethod
    def open(
        cls,
        target: Path,
        drafter: str | Path | None,
        *,
        calibrated: bool = True,
        device: str = "auto",
        kv_tokens: int = 16384,
    ) -> LocalPair:
        """Load both.

        Args:
            target: Hugging Face folder.
            drafter: a checkpoint folder, a bundled name, ``ngram``, or None.
            calibrated: whether a calibration beside the checkpoint is applied to confidences.
            kv_tokens: target KV, in positions over all requests in flight.

        Raises:
            ModelNotFound, CheckpointError, ConfigError, Unsupported: as the loaders raise them.
        """
        checkpoint = None if drafter is None else resolve_drafter(drafter)
        engine = open_engine(target, checkpoint, device=device, kv_tokens=kv_tokens)
        half = None
        if checkpoint is not None:
            half = open_drafting(checkpoint, target, device=device, calibrated=calibrated)
        return cls(engine, half, stop_ids=load_eos_ids(target))

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        mode: str,
        max_new_tokens: int,
        concurrency: int,
        seed: int,
        draft_batch: int | None = None,
    ) -> Iterator[Round]:
        """The rounds of these prompts, as they happen. See `play`."""
        for event in self.play(
            prompts,
            temperature=temperature,
            mode=mode,
            max_new_tokens=max_new_tokens,
            concurrency=concurrency,
            seed=seed,
            draft_batch=draft_batch,
        ):
            if isinstance(event, Round):
                yield event

    def play(
        self,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        mode: str,
        max_new_tokens: int,
        concurrency: int,
        seed: int,
        draft_batch: int | None = None,
    ) -> Iterator[Round | Answer]:
        """The rounds of these prompts and, after the last one of each, its answer.

        Args:
            mode: ``coupled`` or ``rejection``.
            max_new_tokens: of each request; less where the model's length ends first.
            concurrency: requests in flight, at most.
            seed: of the run; each prompt has its own, whatever runs beside it.
            draft_batch: most blocks the drafter computes at once, None for all that are wanted.

        Raises:
            BadSamplingParameter, ConfigError: a parameter out of its domain.
            PromptTooLong, InvalidRequest: a prompt that the target cannot take, before any round.
            DSparkError: the engine failed on a request.
        """
        _check_counts(
            max_new_tokens=max_new_tokens, concurrency=concurrency, draft_batch=draft_batch
        )
        check_seed(seed)
        requests = [
            self._request(index, prompt, max_new_tokens, _sampling(temperature, mode, seed, index))
            for index, prompt in enumerate(prompts)
        ]
        limits = self._engine.limits
        half = None
        if self._drafter is not None:
            half = DraftingHalf(self._drafter, vocab_size=limits.vocab_size)
        lane = OfflineLane(self._engine, half, prompts, requests, self._prefill_budget)
        try:
            yield from lane.rounds(min(concurrency, limits.max_requests), draft_batch)
        finally:
            self._engine.release_all()
            if half is not None:
                half.close()
                self.num_lost += half.num_lost

    def _request(
        self, rid: int, prompt: Prompt, max_new_tokens: int, sampling: Sampling
    ) -> LaneRequest:
        """The request of a prompt, checked as the verifier will check it."""
        limits = self._engine.limits
        check_sampling(sampling, limits.vocab_size)
        room = limits.max_model_len - len(prompt.ids)
        request = LaneRequest(
            rid=rid,
            ids=list(prompt.ids),
            num_prompt=len(prompt.ids),
            max_new_tokens=max(min(max_new_tokens, room), 1),
            stop_ids=self._stop_ids,
            sampling=sampling,
            draft=self._drafter is not None,
        )
        try:
            self._engine.check(admission_of(request))
        except DSparkError as error:
            error.message = f"prompt {rid} ({prompt.source}): {error.message}"
            raise
        return request


def check_seed(seed: int) -> None:
    """Refuse a run's seed that does not leave room for the prompts' own.

    Raises:
        ConfigError: it is out of range.
    """
    if not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed {seed} is out of range", hint="0 to 2**32 - 1")


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} {count} is out of range", hint="at least 1")


def _sampling(temperature: float, mode: str, seed: int, index: int) -> Sampling:
    """Of prompt ``index`` in a run with this seed: its draws depend on nothing else."""
    return plain_sampling(temperature, mode=mode, seed=(seed << 32) + index)

"""vLLM by itself under load, as its users run it in a process of theirs: no class of ours serves.

`LLMEngine` with its own scheduler, sampler, prefix cache and detokenizer, stepped in a loop; users
of a closed loop ask again the moment they are answered, with nothing in between: neither sockets
nor a client compute. That is the most that vLLM can do with these engine arguments. A block is
asked, timed and counted as in `dspark.bench.interleaved.Blocks`, and its figures are the same.
Requests above temperature 0 carry no seed: vLLM's CPU build cannot draw by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.environment import prepare_vllm, use_threads
from dspark.bench.asks import Ask, Mix
from dspark.bench.figures import Figure, between_arrivals, rates
from dspark.bench.interleaved import Timing, repeat_seed
from dspark.bench.sample import Sample, Window
from dspark.messages import Chunk

BLOCK_TOKENS = 32
"""Of the KV, the same as under our engine: prompts that begin alike share as much. vLLM's own
default on a CPU, 128, is as fast."""
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
"""vLLM's own drafts without a model; as many as our drafter gives."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How vLLM is started."""

    target: Path
    threads: int
    max_model_len: int
    max_requests: int
    kv_tokens: int
    ngram: bool
    compiled: bool
    """By torch's compiler, vLLM's default; false: eager, what our engine takes on a CPU."""


@dataclass(frozen=True, kw_only=True)
class BlockOrder:
    """One block to measure."""

    mix: Mix
    repeat: int
    users: int
    timing: Timing
    name: str


def run(pipe: Connection, settings: Settings) -> None:
    """Body of the child process: load, say so, then measure a block for each order.

    Answers are what was asked for, or a text that says what went wrong; then it is over.
    """
    use_threads(settings.threads)
    prepare_vllm()
    try:
        alone = _load(settings)
        pipe.send(_facts())
        while (order := pipe.recv()) is not None:
            pipe.send(alone.measure(order))
    except EOFError:
        return  # whoever asked is gone
    except Exception as error:  # reported, not raised: what vLLM cannot do is a result here
        text = " ".join(str(error).split())
        pipe.send(f"{type(error).__name__}: {text[:600]}")


def _facts() -> Figure:
    import torch
    from vllm import __version__

    return {"vllm": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _load(settings: Settings) -> Alone:
    import psutil
    from vllm import EngineArgs
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from deploy.text_model import load_text_model

    arguments: dict[str, Any] = {
        "model": str(settings.target),
        "dtype": "float32",
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_requests,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": settings.kv_tokens // BLOCK_TOKENS + 1,
        # Only a bound to check against; without it a share of all memory would be asked for.
        "kv_cache_memory_bytes": psutil.virtual_memory().available // 2,
        "enforce_eager": not settings.compiled,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    if settings.ngram:
        arguments["speculative_config"] = NGRAM
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    text = load_text_model(settings.target)

    def prompt_of(ask: Ask) -> Any:
        ids = text.encode_chat([{"role": "user", "content": ask.prompt.text}])
        return tokens_input(list(ids))

    def params_of(ask: Ask) -> Any:
        return SamplingParams(
            temperature=ask.temperature,
            max_tokens=ask.max_tokens,
            stop_token_ids=list(text.eos_ids),
            output_kind=RequestOutputKind.DELTA,
        )

    return Alone(engine, prompt_of, params_of)


class Alone:
    """Blocks in one engine that nobody else uses.

    Args:
        engine: vLLM's `LLMEngine`, or what has its ``add_request``, ``step`` and ``abort_request``.
        prompt_of, params_of: an ask in vLLM's words.
        clock: seconds.
    """

    def __init__(
        self,
        engine: Any,
        prompt_of: Callable[[Ask], Any],
        params_of: Callable[[Ask], Any],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._prompt_of = prompt_of
        self._params_of = params_of
        self._clock = clock
        self._num_asked = 0
        self._live: dict[str, tuple[Sample, int, int]] = {}
        """By request id: what its user sees, who it is, how often they have asked before."""
        self._samples: list[Sample] = []
        self._counters = dict.fromkeys(("num_steps", "step_s", "num_prefill_tokens"), 0.0)

    def measure(self, order: BlockOrder) -> Figure:
        """One block. It begins and ends with no request here."""
        took_s = self._clock()
        mix = replace(order.mix, seed=repeat_seed(order.mix.seed, order.repeat))
        self._samples = []
        for user in range(order.users):
            self._ask(mix, user, 0)
        first = self._samples[: order.users]
        while not all(sample.chunk_s for sample in first):
            self._step(mix)
        self._steps_for(order.timing.settle_s, mix)
        before, begin_s = dict(self._counters), self._clock()
        self._steps_for(order.timing.measure_s, mix)
        window = between_arrivals(self._samples, Window(begin_s=begin_s, end_s=self._clock()))
        self._engine.abort_request(list(self._live))
        self._live.clear()
        return {
            "repeat": order.repeat,
            "users": order.users,
            "setting": order.name,
            "took_s": self._clock() - took_s,
            "settled_s": order.timing.settle_s,
            "measured_s": window.length_s,
            **rates(self._samples, window),
            "counters": {name: value - before[name] for name, value in self._counters.items()},
        }

    def _ask(self, mix: Mix, user: int, turn: int) -> None:
        ask = mix.ask(user, turn, midway=turn == 0)
        self._num_asked += 1
        name = str(self._num_asked)
        now_s = self._clock()
        sample = Sample(ask=ask, scheduled_s=now_s, sent_s=now_s)
        self._samples.append(sample)
        self._live[name] = (sample, user, turn)
        self._engine.add_request(name, self._prompt_of(ask), self._params_of(ask))

    def _steps_for(self, duration_s: float, mix: Mix) -> None:
        until_s = self._clock() + duration_s
        while self._clock() < until_s:
            self._step(mix)

    def _step(self, mix: Mix) -> None:
        began_s = self._clock()
        outputs: Sequence[Any] = self._engine.step()
        now_s = self._clock()
        self._counters["num_steps"] += 1
        self._counters["step_s"] += now_s - began_s
        for output in outputs:
            self._take(output, now_s, mix)

    def _take(self, output: Any, now_s: float, mix: Mix) -> None:
        found = self._live.get(output.request_id)
        if found is None:
            return  # aborted with the block before
        sample, user, turn = found
        if not sample.chunk_s:
            cached = output.num_cached_tokens or 0
            self._counters["num_prefill_tokens"] += len(output.prompt_token_ids) - cached
        ids = tuple(output.outputs[0].token_ids)
        sample.take(Chunk(text="", token_ids=ids, logprobs=(), finish_reason="", usage=None), now_s)
        if output.finished:
            sample.ended_s = now_s
            del self._live[output.request_id]
            self._ask(mix, user, turn + 1)

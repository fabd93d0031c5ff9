"""Time to the first token of a chat's second turn, with the prefix cache and without.

    python benchmarks/prefix_cache.py MODEL_FOLDER --drafter DRAFTER_FOLDER \\
        --out prefix_cache.json --picture prefix_cache.png

A first turn of random ids is computed and answered by both engines, which share their weights; then
the second (all of it, and a new prompt of 32 tokens) is timed on one and on the other, the order
changing from repeat to repeat. ``ms`` is the median, ``spread`` the distance between the quartiles,
``ratio`` the median over the repeats of without over with; ``copy`` is what the cache's own work
takes of it: copying the keys and values it found. ``load`` is the machine's load average.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.config import ModelConfig, VerifierConfig
from cluster.sampling import plain_sampling
from cluster.wire import Admission, Step
from verifier_service.engine import StepOutcome
from verifier_service.projection import Projects, load_feature_projection
from verifier_service.torch_engine import TorchEngine
from verifier_service.torch_engine.loading import engine_limits, load_target
from verifier_service.torch_engine.model import TargetModel

TURNS = (128, 256, 512, 1024, 1900)
NUM_ANSWER = 32
NUM_NEW_PROMPT = 32
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Measure, write JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a Llama- or Qwen3-type Hugging Face folder")
    parser.add_argument("--drafter", type=Path, help="whose projected rows are kept and served")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--budget", type=int, default=256, help="prompt tokens per step")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument(
        "--turns", type=int, nargs="+", default=TURNS, help="tokens of the first turn"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_target(args.model, device=torch.device("cpu"), dtype="float32")
    projection = None
    if args.drafter is not None:
        projection = load_feature_projection(
            args.drafter, args.model, device=model.device, dtype=model.dtype
        )
    pair = {name: open_engine(model, args, projection, name == "with") for name in NAMES}
    rows = []
    for turn in args.turns:
        rows.append(measure(pair, turn, args))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "model": args.model.name,
        "drafter": None if args.drafter is None else args.drafter.name,
        "threads": args.threads,
        "clock": args.clock,
        "torch": torch.__version__,
        "tokens_per_step": args.budget,
        "new_prompt_tokens": NUM_NEW_PROMPT,
    }
    args.out.write_text(json.dumps({**report, "turns": rows}, indent=1) + "\n")
    if args.picture is not None:
        draw(rows, args.picture)


NAMES = ("with", "without")


def open_engine(
    model: TargetModel, args: argparse.Namespace, projection: Projects | None, cached: bool
) -> TorchEngine:
    """Room for the longest chat twice: as found, and as copied."""
    longest = max(args.turns) + NUM_NEW_PROMPT + 2
    verifier = VerifierConfig(kv_tokens=2 * longest + 64, max_step_tokens=max(args.budget, 64))
    limits = engine_limits(model, args.model, ModelConfig(max_model_len=longest), verifier)
    return TorchEngine(
        model, limits, projection, prefix_cache=cached, prefix_rows_bytes=verifier.prefix_rows_bytes
    )


def measure(pair: dict[str, TorchEngine], turn: int, args: argparse.Namespace) -> dict[str, Any]:
    """Second turns behind first ones of ``turn`` tokens, the answer included."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    copies: list[float] = []
    found = 0
    clock = CLOCKS[args.clock]
    for repeat in range(args.repeats + 1):
        rng = np.random.default_rng([turn, repeat])
        prompt, more = (
            rng.integers(0, pair["with"].limits.vocab_size, n).tolist()
            for n in (turn - NUM_ANSWER, NUM_NEW_PROMPT)
        )
        for name in NAMES[:: 1 if repeat % 2 else -1]:
            engine = pair[name]
            first = [*prompt, *answer(engine, prompt, NUM_ANSWER, args.budget)[0]]
            started_s = clock()
            _, cached = answer(engine, [*first, *more], 1, args.budget)
            if repeat:  # the first one warms up
                times[name].append(1e3 * (clock() - started_s))
            found = max(found, cached)
        copies.append(1e3 * copy_s(pair["with"], found, clock))
    return {
        "turn": turn,
        "found": found,
        "load": round(os.getloadavg()[0], 1),
        **{name: summary(values) for name, values in times.items()},
        "copy": summary(copies),
        "ratio": summary([b / a for a, b in zip(*times.values(), strict=True)]),
    }


def answer(
    engine: TorchEngine, ids: Sequence[int], num_tokens: int, budget: int
) -> tuple[list[int], int]:
    """Greedy tokens behind ``ids``, alone, and how many of ``ids`` the cache held."""
    outcome = engine.step(make_step(budget, admission=make_admission(ids, num_tokens)))
    said = outcome.result.token_ids.tolist()
    cached = outcome.result.num_cached_tokens
    while not (len(outcome.result.finish) and outcome.result.finish[0]):
        outcome = engine.step(make_step(budget, behind=outcome))
        said += outcome.result.token_ids.tolist()
        cached += outcome.result.num_cached_tokens
    return said, cached


def make_admission(ids: Sequence[int], num_tokens: int) -> Admission:
    """A request that ends by length."""
    return Admission(
        rid=1,
        ids=np.array(ids, np.int32),
        num_prompt=len(ids),
        max_new_tokens=num_tokens,
        stop_ids=np.zeros(0, np.int32),
        sampling=plain_sampling(0.0, mode="coupled", seed=0),
        drafter_id="",
        drafter_address="",
        session_epoch=0,
        want_draft=False,
    )


def make_step(
    budget: int, *, admission: Admission | None = None, behind: StepOutcome | None = None
) -> Step:
    """The next step of the only request: its admission, a prompt chunk or a plain row."""
    last = None if behind is None or not len(behind.result.rid) else behind.result
    ints = np.zeros(0 if last is None else 1, np.int32)
    return Step(
        lane_epoch=0,
        step_id=0,
        admissions=() if admission is None else (admission,),
        rebinds=(),
        releases=np.zeros(0, np.int64),
        prefill_budget=budget,
        rid=np.zeros(0, np.int64) if last is None else last.rid,
        anchor=ints if last is None else last.anchor,
        digest=np.zeros(0, np.uint64) if last is None else last.digest,
        num_draft=ints,
        want_draft=ints.astype(np.uint8),
        draft_ids=np.zeros(0, np.int32),
        has_q=ints.astype(np.uint8),
        q_ids=np.zeros((0, 0), np.int32),
        q_probs=np.zeros((0, 0), np.float32),
    )


def copy_s(engine: TorchEngine, num_tokens: int, clock: Callable[[], float]) -> float:
    """Seconds of copying the keys and values of so many positions."""
    size = engine.limits.kv_block_tokens
    num = num_tokens // size
    with torch.inference_mode():
        started_s = clock()
        # In place: the values stay what they are.
        engine._cache.copy_blocks(range(num), range(num), size)
        return clock() - started_s


def summary(values: list[float]) -> dict[str, float]:
    """Median, distance of the quartiles, smallest."""
    low, median, high = statistics.quantiles(values, n=4)
    return {
        "median": round(median, 2),
        "spread": round(high - low, 2),
        "least": round(min(values), 2),
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Times on the left, their ratio on the right; quartile distance as error bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    turns = [row["turn"] for row in rows]
    labels = {"without": "without", "with": "with prefix cache", "copy": "of it: copying KV"}
    for axis, names in ((left, labels), (right, {"ratio": "ratio"})):
        for name, label in names.items():
            medians = [row[name]["median"] for row in rows]
            spreads = [row[name]["spread"] / 2 for row in rows]
            axis.errorbar(turns, medians, yerr=spreads, marker="o", capsize=3, label=label)
        axis.set_xlabel("tokens of the first turn")
        axis.grid(alpha=0.3)
    left.set_yscale("log")
    left.set_ylabel("time to first token of the second turn, ms")
    left.set_ylim(bottom=min(row["copy"]["median"] for row in rows) / 15)
    left.legend(loc="lower right")
    right.set_ylabel("times as fast with the cache")
    right.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

"""Step time of the torch engine against a plain transformers forward with a KV cache.

    python benchmarks/engine_step.py MODEL_FOLDER --out engine_step.json --picture engine_step.png

For B tokens per step, once as one row of B tokens (verifying a block) and once as B rows of one
token (plain decoding), behind 128 and 512 positions of context. The two engines take turns in
every repeat, so that both see the same noise of the machine. ``ms`` is the median, ``spread`` the
distance between the quartiles, ``best`` the fastest; ``load`` is the machine's load average,
without which a figure from a shared machine says little. Where others compete for the cores, two
threads mostly wait for one another: ``--threads 1 --clock cpu`` counts processor time instead.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cluster.config import ModelConfig, VerifierConfig
from verifier_service.engine import StepShape
from verifier_service.torch_engine import TorchEngine, load_engine
from verifier_service.torch_engine.compute import compute
from verifier_service.torch_engine.measure import synthetic_step

SIZES = (1, 2, 4, 6, 8, 16, 32, 64)
CONTEXTS = (128, 512)
SHAPES = ("one row", "rows of one")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    """Measure, write JSON, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a Llama- or Qwen3-type Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = load_engine(
        args.model,
        model=ModelConfig(target=str(args.model), dtype="float32", device="cpu"),
        verifier=VerifierConfig(kv_tokens=max(args.sizes) * (max(args.contexts) + 80)),
    )
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = []
    for context in args.contexts:
        for shape in SHAPES:
            for size in args.sizes:
                point = (size, context, shape)
                rows.append(measure(engine, reference, point, args.repeats, CLOCKS[args.clock]))
                print(json.dumps(rows[-1]), flush=True)
    report = {
        "model": args.model.name,
        "threads": args.threads,
        "clock": args.clock,
        "torch": torch.__version__,
    }
    args.out.write_text(json.dumps({**report, "steps": rows}, indent=1) + "\n")
    if args.picture is not None:
        draw(rows, args.picture)


def measure(
    engine: TorchEngine,
    reference: Any,
    point: tuple[int, int, str],
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Both engines at one point of the grid: tokens, context, shape."""
    size, context, shape = point
    width = size if shape == "one row" else 1
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        ours, release = our_step(engine, size, context, width)
        theirs = their_step(reference, size, context, width)
        times: dict[str, list[float]] = {"ours": [], "transformers": []}
        for repeat in range(repeats + 1):
            for name, step in (("ours", ours), ("transformers", theirs)):
                started_s = clock()
                step()
                if repeat:  # the first one warms up
                    times[name].append(1e3 * (clock() - started_s))
        release()
    return {
        "context": context,
        "shape": shape,
        "tokens": size,
        "load": round(os.getloadavg()[0], 1),
        **{name: summary(values) for name, values in times.items()},
    }


def our_step(
    engine: TorchEngine, size: int, context: int, width: int
) -> tuple[Callable[[], object], Callable[[], None]]:
    """The engine's own step (layout, forward, greedy acceptance), and how to clean up."""
    allocator = engine._allocator
    shape = StepShape(num_tokens=size, row_tokens=width, context=context)
    spans, rows = synthetic_step(shape, allocator, engine.limits)

    def release() -> None:
        for reservation in {span.reservation for span in spans}:
            allocator.release(reservation)

    return lambda: compute(engine._model, engine._cache, (), spans, rows), release


def their_step(reference: Any, size: int, context: int, width: int) -> Callable[[], object]:
    """Forward of transformers over a filled cache, the argmax, and the cache cut back."""
    num_rows = size // width
    ids = torch.zeros(num_rows, width, dtype=torch.long)
    prefix = torch.zeros(num_rows, context, dtype=torch.long)
    cache = reference(prefix, use_cache=True, logits_to_keep=1).past_key_values

    def step() -> None:
        reference(ids, past_key_values=cache, use_cache=True).logits.argmax(dim=-1)
        cache.crop(-width)

    return step


def summary(values: list[float]) -> dict[str, float]:
    """Median, distance of the quartiles, best."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"ms": round(median, 1), "spread": round(high - low, 1), "best": round(min(values), 1)}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per context and shape; quartile distance as error bars."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    panels = sorted({(row["context"], row["shape"]) for row in rows})
    figure, _ = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True)
    for axis, (context, shape) in zip(figure.axes, panels, strict=True):
        chosen = [row for row in rows if (row["context"], row["shape"]) == (context, shape)]
        sizes = [row["tokens"] for row in chosen]
        for name in ("ours", "transformers"):
            medians = [row[name]["ms"] for row in chosen]
            spreads = [row[name]["spread"] / 2 for row in chosen]
            axis.errorbar(sizes, medians, yerr=spreads, marker="o", capsize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens per step")
        axis.set_title(f"{shape}, context {context}")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("step, ms")
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()

"""How well the throughput profile predicts the steps of a real engine, in two situations.

    python benchmarks/profile_error.py MODEL_FOLDER --out profile_error.json --picture DIR

``steady``: eight requests of everyday length decode; the number of drafts per row changes every
sixteen steps. ``long``: the table is measured at contexts of 64 and 256 and then meets requests of
20 times that. Each is told with the table as measured at start (``start``) and with the live one.

Steps are the engine's own `step` on frames packed by the router's functions, with random drafts,
and what is recorded is what `StepResult` says. ``spread`` is how much equal steps that follow one
another differ: no prediction can be better. The profile holds if the live median error is at most
5%, or 1.5 times the spread, in steady load, and at most 10% at 20 times the context.

Where others compete for the cores, ``--threads 1 --clock cpu`` counts processor time instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.config import ModelConfig, VerifierConfig
from cluster.sampling import plain_sampling
from cluster.wire import Step
from deploy.profile_picture import draw_profiles
from deploy.replica_profile import live_profile
from router.blocks import DraftBlock
from router.lane_request import LaneRequest
from router.step_frame import PlannedRow, admission_of, pack_step
from router.step_result import load_of, read_result
from router.throughput import ThroughputProfile
from verifier_service.engine import Engine, EngineLimits, StepOutcome, StepShape
from verifier_service.profiling import StepProfile, measure_profile
from verifier_service.torch_engine import load_engine

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WIDTHS = (0, 3, 7, 1, 5)
STEPS_PER_WIDTH = 16
VOCAB = 40_000
PREFILL = 512


class Clocked:
    """An engine whose step times are read from a clock of our choice."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def step(self, step: Step) -> StepOutcome:
        started_s = self._clock()
        outcome = self._engine.step(step)
        step_s = self._clock() - started_s
        return replace(outcome, result=replace(outcome.result, step_s=step_s))

    def measure_step(self, shape: StepShape) -> float:
        started_s = self._clock()
        self._engine.measure_step(shape)
        return self._clock() - started_s

    def release_all(self) -> None:
        self._engine.release_all()


class Load:
    """Requests that decode, every row with as many random drafts as it is told."""

    def __init__(self, engine: Clocked, contexts: Sequence[int], num_new: int, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._steps = 0
        self.requests = [
            LaneRequest(
                rid=rid,
                ids=self._ids(context),
                num_prompt=context,
                max_new_tokens=num_new,
                stop_ids=(),
                sampling=plain_sampling(1.0, mode="coupled", seed=rid),
                draft=True,
            )
            for rid, context in enumerate(contexts)
        ]

    def prefill(self, *profiles: ThroughputProfile) -> None:
        """Admit everything, compute the prompts; the profiles learn from it."""
        admissions = [admission_of(request) for request in self.requests]
        pending = 1
        while pending:
            pending = self._run([], admissions, PREFILL, profiles)
            admissions = []

    def decode(self, num_drafts: int, *profiles: ThroughputProfile) -> None:
        """One step of all requests."""
        for request in self.requests:
            request.block = DraftBlock(
                rid=request.rid,
                epoch=0,
                anchor=request.anchor,
                digest=request.digest,
                ids=tuple(self._ids(num_drafts)),
                confidence=np.ones(num_drafts),
                q=None,
            )
        rows = [
            PlannedRow(request=request, num_draft=num_drafts, want_draft=False)
            for request in self.requests
        ]
        self._run(rows, [], 0, profiles)

    def _run(
        self,
        rows: Sequence[PlannedRow],
        admissions: Sequence[Any],
        budget: int,
        profiles: Sequence[ThroughputProfile],
    ) -> int:
        step = pack_step(
            rows,
            lane_epoch=0,
            step_id=self._steps,
            admissions=admissions,
            rebinds=(),
            releases=(),
            prefill_budget=budget,
        )
        self._steps += 1
        result = self._engine.step(step).result
        assert not result.failures, result.failures
        for profile in profiles:
            profile.record(load_of(result, num_rows=len(rows)), result.step_s)
        for row in read_result(result, vocab_size=self._engine.limits.vocab_size):
            self.requests[row.rid].commit(row.token_ids, row.digest, 0.0)
        return result.pending_prefill_tokens

    def _ids(self, num: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(num)]


def main() -> None:
    """Measure, run both situations, write JSON and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="a Llama- or Qwen3-type Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path, metavar="DIR", help="one per situation")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds to measure a table")
    parser.add_argument("--steps", type=int, default=320, help="of each situation")
    parser.add_argument("--long", type=int, default=5120, help="context, 20 times the profiled one")
    parser.add_argument("--only", choices=("steady", "long"), help="one of the situations")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Clocked(
        load_engine(
            args.model,
            model=ModelConfig(
                target=str(args.model), dtype="float32", device="cpu", max_model_len=1 << 20
            ),
            verifier=VerifierConfig(prefix_cache=False),  # prompts are to be computed
        ),
        CLOCKS[args.clock],
    )
    situations = {
        "steady": ([40 * i for i in range(1, 9)], {}),
        "long": ([args.long, args.long - 200], {"near": 64, "far": args.long // 20}),
    }
    report: dict[str, Any] = {
        "model": args.model.name,
        "threads": args.threads,
        "clock": args.clock,
        "torch": torch.__version__,
        "situations": {},
    }
    for name, (contexts, options) in situations.items():
        if args.only not in (None, name):
            continue
        load_before = os.getloadavg()[0]
        measured = measure_profile(engine, budget_s=args.budget, **options)
        start, live = situation(engine, measured, contexts, args.steps)
        report["situations"][name] = {
            "contexts": contexts,
            "profiled_at": options or "default",
            "load": [round(load_before, 1), round(os.getloadavg()[0], 1)],
            "start": summary(start),
            "live": summary(live),
        }
        print(name, json.dumps(report["situations"][name]), flush=True)
        if args.picture is not None:
            args.picture.mkdir(parents=True, exist_ok=True)
            picture = draw_profiles([(f"{name}, live", live.snapshot())])
            (args.picture / f"profile_{name}.png").write_bytes(picture)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def situation(
    engine: Clocked, measured: StepProfile, contexts: Sequence[int], num_steps: int
) -> tuple[ThroughputProfile, ThroughputProfile]:
    """The table kept as measured, and the live one, after the same decode steps.

    The prompts are computed unseen: what the first decode steps are predicted with is the start.
    """
    start, live = live_profile(measured), live_profile(measured)
    start.live = False
    load = Load(engine, contexts, num_new=8 * num_steps + 1, seed=0)
    load.prefill()
    for i in range(num_steps):
        load.decode(WIDTHS[i // STEPS_PER_WIDTH % len(WIDTHS)], start, live)
    engine.release_all()
    return start, live


def summary(profile: ThroughputProfile) -> dict[str, Any]:
    """Errors over the latest 256 steps."""
    snapshot = profile.snapshot()
    errors = [abs(s.predicted_s - s.step_s) / s.step_s for s in snapshot.recent]
    return {
        "median_error": round(snapshot.median_error, 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
        "mean_error": round(snapshot.mean_error, 4),
        "spread": round(snapshot.spread, 4),
        "scale": round(snapshot.scale, 3),
        "alarms": list(snapshot.alarms),
    }


if __name__ == "__main__":
    main()

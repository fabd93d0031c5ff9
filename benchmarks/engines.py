"""vLLM alone against our service on vLLM and on torch, by turns, in one run on one machine.

    .venv-vllm/bin/python benchmarks/engines.py --out engines.json [--minutes 60] [--steps]

``vllm``: vLLM by itself, in process, the most that it can do (`vllm_alone`); ``vllm compiled``: the
same by torch's compiler, its default, which our engine leaves off on a CPU because it takes minutes
to start; ``vllm n-gram``: vLLM with its own speculation by prompt lookup; ``vllm
served``: vLLM behind its own API server, asked over HTTP (`vllm_served`); ``ours on vllm`` and
``ours on torch``: our whole service with the embedded pair over gRPC (router, drafter, verifier;
`systems`). All in fp32, with as many threads, requests at once and KV positions; the prompts, mixed
greedy and T = 1, and lengths are those that `dspark.bench.asks.Mix` draws, the same for all; texts
end by EOS or length alike. In each repeat and at each number of users every system is measured once
in an order of its own, while the others lie in memory, stopped: ``others_cpu`` of a block is what
share of one core they took all the same, ``cpu`` what its own took. The client runs beside a
service, vLLM's or ours, and takes from it; vLLM alone has none.

The report holds every block; medians and quartiles; ratios of ours to the others in tokens/s in all
with lower 90% bounds (`dspark.bench.comparison.ratios_to`; prompts levelled from eight repeats on);
and how near our decoding comes to what the verifier's steps allow with one user (`decode_bound`).
``--steps`` adds step times of both engines by themselves (`verify_steps`).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import verify_steps
from engines_summary import ALONE, NAMES, OURS, SERVED, TORCH, draw, lines, summarise
from growing import Report, add_mix_arguments, begin, in_time, mix_of
from systems import AloneSystem, OurSystem, System, hold, let_go
from systems_bench import Bench
from vllm_alone import NGRAM, Settings
from vllm_served import ServedSystem

from cluster.atomic_file import write_bytes, write_json
from cluster.config import load_config
from cluster.errors import ConfigError, DSparkError
from cluster.model_store import ensure_drafter, ensure_model
from dspark.bench.interleaved import Setting, units

USERS = (1, 4, 16, 64)
PATIENCE_S = 7200.0
"""Of our pools with each other: to those that were held for minutes no time has passed."""


def main() -> int:
    """Measure, print, draw."""
    args = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        report = begin(args.out, _plan(args))
        if args.steps:
            _add_steps(report, args)
        asyncio.run(_measure(report, args))
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in lines(report["summary"]):
        print(line)
    return 0


def _interrupt(*_: object) -> None:
    """So that what was started is ended: stopped processes would stay for ever."""
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="JSON", help="goes on if there")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="nothing is begun that would end later"
    )
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(USERS), metavar="N")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SYSTEM")
    parser.add_argument("--settle", type=float, default=1.0, metavar="S", help="not counted")
    parser.add_argument("--measure", type=float, default=8.0, metavar="S", help="counted")
    parser.add_argument(
        "--per-user", type=float, default=0.1, metavar="S", help="more of both: steps get longer"
    )
    parser.add_argument("--answers", type=int, default=6, help="of each probe of the bound")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each engine")
    parser.add_argument("--port", type=int, default=9873, help="of servers, and the next two")
    parser.add_argument("--steps", action="store_true", help="step times of the engines as well")
    add_mix_arguments(parser)
    return parser.parse_args()


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "systems": [name for name in NAMES if name in args.only],
        "threads": args.threads,
        "timing_s": [args.settle, args.measure, args.per_user],
        "most_users": max(args.concurrency),
        "answers": args.answers,
        "temperatures": args.temperature,
        "max_tokens": args.max_tokens,
        "prompts": args.prompts.name if args.prompts else "demo",
        "seed": args.seed,
        "ngram": NGRAM,
    }


def _config(args: argparse.Namespace, engine: str, port: int) -> dict[str, Any]:
    """Of our service, where it differs from the defaults."""
    return {
        "cluster": {"grpc_port": port, "member_ttl_s": PATIENCE_S},
        "verifier": {
            "engine": engine,
            "lease_ttl_s": PATIENCE_S,
            "num_threads": args.threads,
            "max_requests": max(args.concurrency),
        },
        "drafter": {"num_threads": args.threads},
    }


def make_systems(args: argparse.Namespace) -> list[System]:
    """Those that are asked for, not yet started; vLLM gets the KV and limits of our verifier."""
    config = load_config(_config(args, "vllm", args.port))

    def settings(name: str) -> Settings:
        return Settings(
            target=ensure_model(config.model.target),
            threads=args.threads,
            max_model_len=config.model.max_model_len,
            max_requests=config.verifier.max_requests,
            kv_tokens=config.verifier.kv_tokens,
            ngram=name == "vllm n-gram",
            compiled=name == "vllm compiled",
        )

    made: list[System] = [AloneSystem(name, settings(name)) for name in ALONE if name in args.only]
    if SERVED in args.only:
        made.append(ServedSystem(SERVED, settings(SERVED), args.port + 2))
    for place, (name, engine) in enumerate(((TORCH, "torch"), (OURS, "vllm"))):
        if name in args.only:
            made.append(OurSystem(name, _config(args, engine, args.port + place)))
    return made


def _add_steps(report: Report, args: argparse.Namespace) -> None:
    """Step times of the engines, unless the report has them; in a process that ends with them."""
    if "steps" in report:
        return
    config = load_config(_config(args, "vllm", args.port))
    drafter = ensure_drafter(config.drafter.checkpoint, config.model.target)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        report["steps"] = process.submit(
            verify_steps.step_times,
            ensure_model(config.model.target),
            drafter if isinstance(drafter, Path) else None,
            config,
            threads=args.threads,
            repeats=args.repeats,
        ).result()
    write_json(args.out, report)


async def _measure(report: Report, args: argparse.Namespace) -> None:
    """Every unit that the report lacks; it is written after each."""
    done = {(block["repeat"], block["users"]) for block in report["blocks"]}
    settings = [Setting(name=name) for name in report["plan"]["systems"]]
    plan = [
        unit
        for unit in units(settings, args.concurrency, args.repeats, args.seed)
        if (unit.repeat, unit.users) not in done
    ]
    systems: dict[str, System] = {}
    try:
        if plan:
            await _start(systems, report, args)
        bench = Bench(systems, mix_of(args), args, report)
        for unit in in_time(plan, args.minutes):
            report["blocks"] += await bench.unit(unit)
            report["summary"] = summarise(report)
            write_json(args.out, report)
            write_bytes(args.out.with_suffix(".png"), draw(report))
    finally:
        for system in systems.values():
            let_go(system)
            await system.close()
    report.setdefault("summary", summarise(report))


async def _start(systems: dict[str, System], report: Report, args: argparse.Namespace) -> None:
    """Start one after the other, so that each measures its profile alone. One that does not run is
    left out, and the report says why."""
    facts, failures = report.setdefault("facts", {}), report.setdefault("failures", {})
    for system in make_systems(args):
        print(f"starting {system.name}", file=sys.stderr, flush=True)
        began_s = time.monotonic()
        systems[system.name] = system  # from here on it is closed, whatever happens
        try:
            found = await system.start()
        except DSparkError as error:
            await systems.pop(system.name).close()
            failures[system.name] = str(error)
            print(f"{system.name} does not run here: {error}", flush=True)
            continue
        failures.pop(system.name, None)
        facts[system.name] = {**found, "start_s": time.monotonic() - began_s}
        hold(system)
    if not systems:
        raise ConfigError("no system runs here", hint="see the lines above")


if __name__ == "__main__":
    sys.exit(main())

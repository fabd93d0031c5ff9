"""`dspark demo`: serve locally, decode the prompts with and without drafts, compare."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console

from cluster.config import Config
from cluster.errors import ConfigError, DSparkError
from dspark.async_client import AsyncClient
from dspark.configuration import add_config_arguments, config_from
from dspark.demo.figures import Answer, Side, as_json, differences, summarise, verdict
from dspark.demo.prompts import PROMPTS, Prompt
from dspark.demo.screen import Streams, figures_table, show_answers
from dspark.progress import Phases

_WARM_UP_TOKENS: Final = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--max-tokens", type=int, default=96, help="per answer (default 96)")
    parser.add_argument(
        "--concurrency", type=int, default=len(PROMPTS), help="requests at once (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo. Whatever happens, the Ray that it started is gone afterwards."""
    for name in ("max_tokens", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
    config = config_from(args)
    from deploy.service import serving

    if not config.cluster.auth_token:  # the port listens on every interface: keep strangers out
        cluster = replace(config.cluster, auth_token=secrets.token_urlsafe(24))
        config = replace(config, cluster=cluster)
    # The second pass sends the prompts of the first: what that has computed must not help it.
    config = replace(config, verifier=replace(config.verifier, prefix_cache=False))
    console = Console()
    phases = Phases(console)
    console.print(f"starting {config.model.target} on a private Ray", highlight=False)
    with phases, serving(config, ray_address="", phase=phases.phase, report=phases.report) as at:
        phases.done()
        figures = asyncio.run(_both(console, at, config, args))
    if args.json:
        try:
            args.json.write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--json: cannot write {args.json}: {error.strerror}") from error
    return 0


async def _both(
    console: Console, address: str, config: Config, args: argparse.Namespace
) -> dict[str, object]:
    """The prompts with drafts, then without; prints and returns the figures."""
    async with AsyncClient(
        address, token=config.cluster.auth_token, application=config.cluster.application
    ) as client:
        for draft in (True, False):  # caches and allocators warm: neither side pays for the other
            await client.generate("Hello", max_tokens=_WARM_UP_TOKENS, draft=draft).text()
        drafted = await _pass(console, client, args, draft=True)
        show_answers(console, drafted.answers, [prompt.text for prompt in PROMPTS])
        console.print()
        plain = await _pass(console, client, args, draft=False)
    found = differences(drafted.answers, plain.answers)
    per_step = (drafted.per_step, plain.per_step)
    at_once = min(args.concurrency, len(PROMPTS))
    title = f"{len(PROMPTS)} prompts, {at_once} at once, greedy"
    console.print(figures_table(drafted.side, plain.side, per_step, title))
    console.print(verdict(found, len(PROMPTS)), highlight=False, markup=False)
    return as_json(drafted.side, plain.side, found)


class _Run:
    """One way of decoding, done."""

    def __init__(self, answers: list[Answer], side: Side, per_step: float) -> None:
        self.answers = answers
        self.side = side
        self.per_step = per_step


async def _pass(
    console: Console, client: AsyncClient, args: argparse.Namespace, *, draft: bool
) -> _Run:
    """All prompts, at most ``--concurrency`` at a time."""
    slots = asyncio.Semaphore(args.concurrency)
    title = "with drafts" if draft else "plain"
    before = (await client.get_model()).metrics
    began_s = time.perf_counter()
    with Streams(console, title, [prompt.name for prompt in PROMPTS]) as streams:

        async def one(prompt: Prompt) -> Answer:
            async with slots:
                return await _answer(client, prompt, streams, args.max_tokens, draft=draft)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in PROMPTS]
        except* DSparkError as failed:  # one failure speaks for all: the others were cancelled
            raise failed.exceptions[0] from None
    wall_s = time.perf_counter() - began_s
    after = (await client.get_model()).metrics
    steps, emitted = (after[name] - before[name] for name in ("num_steps", "num_emitted"))
    answers = [task.result() for task in tasks]
    return _Run(answers, summarise(answers, wall_s), emitted / steps if steps else 0.0)


async def _answer(
    client: AsyncClient, prompt: Prompt, streams: Streams, max_tokens: int, *, draft: bool
) -> Answer:
    began_s = time.perf_counter()
    first_s = 0.0
    generation = client.generate(
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=max_tokens,
        draft=draft,
        logprobs=True,
    )
    async for chunk in generation:
        first_s = first_s or time.perf_counter() - began_s
        streams.grow(prompt.name, chunk.text, len(chunk.token_ids))
    if generation.usage is None:
        raise DSparkError(f"{prompt.name}: the stream ended without a last message")
    answer = Answer(
        name=prompt.name,
        text=generation.text_so_far,
        token_ids=tuple(generation.token_ids),
        logprobs=tuple(generation.logprobs),
        usage=generation.usage,
        first_s=first_s,
        total_s=time.perf_counter() - began_s,
    )
    streams.end(answer)
    return answer

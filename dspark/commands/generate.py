"""`dspark generate PROMPT`: stream one answer from a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from cluster.tiers import TIER_WEIGHTS
from dspark.client import Client
from dspark.connection import add_connection_arguments
from dspark.constraint_options import read_text
from dspark.messages import Options, Usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; those of sampling are named as in `Options`."""
    parser.add_argument("prompt", help="the prompt, - for standard input")
    add_connection_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float, help="default 0: greedy")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--mode", choices=("coupled", "rejection"))
    parser.add_argument("--stop", action="append", metavar="STRING", help="may be repeated")
    parser.add_argument("--deadline", type=float, dest="deadline_s", metavar="SECONDS")
    parser.add_argument("--target-tokens-per-s", type=float, metavar="RATE", help="to aim at")
    parser.add_argument("--tier", choices=tuple(TIER_WEIGHTS), help="default standard")
    parser.add_argument("--adapter", metavar="NAME", help="LoRA adapter of the server's target")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in this schema")
    form.add_argument("--json-object", action="store_true", default=None, help="answer in JSON")
    form.add_argument("--regex", metavar="PATTERN", help="answer that matches as a whole")
    form.add_argument("--choice", action="append", metavar="TEXT", help="answer; repeat for more")
    form.add_argument("--grammar", type=Path, metavar="FILE", help="answer in this EBNF")
    parser.add_argument("--no-draft", action="store_false", dest="draft", default=None)
    parser.add_argument("--usage", action="store_true", help="print counts to standard error")


def run(args: argparse.Namespace) -> int:
    """Send the prompt and print the answer as it comes."""
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    chosen: dict[str, Any] = {
        name: value
        for name, value in vars(args).items()
        if name in Options.__annotations__ and value is not None
    }
    for name in ("json_schema", "grammar"):
        if name in chosen:
            chosen[name] = read_text(chosen[name])
    options = Options(**chosen)  # type: ignore[typeddict-item]
    with Client(args.address, application=args.application) as client:
        if args.raw:
            generation = client.generate(prompt, **options)
        else:
            messages = [{"role": "user", "content": prompt}]
            generation = client.generate(messages=messages, **options)
        for chunk in generation:
            print(chunk.text, end="", flush=True)
        print()
    if args.usage and generation.usage:
        print(describe(generation.usage), file=sys.stderr)
    return 0


def describe(usage: Usage) -> str:
    """Counts and speed of one request in a line."""
    speed = usage.completion_tokens / usage.total_s if usage.total_s else 0.0
    return (
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} new tokens in {usage.rounds} "
        f"rounds, {usage.proposed}/{usage.verified}/{usage.accepted} drafts proposed/verified/"
        f"accepted, first token after {usage.ttft_s:.2f} s, {speed:.1f} tokens/s, "
        f"seed {usage.seed}"
    )

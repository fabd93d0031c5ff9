"""How near decoding comes to the rate at which the verifier would step if it never waited.

One user asks; between an answer's first message and its last, every step of the verifier is a
verify step of this one request. Over all answers of a probe

    accepted length   tokens that those steps emitted / steps
    verify step       seconds that the engine reports for them (`StepResult.step_s`: from the
                      plan to the features on the host, acceptance included) / steps
    bound             accepted length / verify step: tokens/s if the next step began as one ended
    measured          tokens behind the first message / seconds from first message to last, as the
                      client sees them

What is short of the bound is what lies between two steps: the features' way to the drafter, the
draft, its way to the router, the router's decision. A block cannot be drafted before the step has
ended behind which it comes, so no service reaches the bound where a draft takes any time; the

    serial bound      accepted length / (verify step + draft)

is what one could reach whose messages took none; ``draft`` is what the drafter reports of a block
by itself, from the commit's arrival to the reply. Steps are the engine's own, at the lengths that
the router chose and beside whatever else wanted the cores, so a slow step is not held against the
service: ``--steps`` times steps by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dspark.async_client import AsyncClient
from dspark.bench.asks import Mix
from dspark.bench.figures import Figure
from dspark.bench.interleaved import repeat_seed, until_idle
from dspark.bench.measure import growth

_USER = 1 << 20
"""Asks what no user of a block asks."""
_COUNTERS = ("num_verify_rows", "num_emitted", "num_verified", "step_s")


async def probe(client: AsyncClient, mix: Mix, *, repeat: int, num_answers: int) -> Figure:
    """So many answers, one after the other, in a server that nobody else uses: sums over them.

    Raises:
        DSparkError: a request failed.
    """
    await until_idle(client)
    mix = replace(mix, seed=repeat_seed(mix.seed, repeat))
    sums = dict.fromkeys((*_COUNTERS, "tokens", "rounds", "seconds"), 0.0)
    for turn in range(num_answers):
        ask = mix.ask(_USER, turn)
        began = last = None
        tokens = rounds = 0
        messages = [{"role": "user", "content": ask.prompt.text}]
        async for chunk in client.generate(messages=messages, **ask.options):
            if not chunk.token_ids:
                continue
            last = time.perf_counter()
            if began is None:
                began, before = last, await client.get_model()
            else:
                tokens, rounds = tokens + len(chunk.token_ids), rounds + 1
        if began is None or last is None or not rounds:
            continue  # an answer of one token has no round
        counters = growth(before, await client.get_model())
        sums["tokens"] += tokens
        sums["rounds"] += rounds
        sums["seconds"] += last - began
        for name in _COUNTERS:
            sums[name] += counters[name]
    return {
        "repeat": repeat,
        "answers": num_answers,
        **sums,
        "draft_s": _draft_s(await client.get_profile()),
    }


def _draft_s(profile: dict[str, Any]) -> float | None:
    """Seconds of a block by itself, as the router knows them; None before the first."""
    known = [link["draft_s"]["1"] for link in profile["drafters"] if link.get("draft_s")]
    return sum(known) / len(known) if known else None


def bound_of(probes: Sequence[Figure]) -> Figure:
    """The bounds of the module and what was measured, over all probes together; ``share`` is
    measured over bound, ``between_s`` the seconds of a round in which the engine did not step."""
    names = (*_COUNTERS, "tokens", "rounds", "seconds")
    total = {name: sum(probe[name] for probe in probes) for name in names}
    steps = total["num_verify_rows"]
    accepted_length, step_s = total["num_emitted"] / steps, total["step_s"] / steps
    bound, measured = accepted_length / step_s, total["tokens"] / total["seconds"]
    drafts = [probe["draft_s"] for probe in probes if probe["draft_s"] is not None]
    draft_s = sum(drafts) / len(drafts) if drafts else 0.0
    serial = accepted_length / (step_s + draft_s)
    return {
        "accepted_length": accepted_length,
        "verified_per_round": total["num_verified"] / steps,
        "verify_step_s": step_s,
        "draft_s": draft_s,
        "between_s": total["seconds"] / total["rounds"] - step_s,
        "bound_tokens_per_s": bound,
        "serial_bound_tokens_per_s": serial,
        "measured_tokens_per_s": measured,
        "share": measured / bound,
        "serial_share": measured / serial,
        "steps": steps,
    }

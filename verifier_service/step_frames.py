"""Frames that a verifier replica builds when a step, or a part of one, could not run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from cluster.errors import DSparkError
from cluster.wire import Failure, Step, StepResult


def failure(rid: int, error: Exception) -> Failure:
    """What a router is told about a request that an error ended."""
    known = error if isinstance(error, DSparkError) else DSparkError(f"engine: {error!r}")
    return Failure(rid=rid, code=type(known).__name__, message=str(known)[:4096])


def release_only(step: Step, releases: np.ndarray[Any, Any]) -> Step:
    """The same step without anything to compute."""
    no_rows = {
        name: getattr(step, name)[:0]
        for name in ("rid", "anchor", "digest", "num_draft", "want_draft", "draft_ids")
    }
    no_q = {name: getattr(step, name)[:0] for name in ("has_q", "q_ids", "q_probs")}
    return dataclasses.replace(
        step, admissions=(), rebinds=(), releases=releases, prefill_budget=0, **no_rows, **no_q
    )


def empty_result(step: Step, free_kv_blocks: int) -> StepResult:
    """The result of a step in which nothing ran."""
    ints, longs = np.zeros(0, np.int32), np.zeros(0, np.int64)
    return StepResult(
        lane_epoch=step.lane_epoch,
        step_id=step.step_id,
        rid=longs,
        num_accepted=ints,
        num_emitted=ints,
        token_ids=ints,
        logprobs=np.zeros(0, np.float32),
        anchor=ints,
        digest=np.zeros(0, np.uint64),
        finish=np.zeros(0, np.uint8),
        failures=(),
        unbound=longs,
        num_real_tokens=0,
        num_padded_tokens=0,
        num_prefill_tokens=0,
        sum_context=0,
        step_s=0.0,
        free_kv_blocks=free_kv_blocks,
        pending_prefill_tokens=0,
    )

"""What steps and draft batches of simulated devices take. Pure data and arithmetic.

Shape legend: B tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigError
from cluster.json_text import misshape, read_json
from cluster.sections import natural, positive
from router.step_load import StepLoad

F64 = NDArray[np.float64]

_HINT: Final = "write one with dspark profile --json"


def seconds(default: float = 0.0) -> Any:
    """A time of 0 or more."""
    return field(default=default, metadata={"least": 0})


@dataclass(frozen=True, kw_only=True)
class Cliff:
    """A step that is larger than ``above`` tokens takes so much longer (another kernel, a graph
    that was not captured)."""

    above: int = natural(0)
    extra_s: float = seconds()


@dataclass(frozen=True, kw_only=True)
class StepCurve:
    """Seconds of one verify step as a function of its load.

        T = fixed + max(memory, per_token * B') + per_row * R + per_context * sum(context)
            + per_pair * pairs + per_prefill * P + cliffs,      B' = B rounded up to whole tiles

    or, with a table, ``table(B')`` in place of the first two terms: straight lines between the
    points, the last slope beyond them.
    """

    fixed_s: float = seconds()
    memory_s: float = seconds()
    """Reading the weights: arithmetic hides behind it until it takes longer (the roofline)."""
    per_token_s: float = seconds()
    per_row_s: float = seconds()
    """Of a request with a verify row."""
    per_context_s: float = seconds()
    """Of a position attended to, read once for all tokens of its row or chunk."""
    per_pair_s: float = seconds()
    """Of a token and a position that it attends to."""
    per_prefill_s: float = 0.0
    """Of a prompt token, above what any token costs; below 0 where it needs no logits."""
    tile_tokens: int = positive(1)
    """B is padded to multiples of this."""
    cliffs: tuple[Cliff, ...] = ()
    table_tokens: tuple[int, ...] = ()
    """Rising B."""
    table_s: tuple[float, ...] = ()
    """Seconds at each of them."""

    def __post_init__(self) -> None:
        tokens, times = self.table_tokens, self.table_s
        if len(tokens) != len(times) or any(a >= b for a, b in pairwise(tokens)):
            raise ConfigError(
                f"a step curve of {len(tokens)} sizes and {len(times)} times",
                hint="table_tokens must rise, with one entry of table_s for each",
            )
        if tokens and (tokens[0] < 1 or min(times) <= 0):
            raise ConfigError("a step curve with a size or time that is not over 0")
        if not tokens and self.fixed_s + self.memory_s + self.per_token_s <= 0:
            raise ConfigError("a step curve without a cost", hint="give fixed_s, or a table")

    def padded(self, num_tokens: int) -> int:
        """Tokens that the device computes for so many."""
        return -(-num_tokens // self.tile_tokens) * self.tile_tokens

    def step_s(self, load: StepLoad) -> float:
        """Seconds of this step."""
        tokens = np.array([load.num_tokens], np.float64)
        return float(self.of_tokens(tokens)[0]) + self.beside_tokens_s(load)

    def curve_s(self, base: StepLoad, max_tokens: int) -> F64:
        """Seconds of the step ``base`` grown by draft tokens, indexed by all its tokens B
        (0..max_tokens); right from ``base.num_tokens`` up."""
        sizes = np.arange(max_tokens + 1, dtype=np.float64)
        curve: F64 = self.of_tokens(sizes) + self.beside_tokens_s(base)
        return curve

    def of_tokens(self, sizes: F64) -> F64:
        """The part of the time that depends on B, the fixed part included; any shape."""
        padded = np.ceil(sizes / self.tile_tokens) * self.tile_tokens
        if self.table_tokens:
            part = self._table(padded)
        else:
            part = self.fixed_s + np.maximum(self.memory_s, self.per_token_s * padded)
        for cliff in self.cliffs:
            part = part + np.where(padded > cliff.above, cliff.extra_s, 0.0)
        return part

    def beside_tokens_s(self, load: StepLoad) -> float:
        """The part that depends on rows, context and prefill."""
        return (
            self.per_row_s * load.num_rows
            + self.per_context_s * load.sum_context
            + self.per_pair_s * load.pairs
            + self.per_prefill_s * load.num_prefill
        )

    def _table(self, sizes: F64) -> F64:
        tokens = np.array(self.table_tokens, np.float64)
        times = np.array(self.table_s)
        inside: F64 = np.interp(sizes, tokens, times)
        if len(tokens) == 1:
            return inside
        slope = max((times[-1] - times[-2]) / (tokens[-1] - tokens[-2]), 0.0)
        beyond: F64 = inside + np.maximum(sizes - tokens[-1], 0.0) * slope
        return beyond


@dataclass(frozen=True, kw_only=True)
class DraftCurve:
    """Seconds of one draft batch: ``fixed + per_block * blocks + per_row * rows``."""

    fixed_s: float = seconds(0.006)
    per_block_s: float = seconds()
    per_row_s: float = seconds()
    """Of a committed position that the drafter takes in (features to draft keys and values)."""

    def draft_s(self, num_blocks: int, num_rows: int = 0) -> float:
        """Seconds of a batch."""
        return self.fixed_s + self.per_block_s * num_blocks + self.per_row_s * num_rows


def profiled_curve(path: Path) -> StepCurve:
    """The curve that ``dspark profile --json`` measured, of the first verifier in it.

    Raises:
        ConfigError: unreadable, or not such a file.
    """
    found: Any = read_json(path, _HINT)
    try:
        if "verifiers" in found:  # else one profile by itself
            found = found["verifiers"][0]["profile"]
        table, costs = found["live_s"], found["live_costs"]
        return StepCurve(
            table_tokens=tuple(int(n) for n in found["tokens"]),
            table_s=tuple(float(s) for s in table),
            per_row_s=float(costs["row_s"]),
            per_context_s=float(costs["context_s"]),
            per_pair_s=float(costs["pair_s"]),
            per_prefill_s=float(costs["prefill_s"]),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", hint=error.hint) from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds no step profile: {misshape(error)}", hint=_HINT) from error

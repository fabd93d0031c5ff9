"""What travels with a step from the scheduler to the workers, and back.

Workers may be other processes, so this is plain data that pickles.

Shape legend: T rows of one request, D draft hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from cluster.sparse import SparseQ
from cluster.wire import Sampling
from verifier_service.acceptance import RowVerdict


@dataclass(frozen=True, kw_only=True)
class Law:
    """How the tokens of one request are drawn. Sent once, with its first chunk."""

    sampling: Sampling
    num_prompt: int


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Of one step, by vLLM's request ids."""

    laws: Mapping[str, Law] = field(default_factory=dict)
    """Of requests that begin."""
    qs: Mapping[str, SparseQ] = field(default_factory=dict)
    """Draft probabilities, where drafts were drawn from them."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a worker did for one request."""

    first: int
    num_tokens: int
    verdict: RowVerdict | None
    broken: bool
    stuck: bool
    """Its constraint allowed no token at all: nothing was sampled."""
    features: Tensor | None
    """[T, D]"""


@dataclass(frozen=True, kw_only=True)
class StepRan:
    """What a worker did in one step."""

    requests: Mapping[str, Ran] = field(default_factory=dict)
    num_padded: int = 0
    """Tokens that the device computed, padding included."""

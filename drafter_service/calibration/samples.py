"""What rounds teach about confidence: which positions count, and what became of them.

Two questions are asked of position k of a block:

* **survival**: were the first k drafts all accepted? Its confidence is the product c_1...c_k, what
  the prefix scheduler multiplies (paper 3.2.2). Known in every round that was *observable* at k:
  one rejected earlier answers "no" without the target ever judging k.
* **conditional acceptance**: was draft k accepted, given that all before it were? Its confidence is
  c_k alone. Known only where k was *reached*: observable, with k - 1 drafts accepted.

Whether a round counts at k must not depend on what happened in it, or the ends of requests bias
the fit: at the end of a request survivors are cut off, while a round rejected early still
shows its "no", so counting every known outcome would count too many of those. Therefore a round is
observable at k iff

* k drafts were verified: how many is decided from the room left in the request, before the block
  is judged; and
* no draft *before* k is a stop token, accepted or not: an accepted one ends the request and hides
  what follows it, so what follows a rejected one must not count either. (Which tokens were drafted
  before k is known when c_k is formed: the selection is one of contexts, not of outcomes.)

Shape legend: N rounds, G gamma.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]

LOGIT_LIMIT: Final = 12.0
"""Confidence travels as fp32 probability; beyond this its logit cannot be had back."""


class ObservedRound(Protocol):
    """The fields of a finished round that calibration reads."""

    @property
    def prompt(self) -> int:
        """Which prompt it belongs to."""
        ...

    @property
    def draft_ids(self) -> Sequence[int]:
        """[G]."""
        ...

    @property
    def confidence(self) -> Sequence[float]:
        """[G], conditional, as the drafter's head gave it: not calibrated."""
        ...

    @property
    def num_verified(self) -> int:
        """Leading drafts that the target judged."""
        ...

    @property
    def num_accepted(self) -> int:
        """Leading drafts that survived and were emitted."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Rounds of one regime as arrays."""

    logit: F64  # N, G; of the raw conditional confidence, within +-LOGIT_LIMIT
    num_accepted: I64  # N
    num_observable: I64  # N, leading positions whose survival is known whatever it is
    prompt: I64  # N

    def __len__(self) -> int:
        return len(self.logit)

    @property
    def gamma(self) -> int:
        return int(self.logit.shape[1])

    @property
    def observable(self) -> Bools:
        """[N, G] whether the round counts at k for survival."""
        return self._positions() <= self.num_observable[:, None]

    @property
    def survived(self) -> Bools:
        """[N, G] whether the first k drafts were all accepted; only meaningful where observable."""
        return self._positions() <= self.num_accepted[:, None]

    @property
    def reached(self) -> Bools:
        """[N, G] whether the round counts at k for conditional acceptance."""
        return self.observable & (self._positions() - 1 <= self.num_accepted[:, None])

    def of(self, keep: Bools) -> Samples:
        """The rounds [N] that are marked."""
        return Samples(
            logit=self.logit[keep],
            num_accepted=self.num_accepted[keep],
            num_observable=self.num_observable[keep],
            prompt=self.prompt[keep],
        )

    def folds(self, num_folds: int) -> I64:
        """Fold [N] of each round: whole prompts, dealt in turn. Rounds of one prompt resemble each
        other, so a split of rounds would judge a fit by what it has seen."""
        _, rank_N = np.unique(self.prompt, return_inverse=True)
        return np.asarray(rank_N % num_folds, np.int64)

    def _positions(self) -> I64:
        return np.arange(1, self.gamma + 1)


def to_samples(rounds: Iterable[ObservedRound], *, stop_ids: Collection[int]) -> Samples:
    """Rounds of one regime, drafted with raw confidence.

    Args:
        stop_ids: tokens that end a request.

    Raises:
        ValueError: no rounds, or blocks of different lengths.
    """
    listed = list(rounds)
    if not listed:
        raise ValueError("no rounds")
    confidence_NG = np.array([r.confidence for r in listed], np.float64)  # ragged: a ValueError
    return Samples(
        logit=logit(confidence_NG),
        num_accepted=np.array([r.num_accepted for r in listed], np.int64),
        num_observable=np.array([_observable(r, stop_ids) for r in listed], np.int64),
        prompt=np.array([r.prompt for r in listed], np.int64),
    )


def logit(confidence: NDArray[Any]) -> F64:
    """ln(c / (1 - c)), within `LOGIT_LIMIT`."""
    c = np.asarray(confidence, np.float64)
    with np.errstate(divide="ignore"):
        value: F64 = np.clip(np.log(c) - np.log1p(-c), -LOGIT_LIMIT, LOGIT_LIMIT)
    return value


def sigmoid(value: F64) -> F64:
    """1 / (1 + e^-x), for values that do not overflow (logits over a bounded temperature)."""
    result: F64 = 1 / (1 + np.exp(-value))
    return result


def _observable(one: ObservedRound, stop_ids: Collection[int]) -> int:
    for place, token in enumerate(one.draft_ids[: one.num_verified]):
        if token in stop_ids:
            return place + 1
    return one.num_verified

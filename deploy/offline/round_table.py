"""Rounds of one run as arrays, and which of them may be asked what.

Two things cut a round short and hide what would have become of its drafts: the request's last
tokens, and a stop id among the drafts. Whether a round counts must not depend on how it went, or
the figures lean: near a request's end survivors are cut off while refusals still show. So `whole`
marks the rounds that nothing *could* have cut, by what is known before they are judged.

Shape legend: N rounds, G gamma (places past the end of a short block are empty).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deploy.offline.prompts import Prompt
from deploy.offline.records import Round

Bools = NDArray[np.bool_]
I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Labels = NDArray[np.str_]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundTable:
    """See the module."""

    prompt: I64  # N, index of the prompt
    source: Labels  # N
    domain: Labels  # N
    anchor: I64  # N, position, which is the context depth
    num_drafted: I64  # N
    num_accepted: I64  # N
    num_emitted: I64  # N, bonus included
    confidence: F64  # N, G; conditional, 0 in empty places
    whole: Bools  # N

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def gamma(self) -> int:
        return int(self.confidence.shape[1])

    @property
    def drafted(self) -> Bools:
        """[N, G] whether there is a draft at k."""
        return self._positions() <= self.num_drafted[:, None]

    @property
    def survived(self) -> Bools:
        """[N, G] whether the first k drafts were all accepted."""
        return self._positions() <= self.num_accepted[:, None]

    @property
    def reached(self) -> Bools:
        """[N, G] whether there is a draft at k and all before it were accepted."""
        return self.drafted & (self._positions() - 1 <= self.num_accepted[:, None])

    @property
    def survival(self) -> F64:
        """[N, G] stated probability that the first k drafts are all accepted."""
        return self.confidence.cumprod(axis=1)

    def of(self, keep: Bools) -> RoundTable:
        """The rounds [N] that are marked."""
        return RoundTable(**{name: array[keep] for name, array in vars(self).items()})

    def in_domain(self, domain: str) -> RoundTable:
        """The rounds of a domain; ``all`` for all."""
        return self if domain == ALL else self.of(self.domain == domain)

    def _positions(self) -> I64:
        return np.arange(1, self.gamma + 1)


ALL = "all"
"""The domain of everything."""


def round_table(
    rounds: Sequence[Round],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    gamma: int,
    stop_ids: Collection[int],
) -> RoundTable:
    """Rounds of these prompts, in the order given.

    Args:
        max_new_tokens: that each request was allowed.
        gamma: most drafts in a block.
    """
    confidence_NG = np.zeros((len(rounds), gamma))
    for row, one in zip(confidence_NG, rounds, strict=True):
        row[: len(one.confidence)] = one.confidence
    stops = frozenset(stop_ids)
    end = [len(prompts[r.prompt].ids) + max_new_tokens for r in rounds]
    return RoundTable(
        prompt=np.array([r.prompt for r in rounds], np.int64),
        source=np.array([r.source for r in rounds], np.str_),
        domain=np.array([r.domain for r in rounds], np.str_),
        anchor=np.array([r.anchor for r in rounds], np.int64),
        num_drafted=np.array([len(r.draft_ids) for r in rounds], np.int64),
        num_accepted=np.array([r.num_accepted for r in rounds], np.int64),
        num_emitted=np.array([r.num_emitted for r in rounds], np.int64),
        confidence=confidence_NG,
        whole=np.array(
            [
                # Room for a full block and its bonus token behind the anchor ...
                r.anchor + gamma + 1 < last
                # ... all of it verified (the model's own length may end sooner), and no stop id
                # except at its end.
                and r.num_verified == len(r.draft_ids)
                and stops.isdisjoint(r.draft_ids[:-1])
                for r, last in zip(rounds, end, strict=True)
            ],
            np.bool_,
        ),
    )

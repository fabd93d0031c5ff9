"""The reduced draft vocabulary: the ids that the target's replies are really made of.

On a small machine the head dominates drafting, and a few thousand ids cover nearly all response
tokens. Ids outside are never drafted; the target still emits them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Both directions of the reduction."""

    d2t: Tensor
    """int64 [draft vocabulary], rising: the target id of each draft id."""
    t2d: Tensor
    """int64 [target vocabulary]: the draft id of each target id, -1 where there is none."""


def choose_vocabulary(
    frequencies: Counter[int], special_ids: Iterable[int], *, vocab_size: int, size: int
) -> DraftVocabulary:
    """Every special id, then the most frequent response ids, then low ids, up to ``size``.

    Raises:
        ConfigError: ``size`` has no room for the special ids.
    """
    size = min(size, vocab_size)
    special = sorted(set(special_ids))
    if len(special) > size:
        raise ConfigError(
            f"shape.draft_vocab_size = {size} is below the {len(special)} special ids",
            hint="a drafter must be able to draft the end of a reply",
        )
    by_count = sorted(frequencies, key=lambda token: (-frequencies[token], token))
    chosen = list(dict.fromkeys([*special, *by_count, *range(vocab_size)]))[:size]
    return vocabulary_of(sorted(chosen), vocab_size)


def vocabulary_of(d2t: Sequence[int], vocab_size: int) -> DraftVocabulary:
    """The vocabulary whose draft ids stand for ``d2t``."""
    forward = torch.tensor(d2t, dtype=torch.int64)
    backward = torch.full((vocab_size,), -1, dtype=torch.int64)
    backward[forward] = torch.arange(len(d2t))
    return DraftVocabulary(d2t=forward, t2d=backward)


def choose_mask_id(frequencies: Counter[int], special_ids: Sequence[int], vocab_size: int) -> int:
    """The id that stands for "not drafted yet": the special id that replies use least.

    Its embedding is the target's and frozen; it only must not mean anything in a reply.
    """
    candidates = special_ids or range(vocab_size)
    return min(candidates, key=lambda token: (frequencies[token], -token))

"""Figures of one run: accepted lengths, acceptance by position and depth, threshold sweep. Pure.

Every figure is a plain dictionary, as the JSON report holds it. Accepted length is tokens per
round, the bonus token included (paper section 2.1). Rows of data sets and domains count every
round, the cut ones at the ends of answers too, as a user would; everything else takes the rounds
that nothing could cut (`deploy.offline.round_table`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from deploy.offline.bootstrap import interval_of_quotient, interval_of_ratio
from deploy.offline.round_table import ALL, I64, Bools, RoundTable

Figure = dict[str, Any]

DEPTH_EDGES: Final = (0, 64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""Context depths at which buckets begin; the last one is open."""
THRESHOLDS: Final = tuple(round(0.05 * step, 2) for step in range(20))


def domains_of(table: RoundTable) -> tuple[str, ...]:
    """Domains in order of appearance, then ``all``."""
    names = dict.fromkeys(table.domain.tolist())
    return (*(name for name in names if name != ALL), ALL)


def lengths_by_source(table: RoundTable) -> list[Figure]:
    """A row per data set, in order of appearance by domain."""
    pairs = dict.fromkeys(zip(table.domain.tolist(), table.source.tolist(), strict=True))
    order = {domain: rank for rank, domain in enumerate(domains_of(table))}
    return [
        {"source": source, "domain": domain}
        | accepted_length(table.of((table.source == source) & (table.domain == domain)))
        for domain, source in sorted(pairs, key=lambda pair: order[pair[0]])
    ]


def lengths_by_domain(table: RoundTable) -> list[Figure]:
    """A row per domain and one for all."""
    return [
        {"domain": domain} | accepted_length(table.in_domain(domain))
        for domain in domains_of(table)
    ]


def accepted_length(table: RoundTable) -> Figure:
    """Tokens per round with its 95% interval, and the counts behind it."""
    ones_N = np.ones(len(table), np.int64)
    low, high = interval_of_ratio(table.num_emitted, ones_N, table.prompt)
    return {
        "accepted_length": float(table.num_emitted.mean()),
        "low": low,
        "high": high,
        "rounds": len(table),
        "tokens": int(table.num_emitted.sum()),
        "prompts": len(np.unique(table.prompt)),
    }


def quotients(ours: RoundTable, theirs: RoundTable) -> list[Figure]:
    """Our accepted length over theirs on the prompts that both have rounds of, by domain."""
    figures = []
    for domain in domains_of(ours):
        one, other = ours.in_domain(domain), theirs.in_domain(domain)
        common = np.intersect1d(one.prompt, other.prompt)
        if not len(common):
            continue
        sides = tuple(_counts(table, common) for table in (one, other))
        (tokens, rounds), (their_tokens, their_rounds) = sides
        value = tokens.sum() / rounds.sum() / (their_tokens.sum() / their_rounds.sum())
        low, high = interval_of_quotient(*sides)
        figures.append({"domain": domain, "quotient": float(value), "low": low, "high": high})
    return figures


def acceptance_by_position(table: RoundTable) -> list[Figure]:
    """Conditional acceptance at each position (paper figure 2), by domain.

    ``acceptance`` is P(draft k accepted | all before it were), ``survival`` P(the first k were).
    """
    figures = []
    for domain in domains_of(table):
        part = table.in_domain(domain)
        part = part.of(part.whole)
        for k in range(part.gamma):
            reached_N, drafted_N = part.reached[:, k], part.drafted[:, k]
            if not reached_N.any():
                continue
            won_N = part.survived[:, k] & reached_N
            low, high = interval_of_ratio(
                won_N.astype(np.int64), reached_N.astype(np.int64), part.prompt
            )
            figures.append(
                {
                    "domain": domain,
                    "position": k + 1,
                    "acceptance": float(won_N.sum() / reached_N.sum()),
                    "low": low,
                    "high": high,
                    "reached": int(reached_N.sum()),
                    "survival": float(won_N.sum() / drafted_N.sum()),
                }
            )
    return figures


def length_by_depth(table: RoundTable, edges: Sequence[int] = DEPTH_EDGES) -> list[Figure]:
    """Accepted length of whole rounds by the anchor's position; empty buckets are left out."""
    figures = []
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        inside = table.whole & (table.anchor >= low)
        if high is not None:
            inside &= table.anchor < high
        if inside.any():
            figures.append({"from": low, "to": high} | accepted_length(table.of(inside)))
    return figures


def whole_length(table: RoundTable) -> Figure | None:
    """Accepted length of the rounds that nothing could cut, None without any."""
    return accepted_length(table.of(table.whole)) if table.whole.any() else None


def threshold_sweep(table: RoundTable, thresholds: Iterable[float] = THRESHOLDS) -> list[Figure]:
    """What verifying only drafts of at least this survival would have given (paper figure 5).

    From whole rounds, where the fate of every draft is known. Survival falls along a block, so what
    passes is a prefix. ``acceptance`` is the share of verified drafts that were accepted.
    """
    figures = []
    for domain in domains_of(table):
        part = table.in_domain(domain)
        part = part.of(part.whole)
        if not len(part):
            continue
        survival_NG, drafted_NG = part.survival, part.drafted
        for threshold in thresholds:
            verified_N = _leading(drafted_NG & (survival_NG >= threshold))
            kept_N = np.minimum(verified_N, part.num_accepted)
            num_verified = int(verified_N.sum())
            figures.append(
                {
                    "domain": domain,
                    "threshold": threshold,
                    "acceptance": float(kept_N.sum() / num_verified) if num_verified else None,
                    # A stop id that ends the block is accepted without a bonus token.
                    "accepted_length": float(np.minimum(kept_N + 1, part.num_emitted).mean()),
                    "verified": num_verified,
                    "verified_per_round": num_verified / len(part),
                    "rounds": len(part),
                }
            )
    return figures


def _leading(passes_NG: Bools) -> I64:
    """[N] length of each row's leading run of True."""
    lengths_N: I64 = np.logical_and.accumulate(passes_NG, axis=1).sum(axis=1)
    return lengths_N


def _counts(table: RoundTable, prompts: I64) -> tuple[I64, I64]:
    """Tokens and rounds [P] of each of these prompts."""
    inside = np.isin(table.prompt, prompts)
    place = np.searchsorted(prompts, table.prompt[inside])
    tokens = np.bincount(place, table.num_emitted[inside], len(prompts)).astype(np.int64)
    return tokens, np.bincount(place, minlength=len(prompts))

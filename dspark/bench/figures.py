"""What a load came to, as pure functions of its samples. Every figure is a plain dictionary.

Rates count what *arrived* within the window, whichever request it belongs to; so nothing is lost
or gained at its edges. Latencies are those of the requests that count, mostly those *scheduled*
within it, and run from the schedule on: a slow server cannot hide behind a client that waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from dspark.bench.sample import Sample, Window
from dspark.messages import Usage

Figure = dict[str, Any]

PERCENTILES: Final = (50, 95, 99)


def load_figures(
    samples: Sequence[Sample], window: Window, counted: Sequence[Sample] | None = None
) -> Figure:
    """All figures of one window, as a whole and by domain.

    Args:
        counted: the requests whose latencies count; default: those scheduled in the window.
    """
    if counted is None:
        counted = [sample for sample in samples if window.holds(sample.scheduled_s)]
    domains = sorted({sample.ask.prompt.domain for sample in samples})
    return _figures(samples, window, counted) | {
        "domains": {
            domain: _figures(_of(samples, domain), window, _of(counted, domain))
            for domain in domains
        }
    }


def _of(samples: Iterable[Sample], domain: str) -> list[Sample]:
    return [sample for sample in samples if sample.ask.prompt.domain == domain]


def _figures(samples: Sequence[Sample], window: Window, counted: Sequence[Sample]) -> Figure:
    over = [sample for sample in counted if sample.usage is not None]
    return {
        "requests": {
            "scheduled": len(counted),
            "completed": len(over),
            "unfinished": sum(sample.ended_s is None for sample in counted),
            "errors": dict(sorted(Counter(s.error for s in counted if s.error).items())),
        },
        "rates": rates(samples, window),
        "ttft_s": spread(s.ttft_s for s in counted if s.ttft_s is not None),
        "user_tokens_per_s": spread(sample.user_rate for sample in over),
        **_gaps(counted),
        "drafts": draft_figures([s.usage for s in over if s.usage is not None]),
        "slo": attainment(over),
    }


def rates(samples: Iterable[Sample], window: Window) -> Figure:
    """Tokens per second in all and per user, and tokens per round, of what arrived in the window.

    A user's rate is tokens over the seconds in which a request of theirs was waiting or running.
    """
    num_tokens = num_rounds = num_from_rounds = 0
    running_s = 0.0
    for sample in samples:
        running_s += sample.running_s(window)
        pairs = zip(sample.chunk_s, sample.chunk_tokens, strict=True)
        for place, (at_s, tokens) in enumerate(pairs):
            if not window.holds(at_s):
                continue
            num_tokens += tokens
            if place:  # the first token comes from the prefill, not from a round
                num_rounds += 1
                num_from_rounds += tokens
    return {
        "tokens": num_tokens,
        "rounds": num_rounds,
        "tokens_per_s_total": num_tokens / window.length_s,
        "tokens_per_s_user": num_tokens / running_s if running_s else 0.0,
        "mean_concurrency": running_s / window.length_s,
        "accepted_length": num_from_rounds / num_rounds if num_rounds else None,
    }


def between_arrivals(samples: Iterable[Sample], window: Window) -> Window:
    """The window moved back to begin and end just behind a message.

    Tokens come a step at a time; of a window of some ten steps, an edge that cuts one short or
    takes one in by luck would be a tenth of the figure. Unchanged where nothing came before it.
    """
    at_s = np.sort([at for sample in samples for at in sample.chunk_s])
    edges = []
    for edge_s in (window.begin_s, window.end_s):
        place = int(np.searchsorted(at_s, edge_s))
        edges.append(math.nextafter(float(at_s[place - 1]), math.inf) if place else edge_s)
    begin_s, end_s = edges
    return Window(begin_s=begin_s, end_s=end_s) if begin_s < end_s else window


def draft_figures(usages: Sequence[Usage]) -> Figure:
    """Draft tokens of finished requests, and the same per round: ``verified_per_round`` is the
    budget that a request got, ``accepted_length`` what came of it."""
    rounds = sum(usage.rounds for usage in usages)
    counts = {
        name: sum(getattr(usage, name) for usage in usages)
        for name in ("proposed", "verified", "accepted")
    }
    return {
        "rounds": rounds,
        **counts,
        "verified_per_round": counts["verified"] / rounds if rounds else None,
        "accepted_length": accepted_length(usages),
    }


def accepted_length(usages: Sequence[Usage]) -> float | None:
    """Tokens per request and verify step: accepted drafts plus the target's own; plain is 1.

    The first token of each answer comes from the prefill, not from a round. None without rounds.
    """
    rounds = sum(usage.rounds for usage in usages)
    new = sum(usage.completion_tokens - 1 for usage in usages)
    return new / rounds if rounds else None


def attainment(samples: Sequence[Sample]) -> Figure | None:
    """How finished requests with a target rate did by it, decoding alone; None without any.

    ``attained`` is the share that reached it; ``p5`` what the slowest twentieth fell short of, as
    a share of the target.
    """
    shares = [
        rate / sample.ask.target_tokens_per_s
        for sample in samples
        if sample.ask.target_tokens_per_s is not None and (rate := sample.decode_rate) is not None
    ]
    if not shares:
        return None
    return {
        "requests": len(shares),
        "attained": float(np.mean(np.array(shares) >= 1.0)),
        "p50": float(np.percentile(shares, 50)),
        "p5": float(np.percentile(shares, 5)),
    }


def _gaps(samples: Iterable[Sample]) -> Figure:
    """Seconds between messages, and the same shared out among the tokens that a message brings."""
    between, per_token = [], []
    for sample in samples:
        gaps = np.diff(sample.chunk_s).tolist()
        between += gaps
        for gap_s, tokens in zip(gaps, sample.chunk_tokens[1:], strict=True):
            per_token += [gap_s / tokens] * tokens
    return {"inter_message_s": spread(between), "inter_token_s": spread(per_token)}


def spread(values: Iterable[float]) -> Figure | None:
    """Mean, percentiles and number of values; None without any."""
    found = np.array(list(values))
    if not found.size:
        return None
    percentiles = np.percentile(found, PERCENTILES).tolist()
    return {
        "mean": float(found.mean()),
        **{f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)},
        "count": found.size,
    }

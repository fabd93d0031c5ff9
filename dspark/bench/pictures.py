"""A load as a picture: what arrived when, and how latencies and rates are spread.

Needs matplotlib (extra ``train``).
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

from dspark.bench.sample import Sample, Window

_DPI: Final = 130
_BINS: Final = 60
_COLOUR: Final = "#0072B2"


def draw_load(
    samples: Sequence[Sample], counted: Sequence[Sample], window: Window, title: str
) -> bytes:
    """A PNG of four panels: tokens/s over time, and the distributions (share of values up to x) of
    time to first token, gap between messages and tokens/s per answer, of those that count."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    (over_time, first), (gaps, speeds) = figure.subplots(2, 2)
    _arrivals(over_time, samples, window)
    _cumulative(
        first, [s.ttft_s for s in counted if s.ttft_s is not None], "time to first token, s"
    )
    between = [gap for sample in counted for gap in np.diff(sample.chunk_s).tolist()]
    _cumulative(gaps, between, "between messages, s")
    _cumulative(
        speeds, [s.user_rate for s in counted if s.usage is not None], "tokens/s of an answer"
    )
    figure.suptitle(title, parse_math=False)
    data = BytesIO()
    figure.savefig(data, dpi=_DPI)
    return data.getvalue()


def _arrivals(axis: Any, samples: Sequence[Sample], window: Window) -> None:
    """Tokens/s over the window, in bins."""
    at_s = np.array([at for sample in samples for at in sample.chunk_s])
    tokens = np.array([n for sample in samples for n in sample.chunk_tokens])
    edges = np.linspace(window.begin_s, window.end_s, _BINS + 1)
    arrived, _ = np.histogram(at_s, edges, weights=tokens)
    axis.stairs(arrived / np.diff(edges), edges - window.begin_s, fill=True, color=_COLOUR)
    axis.set(xlabel="s since the warm-up", ylabel="tokens/s in all", ylim=(0, None))


def _cumulative(axis: Any, values: Sequence[float], label: str) -> None:
    """Share of values up to x, with the 95th percentile marked."""
    axis.set(xlabel=label, ylabel="share", ylim=(0, 1.02))
    if not values:
        axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center")
        return
    axis.ecdf(values, color=_COLOUR)
    p95 = float(np.percentile(values, 95))
    axis.axvline(p95, color="#444444", linewidth=0.8, linestyle=":")
    axis.annotate(
        f"p95 {p95:.3g}", (p95, 0.5), xytext=(-4, 0), textcoords="offset points", ha="right"
    )

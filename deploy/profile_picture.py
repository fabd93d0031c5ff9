"""A picture of throughput profiles: staircase, prior against live, and residuals.

Needs matplotlib (extra ``train``). Drawn from snapshots alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

from cluster.profile_snapshot import ProfileSnapshot, StepRecord

_PRIOR, _LIVE, _STEPS = "#999999", "#0072B2", "#D55E00"
_BAND = "#56B4E9"
_DPI: Final = 130
_MOST_OFF: Final = 0.5
"""Errors beyond are drawn at the edge."""


def draw_profiles(profiles: Sequence[tuple[str, ProfileSnapshot]]) -> bytes:
    """A PNG with a row of three panels for each verifier, by name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6 * max(len(profiles), 1)), layout="constrained")
    axes = figure.subplots(max(len(profiles), 1), 3, squeeze=False)
    for row, (name, profile) in zip(axes, profiles, strict=False):
        _staircase(row[0], name, profile)
        _sizes(row[1], profile)
        _times(row[2], profile)
    data = BytesIO()
    with matplotlib.rc_context({"text.parse_math": False}):
        figure.savefig(data, format="png", dpi=_DPI)
    return data.getvalue()


def _staircase(axis: Any, name: str, profile: ProfileSnapshot) -> None:
    """Seconds by tokens: the table at start, the table now, and the steps about it."""
    axis.plot(
        profile.tokens, _ms(profile.prior_s), "o--", color=_PRIOR, markersize=4, label="at start"
    )
    axis.plot(profile.tokens, _ms(profile.live_s), "o-", color=_LIVE, markersize=4, label="live")
    if profile.recent:
        axis.plot(
            [step.num_tokens for step in profile.recent],
            _ms([_tier_s(profile, step.num_tokens) * (1 + _off(step)) for step in profile.recent]),
            ".",
            color=_STEPS,
            markersize=3,
            alpha=0.5,
            zorder=0,
            label="live, and as far off as the step was",
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="tokens in the step", ylabel="ms", title=f"{name}: step time by tokens")
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(alpha=0.25, which="both")
    axis.legend(fontsize=8, loc="upper left")


def _sizes(axis: Any, profile: ProfileSnapshot) -> None:
    """Relative residuals by size of the step."""
    if profile.recent:
        dots = axis.scatter(
            [step.num_tokens for step in profile.recent],
            [_off(step) for step in profile.recent],
            c=[step.sum_context / max(step.num_rows, 1) for step in profile.recent],
            s=9,
            cmap="viridis",
        )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.figure.colorbar(dots, ax=axis, label="positions per row")
    _residual_frame(axis, profile)
    axis.set(xlabel="tokens in the step", title="residuals by size")


def _times(axis: Any, profile: ProfileSnapshot) -> None:
    """Relative residuals in the order in which the steps ran."""
    first = profile.num_steps - len(profile.recent)
    at = range(first, profile.num_steps)
    axis.plot(at, [_off(step) for step in profile.recent], ".", color=_STEPS, markersize=4)
    _residual_frame(axis, profile)
    errors = f"residuals by time: median error {profile.median_error:.1%}"
    alarms = f", alarms: {', '.join(profile.alarms)}" if profile.alarms else ""
    below = f"(mean {profile.mean_error:.1%}, equal steps differ by {profile.spread:.1%}{alarms})"
    title = f"{errors}\n{below}" if profile.num_steps else "residuals by time: no steps yet"
    axis.set(xlabel="step", title=title)
    axis.title.set_fontsize(10)


def _residual_frame(axis: Any, profile: ProfileSnapshot) -> None:
    axis.axhline(0, color="#444444", linewidth=0.8)
    axis.axhspan(-profile.spread, profile.spread, color=_BAND, alpha=0.25, linewidth=0)
    reach = max((abs(_off(step)) for step in profile.recent), default=0.1)
    axis.set_ylim(-1.1 * max(reach, 0.05), 1.1 * max(reach, 0.05))
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set_ylabel("actual against predicted (band: equal steps)")
    axis.grid(alpha=0.25)


def _off(step: StepRecord) -> float:
    off = step.step_s / step.predicted_s - 1 if step.predicted_s else 0.0
    return min(max(off, -_MOST_OFF), _MOST_OFF)


def _tier_s(profile: ProfileSnapshot, num_tokens: int) -> float:
    return float(np.interp(num_tokens, profile.tokens, profile.live_s))


def _ms(seconds: Sequence[float]) -> list[float]:
    return [1e3 * second for second in seconds]

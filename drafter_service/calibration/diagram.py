"""The reliability diagram: stated survival against what happened, before and after calibration.

Shape legend: N rounds, G gamma.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cluster.atomic_file import write_bytes
from cluster.errors import Unsupported
from drafter_service.calibration.figures import Figures
from drafter_service.calibration.fitting import Fitted
from drafter_service.calibration.metrics import equal_mass_starts
from drafter_service.calibration.samples import F64, Bools, Samples, sigmoid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINT_ROUNDS = 40
_MAX_POINTS = 12


def check_matplotlib() -> None:
    """Fail early, before the rounds.

    Raises:
        Unsupported: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Unsupported(
            "the reliability diagram needs matplotlib", hint="pip install 'dspark-serve[train]'"
        ) from error


def write_diagram(path: Path, regimes: Mapping[str, Fitted]) -> None:
    """Write the picture as PNG: a row per regime, before on the left, after on the right.

    Raises:
        StorageFull: the disk is full.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2 * len(regimes)), layout="constrained")
    grid = figure.subplots(len(regimes), 2, squeeze=False)
    for axes, (regime, fitted) in zip(grid, regimes.items(), strict=True):
        judgement = fitted.calibration.judgement
        assert judgement is not None
        columns = (
            ("raw", sigmoid(fitted.samples.logit), judgement.before),
            ("calibrated", fitted.left_out, judgement.after),
        )
        for panel, (title, confidence_NG, figures) in zip(axes, columns, strict=True):
            _draw(panel, fitted.samples, confidence_NG, figures)
            panel.set_title(f"{regime}, {title}")
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    write_bytes(path, buffer.getvalue())


def _draw(panel: Axes, samples: Samples, confidence_NG: F64, figures: Figures) -> None:
    import matplotlib

    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, samples.gamma))
    product_NG, survived_NG, seen_NG = (
        confidence_NG.cumprod(axis=1),
        samples.survived,
        samples.observable,
    )
    panel.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for k in range(samples.gamma):
        seen_N = seen_NG[:, k]
        if not seen_N.any():
            continue
        stated, happened = reliability_points(product_NG[seen_N, k], survived_NG[seen_N, k])
        label = f"{k + 1}: {100 * (figures.ece[k] or 0.0):.1f}%"
        panel.plot(stated, happened, "o-", color=colours[k], label=label, markersize=4)
    panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="stated survival", ylabel="share that survived")
    panel.set_aspect("equal")
    panel.grid(alpha=0.3)
    panel.legend(title="position: ECE", fontsize="small")


def reliability_points(stated_N: F64, happened_N: Bools) -> tuple[F64, F64]:
    """Means of equally filled bins, of at least `_POINT_ROUNDS` rounds where there are as many."""
    order_N = np.argsort(stated_N, kind="stable")
    num_bins = int(np.clip(len(order_N) // _POINT_ROUNDS, 1, _MAX_POINTS))
    starts_B = equal_mass_starts(len(order_N), num_bins)
    sizes_B = np.diff(np.append(starts_B, len(order_N)))
    return (
        np.add.reduceat(stated_N[order_N], starts_B) / sizes_B,
        np.add.reduceat(happened_N[order_N].astype(np.float64), starts_B) / sizes_B,
    )

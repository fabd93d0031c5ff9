"""What a run has measured so far: the learning curve, as data and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.atomic_file import write_bytes
from drafter_service.training.evaluation import Evaluation


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step."""

    step: int
    loss: float
    cross_entropy: float
    total_variation: float
    confidence: float
    gradient_norm: float


@dataclass(kw_only=True)
class LearningCurve:
    """Every step's losses and every evaluation, in order."""

    steps: list[StepRecord] = field(default_factory=list)
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)
    """(steps done, figures)"""

    @property
    def best(self) -> float:
        """Highest evaluation score so far; minus infinity before the first."""
        return max((figures.score for _, figures in self.evaluations), default=float("-inf"))

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [asdict(record) for record in self.steps],
            "evaluations": [
                {"step": step, **asdict(e), "acceptance": list(e.acceptance)}
                for step, e in self.evaluations
            ],
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> LearningCurve:
        """Inverse of `to_json`."""
        evaluations = []
        for entry in raw["evaluations"]:
            figures = {name: value for name, value in entry.items() if name != "step"}
            figures["acceptance"] = tuple(figures["acceptance"])
            evaluations.append((entry["step"], Evaluation(**figures)))
        return cls(steps=[StepRecord(**record) for record in raw["steps"]], evaluations=evaluations)

    def write(self, folder: Path) -> None:
        """Write ``curve.json`` and, with matplotlib (extra ``train``), ``curve.png``."""
        write_bytes(folder / "curve.json", (json.dumps(self.to_json()) + "\n").encode())
        try:
            import matplotlib
        except ImportError:
            return
        matplotlib.use("Agg")
        write_bytes(folder / "curve.png", self._picture())

    def _picture(self) -> bytes:
        from io import BytesIO

        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        losses, lengths = figure.subplots(1, 2)
        steps = [record.step for record in self.steps]
        for name in ("total_variation", "confidence", "loss"):
            losses.plot(steps, _smooth([getattr(r, name) for r in self.steps]), label=name)
        losses.set(title="training losses (running mean)", xlabel="step")
        at = [step for step, _ in self.evaluations]
        lengths.plot(at, [e.greedy_length for _, e in self.evaluations], label="greedy")
        lengths.plot(at, [e.expected_length for _, e in self.evaluations], label="temperature 1")
        lengths.set(title="accepted length, held out", xlabel="step")
        for axes in (losses, lengths):
            axes.grid(alpha=0.3)
            axes.legend()
        buffer = BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def _smooth(values: list[float], weight: float = 0.05) -> list[float]:
    out: list[float] = []
    for value in values:
        out.append(value if not out else out[-1] + weight * (value - out[-1]))
    return out

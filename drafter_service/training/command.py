"""Training on the command line: progress display, the call into the trainer.

`dspark.commands.train` is the whole command. Importing this module is cheap: `run` loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drafter_service.training.config import TrainConfig

if TYPE_CHECKING:
    from rich.progress import Progress

    from drafter_service.training.trainer import StepReport


def progress_bar(*, shown: bool = True) -> Progress:
    """A bar with a count and the time that is left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        disable=not shown,
    )


def run(config: TrainConfig) -> int:
    """Train, showing progress. Returns the exit status; errors are raised for the CLI to show."""
    from drafter_service.training.ranks import joined
    from drafter_service.training.trainer import train

    with joined(config.device) as ranks, progress_bar(shown=ranks.is_main) as bar:
        task = bar.add_task("preparing", total=config.schedule.num_steps)

        def show(report: StepReport) -> None:
            bar.update(task, completed=report.steps_done, description=f"loss {report.loss:.3f}")
            if report.evaluation is not None:
                bar.console.print(summary(report))

        train(config, show)
    if ranks.is_main:
        print(f"drafter written to {config.output}, learning curve to {config.work}")
    return 0


def summary(report: StepReport) -> str:
    """One line of figures for a step that ended with an evaluation."""
    figures = report.evaluation
    assert figures is not None
    greedy = "" if figures.greedy_length is None else f"{figures.greedy_length:.2f} greedy, "
    acceptance = " ".join(f"{value:.2f}" for value in figures.acceptance)
    return (
        f"step {report.steps_done}: accepted length {greedy}{figures.expected_length:.2f} at "
        f"temperature 1; acceptance by position {acceptance}"
    )

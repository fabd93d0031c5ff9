"""Phases and progress of a slow start: a spinner and a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


@contextmanager
def erased_on_failure(bar: Progress) -> Iterator[Progress]:
    """Show the bar; an error that ends the block leaves no line of it above its message."""
    bar.start()
    try:
        yield bar
    except BaseException:
        bar.live.transient = True
        bar.live.stop()  # the bar's own `stop` prints an empty line where there is no terminal
        raise
    bar.stop()


class _OnceKnown(ProgressColumn):
    """Another column, blank until the amount of work is known."""

    def __init__(self, column: ProgressColumn) -> None:
        super().__init__()
        self._column = column

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self._column.render(task)


class Phases:
    """Names the current phase; `report` shows how far a fetch is within it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._began_s = 0.0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            _OnceKnown(BarColumn(bar_width=24)),
            _OnceKnown(DownloadColumn()),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            self.done()
        self._progress.stop()

    def done(self) -> None:
        """End the last phase and the display; the terminal is the caller's again."""
        self._close_phase()
        self._progress.stop()

    def phase(self, name: str) -> None:
        """Begin a phase."""
        self._close_phase()
        self._name, self._began_s = name, time.monotonic()
        self._progress.reset(self._task, description=name, total=None)

    def report(self, step: str, done: int, total: int) -> None:
        """Progress within the phase: ``total`` 0 when it is not known."""
        description = f"{self._name}: {step}"
        self._progress.update(
            self._task, description=description, completed=done, total=total or None
        )

    def _close_phase(self) -> None:
        if self._name:
            took_s = time.monotonic() - self._began_s
            self._console.print(f"  {self._name} ({took_s:.0f} s)", highlight=False)
        self._name = ""

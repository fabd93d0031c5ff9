"""How the demo shows itself: live rows on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dspark.demo.figures import Answer, Side


class Streams:
    """The answers of one run as they grow."""

    def __init__(self, console: Console, title: str, names: Sequence[str]) -> None:
        self._console = console
        self._title = title
        self._texts = dict.fromkeys(names, "")
        self._num_tokens = dict.fromkeys(names, 0)
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"{self._title}:", highlight=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def grow(self, name: str, text: str, num_tokens: int) -> None:
        """More of one answer has arrived."""
        self._texts[name] += text
        self._num_tokens[name] += num_tokens

    def end(self, answer: Answer) -> None:
        """One answer is complete."""
        if not self._console.is_terminal:
            speed = answer.usage.completion_tokens / answer.total_s
            self._console.print(
                f"  {answer.name}: {answer.usage.completion_tokens} tokens, {speed:.1f} tokens/s",
                highlight=False,
                markup=False,
            )

    def _render(self) -> Table:
        table = Table(title=self._title, expand=True, box=None, padding=(0, 1))
        table.add_column("prompt", no_wrap=True)
        table.add_column("tokens", justify="right")
        table.add_column("answer", ratio=1, no_wrap=True)
        for name, text in self._texts.items():
            tail = " ".join(text.split())[-self._console.width :]
            # The newest words matter: cut on the left.
            room = max(self._console.width - 34, 10)
            table.add_row(name, str(self._num_tokens[name]), Text(tail[-room:]))
        return table


def show_answers(console: Console, answers: Sequence[Answer], prompts: Sequence[str]) -> None:
    """Print questions and answers in full."""
    for answer, prompt in zip(answers, prompts, strict=True):
        console.print(Text(f"\n{answer.name}: {prompt}", style="bold"))
        console.print(Text(answer.text.strip()))


def figures_table(drafted: Side, plain: Side, per_step: tuple[float, float], title: str) -> Table:
    """Both ways of decoding, side by side.

    Args:
        per_step: tokens emitted per step of the target over all requests, drafted and plain.
    """
    table = Table(title=title)
    for column in ("", "drafted", "plain", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    rows = (
        ("accepted length", drafted.accepted_length, plain.accepted_length),
        ("tokens per verify step", *per_step),
        ("tokens/s per user", drafted.tokens_per_s_user, plain.tokens_per_s_user),
        ("tokens/s in all", drafted.tokens_per_s_total, plain.tokens_per_s_total),
        ("time to first token, s", drafted.ttft_s, plain.ttft_s),
    )
    for name, ours, theirs in rows:
        ratio = f"{ours / theirs:.2f}x" if theirs else "-"
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", ratio)
    for name in ("proposed", "verified", "accepted"):
        count, other = getattr(drafted, name), getattr(plain, name)
        table.add_row(f"draft tokens {name}", str(count), str(other), "")
    return table

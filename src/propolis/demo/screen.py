"""What the viewer sees: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from propolis.core.protocols import Counts

STATES = ("ready", "scheduled", "running", "done", "dead")


class Screen:
    """`add` adds a line of news; `show` shows where the jobs are now."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._lines: list[str] = []
        self._live: Live | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if sys.stdout.isatty():
            self._live = Live(console=self._console, refresh_per_second=8)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def add(self, line: str) -> None:
        self._lines.append(line)
        if self._live is None:
            print(line, flush=True)

    def show(self, seconds: float, queues: dict[str, Counts], workers: list[str], total: int) -> None:
        if self._live is not None:
            self._live.update(self._frame(seconds, queues, workers, total))
            return
        now = ", ".join(f"{sum(getattr(c, s) for c in queues.values())} {s}" for s in STATES)
        if now != self._last:
            print(f"  {seconds:4.1f} s  {now}", flush=True)
            self._last = now

    def _frame(self, seconds: float, queues: dict[str, Counts], workers: list[str], total: int) -> Panel:
        table = Table(expand=True)
        table.add_column("queue")
        for state in STATES:
            table.add_column(state, justify="right")
        for name, counts in queues.items():
            table.add_row(name, *(str(getattr(counts, state)) for state in STATES))
        ended = sum(counts.done + counts.dead for counts in queues.values())
        parts: list[RenderableType] = [
            table,
            ProgressBar(total=total, completed=ended),
            Text(f"workers: {', '.join(workers)}"),
            *(Text(line) for line in self._lines[-8:]),
        ]
        return Panel(Group(*parts), title=f"propolis demo, {seconds:.1f} s")

"""What commands print: tables for people, JSON for programs, and nothing that could steer a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # rich costs 20 ms and more: a worker, or a script that wants JSON, does not pay them
    from rich.console import Console
    from rich.table import Table

WIDE = 1000  # columns of a list: an id that is cut or folded cannot be copied, so the terminal wraps the line

Cell = str | int | float | datetime | None


def clean(text: str, *, lines: bool = False) -> str:
    """`text` with every character that could move a cursor, or turn the reading direction, spelt out."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else _spelt(c) for c in text)


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def shown_time(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def shown_span(span: timedelta) -> str:
    """The two largest units: 4s, 3m07s, 2h05m, 9d04h."""
    seconds = max(0, int(span.total_seconds()))
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if not minutes:
        return f"{seconds}s"
    if not hours:
        return f"{minutes}m{seconds % 60:02}s"
    if not days:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24:02}h"


def counted(number: int) -> str:
    return "1 job" if number == 1 else f"{number:,} jobs"


class Output:
    """Where a command writes what it found.  With `as_json`, standard output is for programs only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str) -> None:
        """Write text for people; a program gets the same as a document."""
        if not self.as_json:
            click.echo(clean(text, lines=True))

    def note(self, text: str) -> None:
        """Write to the standard error what stands beside the answer and is no part of it."""
        click.echo(clean(text, lines=True), err=True)

    def document(self, value: Any) -> None:
        """Write one line of JSON, in ASCII: other characters may be bidirectional or control a terminal."""
        if self.as_json:
            click.echo(json.dumps(value, default=_plain))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """Write a table.  A column whose name begins with ">" is set flush right."""
        if not self.as_json:
            console().print(make_table(columns, rows))

    def fields(self, fields: Mapping[str, Cell]) -> None:
        """Write names and values under one another; what is None or empty is left out."""
        given = {name: _cell(value, lines=True) for name, value in fields.items() if value not in (None, "")}
        width = max(map(len, given), default=0)
        for name, value in given.items():
            self.say(f"{name:<{width}}  " + value.rstrip().replace("\n", "\n" + " " * (width + 2)))


def _plain(value: object) -> str:
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    raise TypeError(f"{type(value).__qualname__} has no JSON form")


def _cell(value: Cell, *, lines: bool = False) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return shown_time(value)
        case str():
            return clean(value, lines=lines)
        case int():
            return f"{value:,}"
        case _:
            return f"{value:,.1f}"


def console(*, screen: bool = False) -> Console:
    """For lists, or for what fills the `screen` of a terminal and has to fit into it."""
    from rich.console import Console

    width = None if screen and sys.stdout.isatty() else WIDE
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, cut: bool = False) -> Table:
    """Where there is no room for a cell it takes several lines, or, with `cut`, loses its end."""
    from rich.table import Table
    from rich.text import Text

    def text(value: Cell) -> Text:
        return Text(_cell(value), no_wrap=cut, overflow="ellipsis" if cut else "fold")

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(text(name.removeprefix(">")), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*map(text, row))
    return table

"""What commands print: tables for people, JSON for programs, and nothing that could steer a terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # rich costs 20 ms and more: a worker, or a script that wants JSON, does not pay them
    from rich.console import Console
    from rich.table import Table

WIDE = 1000  # columns of what is no terminal: a cut id is of no use to the next program
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^/\s@]+@")

Cell = str | int | float | datetime | None


def clean(text: str, *, lines: bool = False) -> str:
    """`text` with every character that could move a cursor, or turn the reading direction, spelt out."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else _spelt(c) for c in text)


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def masked_text(text: str) -> str:
    """`text` without the passwords of the URLs in it."""
    return _PASSWORD.sub(r"\1:***@", text)


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
    """Where a command says what it found.  With `as_json`, standard output is for programs only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str) -> None:
        """For people; a program gets the same as a document."""
        if not self.as_json:
            click.echo(clean(text, lines=True))

    def note(self, text: str) -> None:
        """Beside the answer, not part of it."""
        click.echo(clean(text, lines=True), err=True)

    def document(self, value: Any) -> None:
        """One line of JSON, in ASCII: what is outside of it may be bidirectional or control characters."""
        if self.as_json:
            click.echo(json.dumps(value, default=_plain))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
        """A column whose name begins with ">" is set flush right."""
        if not self.as_json:
            console().print(make_table(columns, rows))

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Names and values under one another; what is None or empty is left out."""
        given = {name: _cell(value, lines=True) for name, value in facts.items() if value not in (None, "")}
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


def console() -> Console:
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout, width=None if terminal else WIDE, highlight=False, markup=False, emoji=False
    )


def make_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, title: str | None = None) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    return table

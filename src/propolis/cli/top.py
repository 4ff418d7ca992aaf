"""`propolis top`: queues, rates and running jobs, live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import asdict

from propolis.cli.console.job_views import progress_of, short_fields
from propolis.cli.console.output import Cell, console, make_table, shown_span
from propolis.cli.console.session import Session, looks_at_app
from propolis.cli.console.values import span
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Counts, Filter, Inspects
from propolis.engines.address import masked

if TYPE_CHECKING:  # see output.py
    from rich.console import Group

MAX_RUNNING = 50
HEAD = 8  # lines of a screen that are neither a queue nor a running job


class View(Struct, frozen=True):
    """The queues and the running jobs at one moment."""

    at: datetime
    counts: dict[str, Counts]
    running: list[JobInfo]


class Speed(Struct, frozen=True):
    """Jobs per second that came and that ended."""

    put: float
    ended: float


@click.command()
@click.option("--once", is_flag=True, help="Print what is there now, and end.")
@click.option("--interval", type=span, default="1s", show_default=True, help="How often to refresh.")
@looks_at_app
async def top(session: Session, once: bool, interval: Any) -> None:
    """Watch queues and running jobs.  q or Ctrl-C ends it.

    Where the output is no terminal, everything is printed once.
    """
    if once or session.out.as_json or not sys.stdout.isatty():
        view = await current_view(session)
        session.out.document(document(view))
        if not session.out.as_json:
            console().print(frame(session.app.url, view, {}, MAX_RUNNING))
        return
    with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how it ends, not a failure
        await watch(session, interval.total_seconds())


async def current_view(session: Session) -> View:
    engine = await session.app.client.piece(Inspects)
    running = await session.jobs.afind(Filter(state=State.RUNNING), limit=MAX_RUNNING)
    return View(await engine.now(), await engine.queues(), running)


async def watch(session: Session, seconds: float) -> None:
    from rich.live import Live

    screen = console(screen=True)
    before: View | None = None
    with Live(console=screen, screen=True, auto_refresh=False) as live, _q_pressed() as ended:
        # Also where SIGINT is ignored, as it is for what a shell has started in the background.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
        while not ended.is_set():
            view = await current_view(session)
            rates = rates_between(before, view) if before is not None else {}
            room = max(1, screen.height - len(view.counts) - HEAD)
            live.update(frame(session.app.url, view, rates, room), refresh=True)
            before = view
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), seconds)


def rates_between(before: View, after: View) -> dict[str, Speed]:
    """The rates of each queue.  A job has ended if it neither waits nor runs, whether it is kept or not."""
    seconds = (after.at - before.at).total_seconds()
    rates = {}
    for queue, now in after.counts.items():
        then = before.counts.get(queue, Counts())
        put, ended = now.put - then.put, _ended(now) - _ended(then)
        rates[queue] = Speed(max(0, put) / seconds, max(0, ended) / seconds) if seconds > 0 else Speed(0, 0)
    return rates


def _ended(counts: Counts) -> int:
    return counts.put - counts.waiting - counts.running


def document(view: View) -> dict[str, Any]:
    return {
        "at": view.at,
        "queues": {name: asdict(counts) for name, counts in view.counts.items()},
        "running": [short_fields(info, view.at) for info in view.running],
    }


def frame(url: str, view: View, rates: dict[str, Speed], room: int) -> Group:
    from rich.console import Group
    from rich.text import Text

    head = Text(f"propolis top   {masked(url)}   {view.at:%H:%M:%S}   q ends", style="dim", no_wrap=True)
    parked = ("parked",) if any(counts.parked for counts in view.counts.values()) else ()
    states = ("ready", "scheduled", "held", *parked, "running", "dead")
    columns = ["queue", *(f">{state}" for state in states), ">in/s", ">out/s"]
    queues = make_table(columns, [queue_row(name, states, view, rates) for name in view.counts], cut=True)
    columns = ["running", "task", "queue", ">attempt", ">for", "holder", "progress"]
    running = make_table(columns, [running_row(info, view.at) for info in view.running[:room]], cut=True)
    return Group(head, Text(), queues, Text(), running)


def queue_row(name: str, states: Iterable[str], view: View, rates: dict[str, Speed]) -> list[Cell]:
    counts, rate = view.counts[name], rates.get(name)
    speed: list[Cell] = ["–", "–"] if rate is None else [rate.put, rate.ended]
    return [name, *(getattr(counts, state) for state in states), *speed]


def running_row(info: JobInfo, now: datetime) -> list[Cell]:
    age = shown_span(now - info.started_at) if info.started_at else ""
    return [info.id, info.task, info.queue, info.attempts, age, info.holder, progress_of(info)]


@contextlib.contextmanager
def _q_pressed() -> Iterator[asyncio.Event]:
    """An event that is set when somebody presses q, where there is a keyboard to listen to."""
    pressed = asyncio.Event()
    try:
        import termios
        import tty
    except ImportError:  # not on Windows: Ctrl-C it is
        yield pressed
        return
    if not sys.stdin.isatty():
        yield pressed
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, lambda: pressed.set() if b"q" in os.read(keyboard, 64) else None)
    try:
        yield pressed
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)

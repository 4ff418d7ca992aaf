"""What every command but `worker` begins with: which app, on which engine, and how to answer."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Concatenate, ParamSpec

import click

from propolis.app.loading import load_app
from propolis.app.operate.batches import StoredBatches
from propolis.app.operate.jobs import Jobs
from propolis.app.operate.limits import LimitSettings
from propolis.app.operate.queues import Queues
from propolis.app.operate.schedules import Schedules
from propolis.app.operate.workers import Workers
from propolis.app.registry import Registry
from propolis.cli.console.output import Output
from propolis.core.protocols import Inspects
from propolis.errors import BadSetting

P = ParamSpec("P")

PROBLEMS = 1  # the exit code of a command that ran, and found something wrong, or nothing at all


class Session:
    """An app, for as long as one command runs.  `declares` says whether its tasks are known."""

    def __init__(self, app: Registry, *, declares: bool, out: Output) -> None:
        self.app = app
        self.declares = declares
        self.jobs = Jobs(app.client)
        self.queues = Queues(app.client)
        self.limits = LimitSettings(app.client)
        self.batches = StoredBatches(app.client)
        self.schedules = Schedules(app.client, app.declared_schedules)
        self.workers = Workers(app.client)
        self.out = out

    async def now(self) -> datetime:
        """By the clock of the engine."""
        return await (await self.app.client.piece(Inspects)).now()


Command = Callable[Concatenate[Session, P], Coroutine[Any, Any, int | None]]


def looks_at_app(command: Command[P]) -> Callable[P, None]:
    """`on_app` for a command that only looks: storage that is not there stays so, and is an error."""
    return on_app(command, looks=True)


def on_app(command: Command[P], *, looks: bool = False) -> Callable[P, None]:
    """Make a coroutine function the body of a command; what it returns is the exit code."""

    @click.option(
        "--app",
        metavar="MOD:APP",
        expose_value=False,
        callback=_remember,
        help="Where the app is, such as tasks:app.",
    )
    @click.option(
        "--url", expose_value=False, callback=_remember, help="The engine, such as sqlite:///jobs.db."
    )
    @click.option(
        "--json", "as_json", is_flag=True, expose_value=False, callback=_remember, help="Answer in JSON."
    )
    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        context = click.get_current_context()
        if context.invoked_subcommand is not None:
            return
        app, declares = find_app(_given(context, "app"), _given(context, "url"))
        app.client.looks = looks
        session = Session(app, declares=declares, out=Output(bool(_given(context, "as_json"))))
        code = asyncio.run(_run(session, command(session, *args, **kwargs)))
        if code:
            context.exit(code)

    return run


def find_app(path: str | None, url: str | None) -> tuple[Registry, bool]:
    """The app, and whether its tasks are known.  The environment counts where neither option is given."""
    if path is None and url is None:
        path, url = os.environ.get("PROPOLIS_APP") or None, os.environ.get("PROPOLIS_URL") or None
    if path is not None:
        app = load_app(path)
        app.url = url or app.url
        return app, True
    if url is not None:
        return Registry(url), False
    raise BadSetting(
        "which app?  Give --app MOD:APP (or set PROPOLIS_APP), "
        "or the URL of its engine with --url (or PROPOLIS_URL)"
    )


async def _run(session: Session, command: Coroutine[Any, Any, int | None]) -> int | None:
    try:
        return await command
    finally:
        await session.app.aclose()


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Keep the value where a command finds what was given to its group: both take these options."""
    if value and parameter.name:
        context.meta[f"propolis.{parameter.name}"] = value


def _given(context: click.Context, name: str) -> str | None:
    found: str | None = context.meta.get(f"propolis.{name}")
    return found

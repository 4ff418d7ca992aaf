"""What every command but `worker` begins with: which app, on which engine, and how to answer."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

import click

from skep.cli.output import Output
from skep.errors import BadSetting
from skep.loading import load_app
from skep.operations import Batches, Jobs, Queues
from skep.registry import Registry
from skep.schedules import Schedules

P = ParamSpec("P")

PROBLEMS = 1  # the exit code for: it was done, and what was looked for is missing, or wrong


class Session:
    """An app for the time of one command.  `declares` tells whether its tasks are known."""

    def __init__(self, app: Registry, *, declares: bool, out: Output) -> None:
        self.app = app
        self.declares = declares
        self.jobs = Jobs(app)
        self.queues = Queues(app)
        self.batches = Batches(app)
        self.schedules = Schedules(app, app.declared_schedules)
        self.out = out


Command = Callable[Concatenate[Session, P], Coroutine[Any, Any, int | None]]


def on_app(command: Command[P]) -> Callable[P, None]:
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
        session = Session(app, declares=declares, out=Output(bool(_given(context, "as_json"))))
        code = asyncio.run(_run(session, command(session, *args, **kwargs)))
        if code:
            context.exit(code)

    return run


def find_app(path: str | None, url: str | None) -> tuple[Registry, bool]:
    """The app, and whether its tasks are known.  The environment counts where neither option is given."""
    if path is None and url is None:
        path, url = os.environ.get("SKEP_APP") or None, os.environ.get("SKEP_URL") or None
    if path is not None:
        app = load_app(path)
        app.url = url or app.url
        return app, True
    if url is not None:
        return Registry(url), False
    raise BadSetting(
        "which app?  Give --app MOD:APP (or set SKEP_APP), or the URL of its engine with --url (or SKEP_URL)"
    )


async def _run(session: Session, command: Coroutine[Any, Any, int | None]) -> int | None:
    try:
        return await command
    finally:
        await session.app.aclose()


def _remember(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Keep it where a command finds what was given to its group: both take these options."""
    if value and parameter.name:
        context.meta[f"skep.{parameter.name}"] = value


def _given(context: click.Context, name: str) -> str | None:
    found: str | None = context.meta.get(f"skep.{name}")
    return found

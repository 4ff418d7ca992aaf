"""`propolis init`."""

from __future__ import annotations

import click

from propolis.cli.console.session import Session, on_app
from propolis.core.protocols import Installs, Scripted
from propolis.engines import make_engine
from propolis.engines.address import Address, masked
from propolis.errors import BadSetting


@click.command()
@click.option("--sql", is_flag=True, help="Print what would be executed on empty storage, and touch nothing.")
@click.option(
    "--prune", is_flag=True, help="Also remove the functions of old code, of which the newest five stay."
)
@on_app
async def init(session: Session, sql: bool, prune: bool) -> None:
    """Create the storage, or bring it up to date.  Doing so twice does no harm.

    Workers and commands that change something make empty storage by themselves, and SQLite also migrates
    it.  On PostgreSQL only `init` changes tables that are there, or an open with ?migrate=auto.  Commands
    that only look change nothing.
    """
    url = masked(session.app.url)
    if sql:
        script = script_for(session.app.url)
        session.out.say(script)
        session.out.document({"url": url, "sql": script})
        return
    done = await installed(session.app.url, prune=prune)
    engine = await session.app.client.ready()
    durability = engine.durability.name.lower()
    for each in done:
        session.out.say(each)
    session.out.say(f"{url} is ready (durability: {durability})")
    session.out.document(
        {"url": url, "engine": type(engine).__name__, "durability": durability, "done": done}
    )


async def installed(url: str, *, prune: bool) -> list[str]:
    """What was done to the storage of the URL's engine; what an open does by itself is not told."""
    engine = make_engine(url)
    if isinstance(engine, Installs):
        return await engine.install(prune=prune)
    if prune:
        raise BadSetting(f"{Address(url).scheme}:// has no functions to remove: leave --prune out")
    return []


def script_for(url: str) -> str:
    """The SQL that makes the storage of the URL's engine; `BadSetting` if that engine needs none."""
    engine = make_engine(url)
    if not isinstance(engine, Scripted):
        raise BadSetting(f"{Address(url).scheme}:// needs no SQL: leave --sql out")
    return engine.script()

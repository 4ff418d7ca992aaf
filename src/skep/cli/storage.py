"""`skep init`."""

from __future__ import annotations

import click

from skep.address import Address, masked
from skep.brokers.statements import load_migrations
from skep.cli.session import Session, on_app
from skep.errors import BadSetting

SQL = {"sqlite": "sqlite", "postgres": "postgres", "postgresql": "postgres"}


@click.command()
@click.option("--sql", is_flag=True, help="Print what would be executed on empty storage, and touch nothing.")
@on_app
async def init(session: Session, sql: bool) -> None:
    """Create the storage, or bring it up to date.  Doing so twice does no harm.

    Every command does this by itself; `init` is for those who deploy in steps, or without the right
    to create tables.
    """
    url = masked(session.app.url)
    if sql:
        script = script_for(session.app.url)
        session.out.say(script)
        session.out.document({"url": url, "sql": script})
        return
    engine = await session.app.ready()
    durability = engine.durability.name.lower()
    session.out.say(f"{url} is ready (durability: {durability})")
    session.out.document({"url": url, "engine": type(engine).__name__, "durability": durability})


def script_for(url: str) -> str:
    """All migrations of the URL's engine, as one script."""
    scheme = Address(url).scheme
    folder = SQL.get(scheme.rpartition("+")[2])
    if folder is None:
        raise BadSetting(f"{scheme}:// needs no SQL: leave --sql out")
    try:
        migrations = load_migrations(folder)
    except FileNotFoundError:
        raise BadSetting(f"this version of skep has no engine for {scheme}://") from None
    parts = []
    for number, file, script in migrations:
        parts.append(f"-- {file}\n{script.rstrip()}")
        if folder == "sqlite":  # where this engine keeps the number of its newest migration
            parts.append(f"PRAGMA user_version = {number};")
    return "\n".join(["BEGIN;", *parts, "COMMIT;"])

"""`skep init`."""

from __future__ import annotations

import click

from skep.address import Address, masked
from skep.brokers import postgres_schema
from skep.brokers.statements import load_migrations
from skep.cli.session import Session, on_app
from skep.errors import BadSetting


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
    address = Address(url)
    match address.scheme.rpartition("+")[2]:
        case "postgres" | "postgresql":
            return postgres_schema.script(address.options.get("schema", postgres_schema.SCHEMA))
        case "sqlite":
            return _sqlite_script()
        case _:
            raise BadSetting(f"{address.scheme}:// needs no SQL: leave --sql out")


def _sqlite_script() -> str:
    parts = []
    for number, file, script in load_migrations("sqlite"):
        parts.append(f"-- {file}\n{script.rstrip()}")
        parts.append(f"PRAGMA user_version = {number};")  # where this engine keeps the newest one's number
    return "\n".join(["BEGIN;", *parts, "COMMIT;"])

"""The tables of the SQLite engine: which migrations a file has, and how it gets the others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from propolis.engines.shared.migrations import Installed, Migration, made_by, pending
from propolis.engines.shared.statements import load_migrations
from propolis.engines.sqlite.rows import SQL
from propolis.errors import SchemaDrifted


def missing(db: sqlite3.Connection, where: str) -> list[Migration]:
    """The migrations that are still to be run; `SchemaTooNew` or `SchemaDrifted` if none must be.

    The file may hold other people's tables, whose `user_version` is not ours either.
    """
    known = load_migrations("sqlite")
    tables = {name for (name,) in db.execute(SQL["tables"])}
    installed: list[Installed] = []
    if "propolis_migration" in tables:
        installed = [Installed(*row) for row in db.execute(SQL["installed"])]
    elif "propolis_job" in tables:
        raise SchemaDrifted(where, "nothing says which migrations made its tables")
    left = pending(known, installed, where)
    gone = [name for name in made_by(known[: len(known) - len(left)]) if name not in tables]
    if gone:
        raise SchemaDrifted(where, f"without {', '.join(gone)}")
    return left


def run(db: sqlite3.Connection, migrations: Iterable[Migration]) -> None:
    for migration in migrations:
        for statement in _statements_of(_recorded(migration)):
            db.execute(statement)


def script() -> str:
    """All migrations, for whoever may not let the engine run them."""
    parts = [f"-- {each.file}\n{_recorded(each)}" for each in load_migrations("sqlite")]
    return "\n".join(["BEGIN;", *parts, "COMMIT;"])


def _recorded(migration: Migration) -> str:
    """Its script, and what keeps it from being run again."""
    return (
        f"{migration.script.rstrip()}\n"
        f"INSERT INTO propolis_migration (number, checksum, compatible_from) "
        f"VALUES ({migration.number}, '{migration.checksum}', {migration.compatible_from});"
    )


def _statements_of(script: str) -> list[str]:
    """The statements of a script one by one, since executescript would commit in between."""
    found, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            found.append(begun)
            begun = ""
    return found

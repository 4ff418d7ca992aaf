"""The schema that the PostgreSQL engine lives in: its name in statements, and the script that makes it."""

from __future__ import annotations

import re

from skep.brokers.statements import load_migrations

SCHEMA = "skep"

_OURS = re.compile(r"\bskep\.(?=\w)")


def quoted(name: str) -> str:
    """A name as an SQL identifier, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def in_schema(statement: str, schema: str) -> str:
    """A statement of ours, which speaks of the schema `skep`, for another one."""
    name = quoted(schema)
    return _OURS.sub(lambda _: f"{name}.", statement)


def prelude(schema: str) -> str:
    """What comes before the migrations, in their transaction: they name no schema."""
    name = quoted(schema)
    return f"CREATE SCHEMA IF NOT EXISTS {name};\nSET LOCAL search_path TO {name}, pg_temp;"


def recorded(number: int) -> str:
    """What comes after a migration, so that nobody runs it again."""
    return f"INSERT INTO migration (number) VALUES ({number:d});"


def script(schema: str) -> str:
    """All that makes the schema, for those who may not let the engine do it."""
    parts = [
        f"-- {file}\n{text.rstrip()}\n{recorded(number)}"
        for number, file, text in load_migrations("postgres")
    ]
    return "\n\n".join(["BEGIN;", prelude(schema), *parts, "COMMIT;"])

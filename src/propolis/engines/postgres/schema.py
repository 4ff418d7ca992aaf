"""The schema that the PostgreSQL engine lives in: its names in statements, and the SQL that makes it.

Tables are in a schema of any name.  Functions are beside it, in one that is named after their text, so that
those of older and newer code stand side by side on the same tables: a *set*.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache

from propolis.engines.shared.migrations import Migration
from propolis.engines.shared.statements import load_functions, load_migrations
from propolis.errors import BadSetting

SCHEMA = "propolis"
LONGEST = 48  # bytes: the names of the set and of the channel have 63 at most

_OURS = re.compile(r"\bpropolis(_f)?\.(?=\w)")


def check_name(schema: str) -> None:
    """`BadSetting` for what cannot be the name of a schema of ours."""
    if not schema or "\x00" in schema or len(schema.encode()) > LONGEST:
        raise BadSetting(f"schema={schema!r}: give a name of 1 to {LONGEST} bytes")
    if schema == "$user":  # which a search path takes for the name of whoever is there
        raise BadSetting("schema='$user' means another schema to every user: give a name of its own")


def quoted(name: str) -> str:
    """A name as an SQL identifier, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def is_set(name: str, schema: str) -> bool:
    """Whether a schema can be one of our functions, for the tables in this schema."""
    return re.fullmatch(rf"{re.escape(schema)}_f_[0-9a-f]{{12}}", name) is not None


def set_of(schema: str) -> str:
    """The name of the schema with our own functions."""
    return f"{schema}_f_{_fingerprint()}"


@cache
def _fingerprint() -> str:
    return hashlib.sha256(load_functions("postgres").encode()).hexdigest()[:12]


def in_schema(statement: str, schema: str, functions: str | None = None) -> str:
    """A statement of ours, which speaks of tables in `propolis` and functions in `propolis_f`."""
    names = {None: f"{quoted(schema)}.", "_f": f"{quoted(functions or set_of(schema))}."}
    return _OURS.sub(lambda found: names[found[1]], statement)


def locked(schema: str) -> str:
    """What lets one after the other change what is installed.  The lock ends with the transaction."""
    return f"SELECT pg_advisory_xact_lock(hashtextextended({_text(f'propolis:{schema}')}, 0));"


def prelude(schema: str) -> str:
    """What comes before the migrations, in their transaction: they name no schema."""
    name = quoted(schema)
    return f"CREATE SCHEMA IF NOT EXISTS {name};\nSET LOCAL search_path TO {name}, pg_temp;"


def migrated(migration: Migration) -> str:
    """A migration, and what keeps everybody from running it again."""
    return (
        f"-- {migration.file}\n{migration.script.rstrip()}\n"
        f"INSERT INTO migration (number, checksum, compatible_from)\n"
        f"VALUES ({migration.number:d}, '{migration.checksum}', {migration.compatible_from:d});"
    )


def function_set(schema: str) -> str:
    """What installs our functions.  They call one another in any order, so bodies are not checked yet."""
    name = set_of(schema)
    return (
        f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE;\n"  # of tables that were dropped
        f"CREATE SCHEMA {quoted(name)};\n"
        f"GRANT USAGE ON SCHEMA {quoted(name)} TO PUBLIC;\n"  # the rights on tables are what counts
        f"SET LOCAL search_path TO {quoted(name)}, {quoted(schema)}, pg_temp;\n"
        f"SET LOCAL check_function_bodies = off;\n"
        f"{load_functions('postgres')}\n"
        f"INSERT INTO function_set (name, knows)\n"
        f"VALUES ({_text(name)}, {load_migrations('postgres')[-1].number:d})\n"
        f"ON CONFLICT (name) DO UPDATE SET number = excluded.number, knows = excluded.knows;"
    )


def dropped(schema: str) -> str:
    """What removes the schema and its sets, with everything in them."""
    return (
        "DO $propolis$ DECLARE name text; BEGIN\n"
        "FOR name IN SELECT nspname FROM pg_catalog.pg_namespace\n"
        f"            WHERE nspname = {_text(schema)} OR (nspname ~ '_f_[0-9a-f]{{12}}$'\n"
        f"                  AND left(nspname, -15) = {_text(schema)}) LOOP\n"
        "    EXECUTE format('DROP SCHEMA %I CASCADE', name);\n"
        "END LOOP; END $propolis$"
    )


def script(schema: str) -> str:
    """All that makes the schema, for those who may not let the engine do it."""
    migrations = map(migrated, load_migrations("postgres"))
    return "\n\n".join(
        ["BEGIN;", locked(schema), prelude(schema), *migrations, function_set(schema), "COMMIT;"]
    )


def _text(value: str) -> str:
    """As a literal, whatever `standard_conforming_strings` says."""
    return "E'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"

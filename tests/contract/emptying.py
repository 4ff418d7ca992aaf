"""A schema of PostgreSQL that is emptied is as good as a new one, and takes a tenth of the time."""

from __future__ import annotations

import asyncpg

from propolis.engines.postgres.schema import dropped

LASTING = ("migration", "function_set", "installation")  # the tables that say what is installed

# One statement for each table and sequence of a schema, whichever there are, and one for the row that a new
# schema has.  DELETE, since TRUNCATE makes new files: for tables that are almost empty, that takes longer.
STATEMENTS = """
    SELECT format('DELETE FROM %I.%I', schemaname, tablename) FROM pg_tables
     WHERE schemaname = $1 AND tablename <> ALL ($2)
     UNION ALL
    SELECT format('ALTER SEQUENCE %I.%I RESTART', schemaname, sequencename) FROM pg_sequences
     WHERE schemaname = $1
       AND NOT EXISTS (SELECT FROM unnest($2::text[]) AS kept WHERE starts_with(sequencename, kept || '_'))
     UNION ALL
    SELECT format('INSERT INTO %I.watch VALUES (0)', $1) WHERE to_regnamespace(quote_ident($1)) IS NOT NULL
"""


async def empty(url: str, schema: str) -> None:
    """Remove everything but what is installed; a schema that is not there yet is left alone."""
    connection = await asyncpg.connect(url)
    try:
        statements = [row[0] for row in await connection.fetch(STATEMENTS, schema, LASTING)]
        if statements:
            await connection.execute("; ".join(statements))
    finally:
        await connection.close()


async def drop(url: str, schema: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(dropped(schema))
    await connection.close()

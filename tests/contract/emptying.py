"""A schema of PostgreSQL that is emptied is as good as a new one, and takes a tenth of the time."""

from __future__ import annotations

from functools import cache

import psycopg

from propolis.engines.postgres.schema import dropped

LASTING = ["migration", "function_set", "installation"]  # the tables that say what is installed

# One statement for each table and sequence of a schema, whichever there are, and one for the row that a new
# schema has.  DELETE, since TRUNCATE makes new files: for tables that are almost empty, that takes longer.
STATEMENTS = """
    SELECT format('DELETE FROM %%I.%%I', schemaname, tablename) FROM pg_tables
     WHERE schemaname = %(schema)s AND tablename <> ALL (%(lasting)s)
     UNION ALL
    SELECT format('ALTER SEQUENCE %%I.%%I RESTART', schemaname, sequencename) FROM pg_sequences
     WHERE schemaname = %(schema)s
       AND NOT EXISTS (SELECT FROM unnest(%(lasting)s) AS kept WHERE starts_with(sequencename, kept || '_'))
     UNION ALL
    SELECT format('INSERT INTO %%I.watch VALUES (0)', %(schema)s::text)
     WHERE to_regnamespace(quote_ident(%(schema)s)) IS NOT NULL
"""


def empty(url: str, schema: str) -> None:
    """Remove everything but what is installed; a schema that is not there yet is left alone."""
    connection = connected(url)
    rows = connection.execute(STATEMENTS, {"schema": schema, "lasting": LASTING}).fetchall()
    if rows:
        connection.execute("; ".join(row[0] for row in rows))


def drop(url: str, schema: str) -> None:
    connected(url).execute(dropped(schema))


@cache
def connected(url: str) -> psycopg.Connection[tuple[str]]:
    """For as long as this process lives: to connect takes longer than to empty."""
    return psycopg.connect(url, autocommit=True)

"""Sets of functions: each version of the code has its own, on the same tables."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from click.testing import CliRunner
from tests.engines.postgres.changed_code import ADDITIVE, CHANGED, NEXT, Code, painting

from propolis.cli import main
from propolis.core.job import Done
from propolis.core.protocols import Filter, Note
from propolis.core.records import Change, Swap
from propolis.engines import make_engine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped, set_of
from propolis.errors import (
    BadSetting,
    EngineError,
    EngineUnavailable,
    SchemaDrifted,
    SchemaTooNew,
    SchemaTooOld,
    StorageNotReady,
)
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


async def sets_of(connection: asyncpg.Connection, schema: str) -> list[str]:
    """By what there is, the oldest first."""
    rows = await connection.fetch(
        f'SELECT name FROM "{schema}".function_set JOIN pg_namespace ON nspname = name ORDER BY number'
    )
    return [row[0] for row in rows]


async def works(engine: PostgresEngine) -> None:
    assert [receipt.created for receipt in await engine.put([a_job()])] == [True]
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    assert await engine.settle([(lease, Done())]) == []


def changed(root: Path, n: int) -> Code:
    """Code that differs from ours in one function only."""
    code = Code(root / str(n))
    code.change("SELECT 50000000::bigint", f"SELECT {50000001 + n}::bigint")
    return code


@pytest_asyncio.fixture
async def role(connection: asyncpg.Connection, engine: PostgresEngine, schema: str) -> AsyncIterator[str]:
    """One that may do what docs/deploys.md says that it needs, and create nothing."""
    name = f"role_{uuid.uuid4().hex}"
    await connection.execute(
        f'CREATE ROLE "{name}" LOGIN; GRANT USAGE ON SCHEMA "{schema}" TO "{name}";'
        f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{schema}" TO "{name}";'
        f'REVOKE INSERT, UPDATE, DELETE ON "{schema}".function_set FROM "{name}";'
        f'GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA "{schema}" TO "{name}"'
    )
    yield name
    await connection.execute(dropped(schema))
    await connection.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"')


def as_role(url: str, role: str) -> str:
    return url.replace("//postgres@", f"//{role}@")


async def test_new_code_installs_its_functions_beside_those_of_the_old(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    with changed(tmp_path, 1).used():
        other = await PostgresEngine(postgres_url, schema=schema).open()
        names = [set_of(schema)]

    assert await sets_of(connection, schema) == [set_of(schema), *names]
    await works(engine)
    await works(other)
    await other.close()


async def test_what_was_opened_before_needs_nothing_to_be_installed(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    with changed(tmp_path, 1).used():
        await (await PostgresEngine(postgres_url, schema=schema).open()).close()
    before = await sets_of(connection, schema)

    await (await PostgresEngine(postgres_url, schema=schema).open()).close()  # a rollback

    assert await sets_of(connection, schema) == before


async def test_tables_that_are_there_are_changed_by_init_or_where_the_url_says_so(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    with painting(tmp_path).used():
        with pytest.raises(SchemaTooOld, match=rf"{CHANGED}.*propolis init"):
            await PostgresEngine(postgres_url, schema=schema).open()
        assert await sets_of(connection, schema) == [engine._installer._set]

        url = f"{postgres_url}?schema={schema}&migrate=auto"
        async with asyncio.timeout(60):
            newer = await make_engine(url).open()
        await newer.close()
        assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".painted') == 0
    await works(engine)


async def test_init_says_what_it_did(
    postgres_url: str, schema: str, engine: PostgresEngine, tmp_path: Path
) -> None:
    with painting(tmp_path).used():
        newer = PostgresEngine(postgres_url, schema=schema)

        assert await newer.install() == [f"ran {CHANGED}", f"installed the functions {set_of(schema)}"]
        assert await newer.install() == []


def test_migrate_is_auto_or_nothing() -> None:
    with pytest.raises(BadSetting, match="auto"):
        make_engine("postgresql://nobody@localhost/none?migrate=yes")


async def test_tables_that_are_not_those_of_their_numbers_are_refused(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    await connection.execute(f"""UPDATE "{schema}".migration SET checksum = 'another'""")

    with pytest.raises(SchemaDrifted, match=r"0001_tables\.sql"):
        await PostgresEngine(postgres_url, schema=schema).open()


async def test_tables_of_a_time_before_checksums_are_refused(
    postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    await connection.execute(
        f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}".migration (number integer PRIMARY KEY);'
        f'INSERT INTO "{schema}".migration VALUES (1), (2)'
    )

    for opening in (PostgresEngine.open, PostgresEngine.open_to_look, PostgresEngine.install):
        with pytest.raises(SchemaDrifted):
            await opening(PostgresEngine(postgres_url, schema=schema))


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        ("migration (name text)", "its table migration is somebody else's"),
        ("migration (number text)", "its table migration is somebody else's"),
        ("records (name text)", 'somebody else\'s are there: relation "records" already exists'),
    ],
)
async def test_a_schema_with_tables_of_somebody_else_is_refused_with_what_to_do(
    postgres_url: str, schema: str, connection: asyncpg.Connection, theirs: str, why: str
) -> None:
    """And nothing is added to it."""
    await connection.execute(f'CREATE SCHEMA "{schema}"; CREATE TABLE "{schema}".{theirs}')
    await connection.execute(f"""INSERT INTO "{schema}".{theirs.partition(" ")[0]} VALUES ('1')""")

    for opening in (PostgresEngine.open, PostgresEngine.install):
        with pytest.raises(SchemaDrifted, match="give another place") as refused:
            await opening(PostgresEngine(postgres_url, schema=schema))
        assert why in str(refused.value)

    tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
    assert [row[0] for row in tables] == [theirs.partition(" ")[0]]
    assert await connection.fetchval("SELECT to_regnamespace(quote_ident($1))", set_of(schema)) is None


async def test_tables_that_somebody_has_taken_away_are_named_at_the_start(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    await connection.execute(f'DROP TABLE "{schema}".records CASCADE; DROP TABLE "{schema}".feed_follower')

    with pytest.raises(SchemaDrifted, match=r"without records, feed_follower|without feed_follower, records"):
        await PostgresEngine(postgres_url, schema=schema).open()


async def test_a_migration_that_old_code_cannot_live_with_removes_its_functions(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    code = painting(tmp_path)
    code.migrate(f"-- compatible_from: {NEXT}\n{ADDITIVE}")
    with code.used():
        newer = await PostgresEngine(postgres_url, schema=schema, migrate=True).open()
        assert await sets_of(connection, schema) == [set_of(schema)]

    await works(newer)
    with pytest.raises(EngineError, match="upgrade"):
        await engine.put([a_job()])
    with pytest.raises(SchemaTooNew):
        await PostgresEngine(postgres_url, schema=schema).open()
    await newer.close()


async def test_prune_leaves_the_newest_five_sets_and_our_own(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    for n in range(6):
        with changed(tmp_path, n).used():
            await PostgresEngine(postgres_url, schema=schema).install()
    before = await sets_of(connection, schema)

    done = await PostgresEngine(postgres_url, schema=schema).install(prune=True)

    assert await sets_of(connection, schema) == [before[0], *before[-5:]]
    assert done == [f"removed the functions {before[1]}"]
    await works(engine)


async def test_a_role_that_may_not_create_schemas_is_told_what_to_do(
    postgres_url: str, schema: str, role: str, tmp_path: Path
) -> None:
    url = as_role(postgres_url, role)
    own = await PostgresEngine(url, schema=schema).open()
    await works(own)
    await own.close()
    with changed(tmp_path, 1).used(), pytest.raises(SchemaTooOld, match="propolis init"):
        await PostgresEngine(url, schema=schema).open()


@pytest.mark.parametrize(
    ("taken", "missing"),
    [
        ("DELETE ON {schema}.ended", "GRANT DELETE ON {schema}.ended"),
        ("INSERT, UPDATE ON {schema}.known", "GRANT INSERT, UPDATE ON {schema}.known"),
        ("UPDATE ON {schema}.migration", "GRANT UPDATE ON {schema}.migration"),
        ("UPDATE ON SEQUENCE {schema}.record_version", "GRANT UPDATE ON {schema}.record_version"),
        ("USAGE ON SEQUENCE {schema}.back", "GRANT USAGE ON {schema}.back"),
    ],
)
async def test_a_role_that_lacks_a_right_is_refused_at_the_start(
    postgres_url: str, schema: str, role: str, connection: asyncpg.Connection, taken: str, missing: str
) -> None:
    """F55: with all that is missing."""
    await connection.execute(f'REVOKE {taken.format(schema=schema)} FROM "{role}"')

    with pytest.raises(EngineError) as refused:
        await PostgresEngine(as_role(postgres_url, role), schema=schema).open()

    assert str(refused.value).endswith(f"this role lacks rights: {missing.format(schema=schema)}")
    looking = await PostgresEngine(as_role(postgres_url, role), schema=schema).open_to_look()
    assert await looking.queues() == {}
    await looking.close()


async def test_a_role_that_may_not_call_a_function_is_refused_at_the_start(
    postgres_url: str, schema: str, role: str, connection: asyncpg.Connection
) -> None:
    """F55."""
    await connection.execute(f'REVOKE ALL ON ALL FUNCTIONS IN SCHEMA "{set_of(schema)}" FROM PUBLIC')

    with pytest.raises(EngineError, match="GRANT EXECUTE ON "):
        await PostgresEngine(as_role(postgres_url, role), schema=schema).open()


async def test_a_database_that_cannot_be_written_is_refused_at_the_start(
    postgres_url: str, schema: str, role: str, connection: asyncpg.Connection
) -> None:
    """F55: as a standby is."""
    await connection.execute(f'ALTER ROLE "{role}" SET default_transaction_read_only = on')

    with pytest.raises(EngineUnavailable, match=r"read-only.*primary"):
        await PostgresEngine(as_role(postgres_url, role), schema=schema).open()


async def test_a_role_that_may_create_schemas_installs_a_set_that_others_can_use(
    postgres_url: str, schema: str, role: str, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    await connection.execute(f'GRANT CREATE ON DATABASE postgres TO "{role}"')
    await connection.execute(f'GRANT INSERT, UPDATE ON "{schema}".function_set TO "{role}"')
    with changed(tmp_path, 1).used():
        theirs = await PostgresEngine(as_role(postgres_url, role), schema=schema).open()
        ours = await PostgresEngine(postgres_url, schema=schema).open()

    for each in (theirs, ours):
        await works(each)
        await each.close()


async def test_grants_are_those_of_the_last_set(
    postgres_url: str, schema: str, role: str, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    last = set_of(schema)
    await connection.execute(
        f'REVOKE ALL ON SCHEMA "{last}" FROM PUBLIC; GRANT USAGE ON SCHEMA "{last}" TO "{role}";'
        f'REVOKE ALL ON ALL FUNCTIONS IN SCHEMA "{last}" FROM PUBLIC;'
        f'GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA "{last}" TO "{role}" WITH GRANT OPTION'
    )
    with changed(tmp_path, 1).used():
        await PostgresEngine(postgres_url, schema=schema).install()
        name = set_of(schema)
        theirs = await PostgresEngine(as_role(postgres_url, role), schema=schema).open()

    await works(theirs)
    await theirs.close()
    assert not await connection.fetchval("SELECT has_schema_privilege('public', $1, 'USAGE')", name)
    held = await connection.fetchrow(
        "SELECT bool_or(has_function_privilege('public', oid, 'EXECUTE')), "
        "       bool_and(has_function_privilege($2, oid, 'EXECUTE WITH GRANT OPTION')) "
        "  FROM pg_proc WHERE pronamespace = $1::regnamespace",
        name,
        role,
    )
    assert tuple(held) == (False, True)


async def test_doors_lead_to_the_newest_set(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    code = changed(tmp_path, 1)
    code.change(
        "jsonb_build_object('v', 1, 'id', new_id()) || e", "jsonb_build_object('v', 1, 'id', 'newer') || e"
    )
    with code.used():
        await PostgresEngine(postgres_url, schema=schema).install()

    assert await connection.fetchval(f"""SELECT "{schema}".enqueue('t', '[]')""") == "newer"
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    assert lease.id == "newer"


async def test_functions_that_were_left_of_dropped_tables_are_made_anew(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    await connection.execute(f'DROP SCHEMA "{schema}" CASCADE')

    again = await PostgresEngine(postgres_url, schema=schema).open()

    await works(again)
    await again.close()


async def test_whoever_only_looks_installs_nothing(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    looking = await PostgresEngine(postgres_url, schema=schema).open_to_look()
    assert await looking.queues() == {}
    await looking.close()
    await engine.put([a_job()])
    with painting(tmp_path).used():  # as of `propolis check` before a deployment
        newer = await PostgresEngine(postgres_url, schema=schema).open_to_look()
    assert list(await newer.queues()) == ["default"]
    assert len((await newer.find(Filter())).jobs) == 1
    await newer.close()
    with pytest.raises(StorageNotReady, match="no tables"):
        await PostgresEngine(postgres_url, schema=f"{schema[:40]}_none").open_to_look()
    assert len(await sets_of(connection, schema)) == 1


async def test_the_channel_is_in_a_table(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    """So that a schema that was renamed goes on to be heard by those who were there before."""
    await connection.execute(f"""UPDATE "{schema}".installation SET channel = 'another'""")
    heard: asyncio.Queue[str] = asyncio.Queue()
    await connection.add_listener("another", lambda *arguments: heard.put_nowait(arguments[-1]))
    late = await PostgresEngine(postgres_url, schema=schema).open()

    await late.put([a_job(queue="mail")])  # by the client
    await connection.execute(
        f"""SELECT "{schema}".enqueue('t', '[]', '{{"queue": "door", "notify": true}}')"""
    )

    async with asyncio.timeout(60):
        assert {await heard.get(), await heard.get()} == {"mail", "door"}
    await late.close()


async def test_the_command_says_what_it_did(postgres_url: str, schema: str) -> None:
    arguments = ["init", "--prune", "--url", f"{postgres_url}?schema={schema}"]

    first = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    second = await asyncio.to_thread(CliRunner().invoke, main, arguments)

    assert first.output.splitlines()[:-1] == [
        "ran 0001_tables.sql",
        "ran 0002_limits.sql",
        "ran 0003_places.sql",
        f"installed the functions {set_of(schema)}",
    ]
    assert len(second.output.splitlines()) == 1
    assert "is ready" in second.output


async def test_an_option_that_nobody_knows_is_a_bad_setting(postgres_url: str, schema: str) -> None:
    with pytest.raises(BadSetting, match="options"):
        await make_engine(f"{postgres_url}?schema={schema}&colour=blue").open()


async def test_a_role_that_works_with_jobs_needs_no_more_rights_than_the_documented(
    postgres_url: str, schema: str, role: str
) -> None:
    worker = await PostgresEngine(as_role(postgres_url, role), schema=schema).open()
    try:
        await worker.put([a_job()])
        [lease] = await worker.lease({"default": 1}, span=SPAN, holder=HOLDER)
        assert await worker.note([Note(lease, checkpoint=b"1")]) == []
        assert await worker.settle([(lease, Done())]) == []
        [swapped] = await worker.swap([Swap(changes=(Change(kind="k", name="n", value=b"v"),))])
        assert swapped.version is not None
        assert await worker.publish("f", [b"e"]) is not None
        await worker.sweep()
    finally:
        await worker.close()


async def test_no_schema_but_a_set_is_dropped_whatever_the_table_says(
    postgres_url: str, schema: str, engine: PostgresEngine, connection: asyncpg.Connection
) -> None:
    """Whoever works with jobs might have written there."""
    stranger = f"{schema}_mine"
    await connection.execute(f'CREATE SCHEMA "{stranger}"')
    try:
        await connection.execute(
            f'INSERT INTO "{schema}".function_set (name, knows) VALUES ($1, 0)', stranger
        )
        with pytest.raises(SchemaDrifted, match="no set of it"):
            await PostgresEngine(postgres_url, schema=schema).install(prune=True)
        assert await connection.fetchval("SELECT to_regnamespace(quote_ident($1)) IS NOT NULL", stranger)
    finally:
        await connection.execute(f'DROP SCHEMA "{stranger}"')

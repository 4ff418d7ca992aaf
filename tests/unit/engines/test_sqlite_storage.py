"""The file of the SQLite engine: its tables beside those of others, its migrations, and who only looks."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, State
from propolis.core.protocols import Filter, Note
from propolis.core.records import Change, Swap
from propolis.engines.shared.migrations import Migration, made_by
from propolis.engines.shared.statements import load_migrations
from propolis.engines.sqlite import schema
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.engines.sqlite.rows import SQL
from propolis.errors import EngineUnavailable, SchemaDrifted, SchemaTooNew, SchemaTooOld, StorageNotReady
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

# A released migration is never changed.  What it lacks comes in the next one, whose checksum is added here.
FROZEN = {
    "0001_tables.sql": "83218a26762457d6c85f50786a27f726d135599100ddf7b796a2725277e91d95",
    "0002_rates.sql": "88cfbc55dc198dce88181362013195684327bff47042fed876ce3c83f107beba",
}
ADDITION = Migration(3, "0003_addition.sql", "ALTER TABLE propolis_job ADD COLUMN colour TEXT;\n")


def execute(path: Path, *statements: str) -> object:
    """The answer of the last one."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        [*_, last] = [db.execute(statement).fetchone() for statement in statements]
        return last[0] if last else None


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.endswith("-shm")}


async def use(path: Path, *, looks: bool = False) -> int:
    """Put a job, unless it is only looked at; returns how many there are."""
    engine = SQLiteEngine(path)
    await (engine.open_to_look() if looks else engine.open())
    try:
        if not looks:
            await engine.put([a_job()])
        return sum(counts.ready for counts in (await engine.queues()).values())
    finally:
        await engine.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the code is that of a later version, with one more migration."""
    monkeypatch.setattr(schema, "load_migrations", lambda engine: [*load_migrations(engine), ADDITION])


# --- migrations --------------------------------------------------------------------------


def test_released_migrations_are_frozen() -> None:
    assert {each.file: each.checksum for each in load_migrations("sqlite")} == FROZEN


async def test_it_lives_beside_the_tables_of_others_and_leaves_their_version_alone(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    execute(path, "CREATE TABLE job (id)", "INSERT INTO job VALUES (7)", "PRAGMA user_version = 99")
    assert await use(path) == 1
    assert await use(path) == 2
    assert execute(path, "PRAGMA user_version") == 99
    assert execute(path, "SELECT id FROM job") == 7
    tables = "SELECT count(*) FROM sqlite_master WHERE tbl_name NOT GLOB 'propolis_*'"
    assert execute(path, tables) == 1


async def test_old_and_new_code_use_one_file_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "jobs.db"
    assert await use(path) == 1
    with monkeypatch.context() as later:
        later.setattr(schema, "load_migrations", lambda engine: [*load_migrations(engine), ADDITION])
        assert await use(path) == 2
    assert execute(path, "SELECT count(colour) FROM propolis_job") == 0  # the migration was run
    assert await use(path) == 3  # a rollback: what the later migration added is in nobody's way
    assert execute(path, "SELECT group_concat(number) FROM propolis_migration") == "1,2,3"


async def test_old_code_goes_on_where_each_table_has_one_more_column(tmp_path: Path) -> None:
    """It names its columns, so a job ends, is kept, shown, found and replayed as before."""
    path = tmp_path / "jobs.db"
    assert await use(path) == 1
    tables = [name for name in made_by(load_migrations("sqlite")) if name != "propolis_migration"]
    assert len(tables) > 15
    execute(path, *(f"ALTER TABLE {name} ADD COLUMN colour TEXT" for name in tables))

    engine = await SQLiteEngine(path).open()
    terms: dict[str, Any] = {"span": SPAN, "holder": HOLDER}
    [lease] = await engine.lease({"default": 1}, **terms)
    await engine.note([Note(lease, lines=("a line",), checkpoint=b"1")])
    assert await engine.settle([(lease, Dead())]) == []
    kept = await engine.get(lease.id)
    assert (await engine.find(Filter(state=State.DEAD))).jobs == [kept]
    assert kept is not None
    assert (kept.state, kept.reason, kept.log) == (State.DEAD, "failed", ("a line",))
    assert await engine.replay([lease.id]) == [True]
    [again] = await engine.lease({"default": 1}, **terms)
    assert again.checkpoint == b"1"
    assert await engine.settle([(again, Done())]) == []
    await engine.swap([Swap(changes=(Change(kind="k", name="n", value=b"v"),))])
    await engine.put_batch(Batch(id="b"), [a_job(batch="b")])
    assert await engine.repair(mend=True) == []
    await engine.close()


def test_statements_name_the_columns_of_tables() -> None:
    nameless = re.compile(r"\*\s+FROM\s+propolis_|RETURNING\s+\*|INTO\s+propolis_\w+\s+(?!\()")
    assert [name for name, text in SQL.items() if nameless.search(text)] == []


async def test_what_later_code_has_changed_for_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    breaking = Migration(3, "0003.sql", "-- compatible_from: 3\nDROP TABLE propolis_held;\n")
    with monkeypatch.context() as later:
        later.setattr(schema, "load_migrations", lambda engine: [*load_migrations(engine), breaking])
        engine = await SQLiteEngine(path).open()
        await engine.close()
    for looks in (False, True):
        with pytest.raises(SchemaTooNew, match="upgrade propolis"):
            await use(path, looks=looks)


async def test_what_old_code_cannot_live_with_is_migrated_by_init_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    await use(path)
    adds = Migration(3, "0003_adds.sql", "CREATE TABLE propolis_more (id TEXT);\n")
    breaks = Migration(4, "0004_breaks.sql", "-- compatible_from: 4\nDROP TABLE propolis_more;\n")
    known = load_migrations("sqlite")
    monkeypatch.setattr(schema, "load_migrations", lambda _: [*known, adds])
    assert await SQLiteEngine(path).install() == ["ran 0003_adds.sql"]
    monkeypatch.setattr(schema, "load_migrations", lambda _: [*known, adds, breaks])

    with pytest.raises(SchemaTooOld, match=r"0004_breaks\.sql.*propolis init"):
        await use(path)
    assert await SQLiteEngine(path).install() == ["ran 0004_breaks.sql"]

    await use(path)
    assert await SQLiteEngine(path).install() == []
    await use(tmp_path / "another.db")  # where there is no old code, any first open makes it all
    monkeypatch.setattr(schema, "load_migrations", lambda _: known)
    with pytest.raises(SchemaTooNew):
        await use(path)


@pytest.mark.parametrize(
    ("drift", "why"),
    [
        ("UPDATE propolis_migration SET checksum = 'other'", "was not 0001_tables.sql as it is here"),
        ("UPDATE propolis_migration SET number = number + 1 WHERE number = 2", "2 was left out"),
        ("DROP TABLE propolis_migration", "nothing says which migrations"),
        ("DROP TABLE propolis_record", "without propolis_record"),
    ],
)
async def test_storage_that_is_not_what_its_version_promises_is_refused(
    tmp_path: Path, drift: str, why: str
) -> None:
    path = tmp_path / "jobs.db"
    await use(path)
    execute(path, drift)
    for looks in (False, True):
        with pytest.raises(SchemaDrifted, match=why):
            await use(path, looks=looks)


async def test_the_script_makes_what_the_engine_makes(tmp_path: Path) -> None:
    by_hand, by_engine = tmp_path / "by_hand.db", tmp_path / "by_engine.db"
    with closing(sqlite3.connect(by_hand)) as db:
        db.executescript(SQLiteEngine(by_hand).script())
    assert await use(by_hand) == await use(by_engine)
    rows = "SELECT json_group_array(json_array(number, checksum, compatible_from)) FROM propolis_migration"
    assert execute(by_hand, rows) == execute(by_engine, rows)


# --- the file ----------------------------------------------------------------------------


async def test_only_its_owner_can_read_the_file_and_its_log(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        engine = await SQLiteEngine(tmp_path / "jobs.db").open()
        await engine.put([a_job()])
    finally:
        os.umask(before)
    modes = {each.name: oct(each.stat().st_mode & 0o777) for each in os.scandir(tmp_path)}
    await engine.close()
    assert modes == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm"), "0o600")


async def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.touch(mode=0o640)
    mode = path.stat().st_mode
    await use(path)
    assert path.stat().st_mode == mode


# --- looking -----------------------------------------------------------------------------


async def test_looking_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageNotReady, match=r"no such file.*propolis init"):
        await use(tmp_path / "typo.db", looks=True)
    assert not contents(tmp_path)


async def test_looking_changes_nothing_in_the_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    execute(path, "CREATE TABLE shop (id)")
    before = contents(tmp_path)
    with pytest.raises(StorageNotReady, match="no tables of propolis"):
        await use(path, looks=True)
    assert contents(tmp_path) == before
    assert execute(path, "PRAGMA journal_mode") == "delete"


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
async def test_looking_changes_nothing_in_our_own_file(tmp_path: Path, journal_mode: str) -> None:
    path = tmp_path / "jobs.db"
    await use(path)
    assert execute(path, f"PRAGMA journal_mode = {journal_mode}") == journal_mode
    before = contents(tmp_path)
    assert await use(path, looks=True) == 1
    assert contents(tmp_path) == before


async def test_looking_leaves_the_log_of_one_that_was_killed_as_it_is(tmp_path: Path) -> None:
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    await engine.put([a_job()])
    killed = tmp_path / "killed"
    killed.mkdir()
    for each in (tmp_path / "jobs.db", tmp_path / "jobs.db-wal"):
        shutil.copy(each, killed)
    await engine.close()
    before = contents(killed)
    assert len(before) == 2
    assert await use(killed / "jobs.db", looks=True) == 1
    assert contents(killed) == before


async def test_who_only_looks_cannot_change_anything(tmp_path: Path) -> None:
    await use(tmp_path / "jobs.db")
    engine = await SQLiteEngine(tmp_path / "jobs.db").open_to_look()
    with pytest.raises(EngineUnavailable, match="cannot be written"):
        await engine.put([a_job()])
    await engine.close()


async def test_looking_with_later_code_migrates_nothing(tmp_path: Path, later: None) -> None:
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path)) as db:
        schema.run(db, load_migrations("sqlite"))
        db.commit()
    before = contents(tmp_path)
    assert await use(path, looks=True) == 0
    assert contents(tmp_path) == before


async def test_looking_with_later_code_that_needs_its_migration_says_what_to_do(
    tmp_path: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path)) as db:
        schema.run(db, load_migrations("sqlite"))
        db.commit()
    monkeypatch.setitem(SQL, "tally_page", "SELECT colour, 0, 0 FROM propolis_job")
    with pytest.raises(StorageNotReady, match=r"older version.*propolis init"):
        await use(path, looks=True)

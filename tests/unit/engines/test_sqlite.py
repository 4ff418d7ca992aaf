"""What is special to the SQLite engine: the file, its settings, its neighbours and its failures."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from propolis.core.job import Done, State
from propolis.core.protocols import Durability, Filter, Rule, RuleKind, Scope
from propolis.engines import make_engine, open_engine
from propolis.engines.sqlite import file as sqlite_file
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.engines.sqlite.file import SQLiteFile
from propolis.engines.sqlite.mounts import file_system_of
from propolis.errors import (
    BadSetting,
    DurabilityTooLow,
    EngineClosed,
    EngineError,
    EngineUnavailable,
    ForkedEngine,
    StorageBroken,
    StorageFull,
    UnsafeStorage,
)
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[SQLiteEngine]:
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    yield engine
    await engine.close()


def pragma(path: Path, name: str) -> object:
    with sqlite3.connect(path) as connection:
        value = connection.execute(f"PRAGMA {name}").fetchone()[0]
    connection.close()
    return value


# --- settings ----------------------------------------------------------------------------


async def test_the_file_uses_a_write_ahead_log(engine: SQLiteEngine, tmp_path: Path) -> None:
    assert pragma(tmp_path / "jobs.db", "journal_mode") == "wal"


@pytest.mark.parametrize(
    ("synchronous", "level"),
    [("normal", Durability.PROCESS), ("full", Durability.POWER), ("extra", Durability.POWER)],
)
async def test_durability_is_what_the_synchronous_setting_gives(
    tmp_path: Path, synchronous: str, level: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "file_system_of", lambda folder: "ext4")
    engine = await open_engine(f"sqlite:///{tmp_path}/jobs.db?synchronous={synchronous}")
    assert engine.durability is level
    await engine.close()


async def test_full_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "file_system_of", lambda folder: "ext4")
    engine = await open_engine(f"sqlite:///{tmp_path}/jobs.db", floor=Durability.POWER)
    await engine.close()


async def test_memory_backed_file_systems_do_not_survive_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "file_system_of", lambda folder: "tmpfs")
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    assert engine.durability is Durability.PROCESS
    await engine.close()


async def test_a_floor_above_the_level_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(DurabilityTooLow, match="synchronous=full"):
        await open_engine(f"sqlite:///{tmp_path}/jobs.db?synchronous=normal", floor=Durability.POWER)
    with pytest.raises(DurabilityTooLow, match="another machine"):
        await open_engine(f"sqlite:///{tmp_path}/jobs.db", floor=Durability.NODE)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p"])
async def test_network_file_systems_are_refused_unless_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sqlite_file, "file_system_of", lambda folder: kind)
    with pytest.raises(UnsafeStorage, match=kind):
        await SQLiteEngine(tmp_path / "jobs.db").open()
    forced = await open_engine(f"sqlite:///{tmp_path}/jobs.db?unsafe=1")
    await forced.close()


def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    inner = tmp_path / "with space"
    inner.mkdir()
    escaped = str(inner).replace(" ", "\\040")
    table.write_text(f"disk / ext4 rw 0 0\nhost:/x {escaped} nfs4 rw 0 0\n")
    assert file_system_of(tmp_path, str(table)) == "ext4"
    assert file_system_of(inner, str(table)) == "nfs4"
    assert file_system_of(inner, str(tmp_path / "none")) == ""


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:///", "names no file"),
        ("sqlite:///x.db?synchronus=full", "synchronus"),
        ("sqlite:///x.db?synchronous=off", "normal, full, extra"),
        ("sqlite:///x.db?patience=soon", "duration"),
    ],
)
def test_a_bad_url_fails_before_anything_is_opened(url: str, message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        make_engine(url)


# --- the place ---------------------------------------------------------------------------


async def test_a_missing_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="no folder"):
        await SQLiteEngine(tmp_path / "none" / "jobs.db").open()


async def test_a_folder_in_place_of_the_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="permissions"):
        await SQLiteEngine(tmp_path).open()


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    path.write_bytes(b"precious" * 1000)
    with pytest.raises(StorageBroken):
        await SQLiteEngine(path).open()
    assert path.read_bytes() == b"precious" * 1000


async def test_an_old_sqlite_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 31, 0))
    with pytest.raises(EngineError, match="too old"):
        await SQLiteEngine(tmp_path / "jobs.db").open()


async def test_eight_handles_may_create_the_file_at_once(tmp_path: Path) -> None:
    """S0.7: creating is idempotent, also for those who do it at the same time."""

    def create() -> None:
        async def act() -> None:
            engine = await SQLiteEngine(tmp_path / "jobs.db").open()
            await engine.put([a_job()])
            await engine.close()

        asyncio.run(act())

    await asyncio.gather(*(asyncio.to_thread(create) for _ in range(8)))
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    assert (await engine.queues())["default"].ready == 8
    await engine.close()


# --- life of a handle --------------------------------------------------------------------


async def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    engine = SQLiteEngine(tmp_path / "jobs.db")
    with pytest.raises(EngineClosed):
        await engine.put([a_job()])
    await engine.open()
    await engine.open()  # the second time nothing happens
    await engine.close()
    await engine.close()
    with pytest.raises(EngineClosed):
        await engine.queues()


def _use_in_child(engine: SQLiteEngine, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        asyncio.run(engine.put([a_job()]))
    except ForkedEngine as error:
        answers.put(str(error))
    else:
        answers.put("accepted")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on, forking with threads warns
async def test_a_fork_may_not_use_the_handle_of_its_parent(engine: SQLiteEngine) -> None:
    """F35."""
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_use_in_child, args=(engine, answers))
    child.start()
    child.join(20)
    assert f"opened by process {os.getpid()}" in answers.get()
    await engine.put([a_job()])  # the parent goes on


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on, forking with threads warns
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "writing"])
def test_what_a_fork_is_acknowledged_is_kept_when_its_parent_ends(tmp_path: Path, busy: bool) -> None:
    """F48: SQLite's own tables of locks do not survive a fork; so none is inherited."""
    script = f"""
import os, sys, threading, time
from propolis import App
app = App("sqlite:///{tmp_path}/jobs.db")

@app.task(name="t")
def t(n: int) -> None: ...

t.enqueue(0)
if {busy}:
    going = threading.Event()
    def hold(db):
        going.set()
        time.sleep(0.3)
    threading.Thread(target=app.client.engine._file.write_now, args=(hold,)).start()
    going.wait()
parent = os.getpid()
if os.fork() == 0:
    t.enqueue(1)
    while os.getppid() == parent:  # until the parent has ended, and closed the file
        time.sleep(0.01)
    for n in range(5):
        t.enqueue(n)
    os._exit(0)
t.enqueue(2)  # the parent goes on, with connections of its own
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)
    deadline = time.monotonic() + 20
    database = sqlite3.connect(tmp_path / "jobs.db")
    while database.execute("SELECT count(*) FROM propolis_job").fetchone() != (8,):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    database.close()


async def test_threads_with_loops_of_their_own_share_one_handle(engine: SQLiteEngine) -> None:
    def produce() -> None:
        async def act() -> None:
            for _ in range(20):
                await engine.put([a_job() for _ in range(5)])

        asyncio.run(act())

    await asyncio.gather(*(asyncio.to_thread(produce) for _ in range(4)))
    assert (await engine.queues())["default"].ready == 400


# --- neighbours --------------------------------------------------------------------------


async def test_a_write_waits_for_another_process_without_blocking_the_loop(
    engine: SQLiteEngine, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    put = asyncio.create_task(engine.put([a_job()]))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not put.done()  # and yet we are here: the loop is free
    other.execute("COMMIT")
    [receipt] = await put
    assert receipt.created
    other.close()


async def test_patience_ends_in_a_clear_error_and_nothing_is_changed(tmp_path: Path) -> None:
    engine = await SQLiteEngine(tmp_path / "jobs.db", patience="50ms").open()
    other = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(EngineUnavailable, match="another process"):
        await engine.put([a_job()])
    other.execute("COMMIT")
    other.close()
    assert (await engine.find(Filter())).jobs == []
    await engine.close()


async def test_a_slow_disk_moves_writes_out_of_the_loop(engine: SQLiteEngine) -> None:
    engine._file._commit_time = 1.0
    name = await engine._file.write(lambda db: threading.current_thread().name)
    assert name.startswith("propolis-sqlite-write")


async def test_a_reader_elsewhere_does_not_stop_the_writers(engine: SQLiteEngine, tmp_path: Path) -> None:
    reader = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM propolis_job").fetchone()
    await engine.put([a_job() for _ in range(100)])
    leases = await engine.lease({"default": 100}, span=SPAN, holder=HOLDER)
    assert await engine.settle([(lease, Done()) for lease in leases]) == []
    assert reader.execute("SELECT count(*) FROM propolis_job").fetchone() == (0,)  # its snapshot
    reader.close()


async def test_a_put_in_the_callers_transaction_appears_only_if_it_commits(
    engine: SQLiteEngine, tmp_path: Path
) -> None:
    """T1: the job and the caller's own rows are one atomic effect."""
    mine = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    mine.execute("CREATE TABLE orders (id INTEGER)")
    for ending, expected in (("ROLLBACK", 0), ("COMMIT", 1)):
        mine.execute("BEGIN IMMEDIATE")
        mine.execute("INSERT INTO orders VALUES (1)")
        await engine.put_in(mine, [a_job()])
        mine.execute(ending)
        assert mine.execute("SELECT count(*) FROM orders").fetchone() == (expected,)
        assert len((await engine.find(Filter())).jobs) == expected
    mine.close()


async def test_the_file_may_hold_tables_of_others(tmp_path: Path) -> None:
    """All of our tables and indexes have the prefix `propolis_`."""
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as mine:
        for name in ("job", "batch", "schedule", "archive"):
            mine.execute(f"CREATE TABLE {name} (id TEXT)")
        mine.execute("CREATE INDEX job_id ON job (id)")
        theirs = {name for (name,) in mine.execute("SELECT name FROM sqlite_master")}
        engine = await SQLiteEngine(tmp_path / "app.db").open()
        await engine.put([a_job()])
        await engine.close()
        names = {name for (name,) in mine.execute("SELECT name FROM sqlite_master")} - theirs
        assert {
            name for name in names if not name.startswith(("propolis_", "sqlite_autoindex_propolis_"))
        } == set()
        assert mine.execute("SELECT count(*) FROM job").fetchone() == (0,)
        assert mine.execute("SELECT count(*) FROM propolis_job").fetchone() == (1,)


async def test_a_connection_that_cannot_be_joined_is_told(engine: SQLiteEngine, tmp_path: Path) -> None:
    elsewhere = sqlite3.connect(tmp_path / "other.db", isolation_level=None)
    elsewhere.execute("BEGIN")
    with pytest.raises(BadSetting, match=r"other\.db"):
        await engine.put_in(elsewhere, [a_job()])
    elsewhere.close()
    with pytest.raises(BadSetting, match="closed"):
        await engine.put_in(elsewhere, [a_job()])
    mine = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    with pytest.raises(BadSetting, match="BEGIN IMMEDIATE"):
        await engine.put_in(mine, [a_job()])
    mine.close()
    with pytest.raises(BadSetting, match="str"):
        engine.put_in_now("jobs.db", [a_job()])  # type: ignore[arg-type]  # on purpose


async def test_a_connection_that_begins_by_itself_is_joined(engine: SQLiteEngine, tmp_path: Path) -> None:
    """As connections of sqlite3 do unless told otherwise: before the first change."""
    mine = sqlite3.connect(tmp_path / "jobs.db")
    for end, expected in ((mine.rollback, 0), (mine.commit, 1)):
        engine.put_in_now(mine, [a_job()])
        end()
        assert len((await engine.find(Filter())).jobs) == expected
    mine.close()


# --- failures ----------------------------------------------------------------------------


async def test_a_full_disk_is_a_clear_error_and_loses_nothing(engine: SQLiteEngine, tmp_path: Path) -> None:
    """F35: refused while there is no room, intact, and at work again when there is."""
    first = [a_job("x" * 1000) for _ in range(50)]
    await engine.put(first)
    [running] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    writer = engine._file._writer
    assert writer is not None
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(StorageFull, match="free some space"):
        await engine.put([a_job("y" * 1000) for _ in range(500)])
    assert await engine.settle([(running, Done())]) == []  # ending jobs makes room and still works

    writer.execute("PRAGMA max_page_count = 1073741823")
    await engine.put([a_job()])
    assert (await engine.queues())["default"].ready == 50
    assert pragma(tmp_path / "jobs.db", "integrity_check") == "ok"


async def test_after_a_failed_sync_nothing_is_acknowledged_any_more(engine: SQLiteEngine) -> None:
    """F36."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC

    def fail(db: sqlite3.Connection) -> None:
        raise error

    with pytest.raises(StorageBroken):
        await engine._file.write(fail)
    with pytest.raises(StorageBroken, match="check the disk"):
        await engine.put([a_job()])


async def test_an_error_inside_a_transaction_rolls_it_back(engine: SQLiteEngine) -> None:
    def half(db: sqlite3.Connection) -> None:
        db.execute("DELETE FROM propolis_counter")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await engine._file.write(half)
    [receipt] = await engine.put([a_job()])
    assert receipt.created


async def test_a_file_that_is_damaged_while_it_is_open_says_so_at_every_verb(tmp_path: Path) -> None:
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    await engine.put([a_job("x" * 500) for _ in range(200)])
    await engine.close()
    engine = await SQLiteEngine(tmp_path / "jobs.db").open()
    with open(tmp_path / "jobs.db", "r+b") as file:  # noqa: ASYNC230  # as a failing disk would
        file.seek(4096)
        file.write(os.urandom(200_000))
    for verb in (
        lambda: engine.lease({"default": 5}, span=SPAN, holder=HOLDER),
        lambda: engine.put([a_job()]),
        engine.sweep,
    ):
        with pytest.raises(StorageBroken):
            await verb()
    await engine.close()


async def test_a_clock_that_is_set_back_keeps_no_lease_for_longer_than_its_span(tmp_path: Path) -> None:
    """F38."""
    clock = FakeClock()
    engine = await SQLiteEngine(tmp_path / "jobs.db", clock=clock).open()
    await engine.put([a_job()])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    clock._us -= 3600 * 1_000_000
    await engine.sweep()
    clock.advance(SPAN)
    assert (await engine.sweep()).reaped == 1
    await engine.close()


async def test_text_in_place_of_bytes_is_a_broken_job_like_any_other(
    engine: SQLiteEngine, tmp_path: Path
) -> None:
    await engine.put([a_job()])
    other = sqlite3.connect(tmp_path / "jobs.db")
    other.execute("UPDATE propolis_job SET body = 'no bytes'")
    other.commit()
    other.close()
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    assert lease.body == b"no bytes"


# --- what is special in how it keeps jobs ------------------------------------------------


async def test_a_paused_task_at_the_head_is_set_aside_once(engine: SQLiteEngine) -> None:
    """The lease does not walk over the same held jobs again and again; resumed, they keep their order."""
    slow = [a_job(n, task="slow") for n in range(30)]
    await engine.put([*slow, a_job(task="quick")])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "slow"))
    [lease] = await engine.lease({"default": 5}, span=SPAN, holder=HOLDER)
    assert lease.task == "quick"
    counts = (await engine.queues())["default"]
    assert (counts.ready, counts.held) == (0, 30)

    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "slow")
    again = await engine.lease({"default": 50}, span=SPAN, holder=HOLDER)
    assert [lease.id for lease in again] == [job.id for job in slow]


async def test_hot_tables_hold_only_live_jobs(engine: SQLiteEngine, tmp_path: Path) -> None:
    await engine.put([a_job() for _ in range(20)])
    leases = await engine.lease({"default": 20}, span=SPAN, holder=HOLDER)
    keep = timedelta(days=1)
    await engine.settle([(lease, Done(keep=keep)) for lease in leases])
    other = sqlite3.connect(tmp_path / "jobs.db")
    live = [
        other.execute(f"SELECT count(*) FROM propolis_{t}").fetchone()[0]
        for t in ("job", "ready", "running", "scheduled")
    ]
    other.close()
    assert live == [0, 0, 0, 0]
    assert len((await engine.find(Filter(state=State.DONE))).jobs) == 20


async def test_the_wait_notices_what_another_process_puts(engine: SQLiteEngine, tmp_path: Path) -> None:
    other = await SQLiteEngine(tmp_path / "jobs.db").open()
    assert await engine.lease({"default": 1}, span=SPAN, holder=HOLDER) == []
    waiting = asyncio.create_task(engine.wait(["default"], 20))
    await asyncio.sleep(0)
    await other.put([a_job()])
    assert await waiting is True
    await other.close()


async def test_the_wait_polls_where_the_system_does_not_tell(
    engine: SQLiteEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(path: str) -> int:
        raise OSError("no inotify here")

    monkeypatch.setattr("propolis.engines.sqlite.file_watch._watch", none)
    other = await SQLiteEngine(tmp_path / "jobs.db").open()
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    waiting = asyncio.create_task(engine.wait(["default"], 20))
    await asyncio.sleep(0)
    await other.put([a_job()])
    assert await waiting is True
    await other.close()


async def test_whoever_closes_a_file_waits_until_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is closed while another thread uses it takes the process with it."""
    migrating, go_on = threading.Event(), threading.Event()
    migrate = SQLiteFile._migrate

    def slowly(self: SQLiteFile, connection: sqlite3.Connection, *, migrates: bool) -> list[str]:
        migrating.set()
        assert go_on.wait(20)
        return migrate(self, connection, migrates=migrates)

    monkeypatch.setattr(SQLiteFile, "_migrate", slowly)
    file = SQLiteFile(tmp_path / "jobs.db", synchronous="normal", patience=5, unsafe=False)
    opening = asyncio.create_task(asyncio.to_thread(file.open))
    await asyncio.to_thread(migrating.wait, 20)
    closing = asyncio.create_task(asyncio.to_thread(file.close))
    assert await asyncio.wait({closing}, timeout=0.1) == (set(), {closing})
    go_on.set()
    await opening
    await closing
    assert not os.path.exists(tmp_path / "jobs.db-wal")  # noqa: ASYNC240  # the last one is closed

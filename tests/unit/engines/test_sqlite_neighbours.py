"""The file of the SQLite engine in the hands of others: their transactions, and what they do to the file."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from propolis import App
from propolis.core.job import Done, Retried
from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.engines import make_engine
from propolis.engines.sqlite import file as sqlite_file
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.errors import BadSetting, QueueFull, StorageBroken
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.worker import Worker

CAP = Rule(RuleKind.CAP, Scope.QUEUE, "default", 1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SQLiteEngine]:
    engine = await SQLiteEngine(tmp_path / "jobs.db", clock=clock, synchronous="normal").open()
    yield engine
    await engine.close()


# --- transactions of callers -------------------------------------------------------------


@pytest.mark.parametrize("isolation_level", [None, "DEFERRED", "IMMEDIATE"])
async def test_a_put_that_was_refused_in_the_callers_transaction_has_changed_nothing(
    engine: SQLiteEngine, tmp_path: Path, isolation_level: Literal["DEFERRED", "IMMEDIATE"] | None
) -> None:
    """T1: the caller catches the error and commits; the next put finds everything as it was."""
    await engine.add_rule(CAP)
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=isolation_level)) as mine:
        mine.execute("CREATE TABLE mine (id)")
        if isolation_level is None:
            mine.execute("BEGIN")
        mine.execute("INSERT INTO mine VALUES (1)")
        engine.put_in_now(mine, [a_job()])
        with pytest.raises(QueueFull):
            engine.put_in_now(mine, [a_job(), a_job()])
        mine.commit()
        assert mine.execute("SELECT count(*) FROM mine").fetchone() == (1,)
    assert (await engine.queues())["default"].ready == 1
    await engine.remove_rule(CAP.kind, CAP.scope, CAP.name)
    assert [receipt.created for receipt in await engine.put([a_job(), a_job()])] == [True, True]


async def test_a_transaction_that_a_refused_put_has_begun_is_over(
    engine: SQLiteEngine, tmp_path: Path
) -> None:
    """L6: else it would keep the file from everybody, and its owner did not begin it."""
    await engine.add_rule(CAP)
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as mine:
        with pytest.raises(QueueFull):
            engine.put_in_now(mine, [a_job(), a_job()])
        assert not mine.in_transaction
        await engine.put([a_job()])


@pytest.mark.parametrize("row_factory", [sqlite3.Row, lambda _, row: {"values": row}])
async def test_the_callers_rows_may_be_anything(
    engine: SQLiteEngine, tmp_path: Path, row_factory: Any
) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as mine:
        mine.row_factory = row_factory
        mine.text_factory = bytes
        mine.execute("BEGIN IMMEDIATE")
        engine.put_in_now(mine, [a_job(unique="u", chosen=True), a_job(unique="u")], token="once")
        mine.execute("COMMIT")
        assert (mine.row_factory, mine.text_factory) == (row_factory, bytes)
    assert (await engine.queues())["default"].ready == 1


@pytest.mark.parametrize("url", ["sqlite://data/jobs.db", "sqlite://jobs.db"])
def test_a_url_with_a_host_is_refused_with_the_spelling_that_was_meant(url: str) -> None:
    meant = url.replace("sqlite://", "sqlite:///")
    with pytest.raises(BadSetting, match=meant):
        make_engine(url)


# --- long transactions -------------------------------------------------------------------


async def test_a_sweep_that_waited_for_a_long_transaction_does_not_reap(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F50, L6: nobody could renew meanwhile; whoever still runs can settle."""
    monkeypatch.setattr(sqlite_file, "BLOCKED", 0.0)
    await engine.put([a_job()])
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    with closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        clock.advance(SPAN)
        sweeping = asyncio.create_task(engine.sweep())
        while not engine._file._lock._lock.locked():  # it waits, in its thread
            await asyncio.sleep(0)
        other.execute("COMMIT")
        assert (await sweeping).reaped == 0
    assert await engine.settle([(lease, Done())]) == []


async def test_once_everybody_had_time_to_renew_it_reaps(
    engine: SQLiteEngine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2."""
    await engine.put([a_job()])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    clock.advance(SPAN)
    engine._file._blocked_until = time.monotonic()
    assert (await engine.sweep()).reaped == 0
    monkeypatch.setattr(sqlite_file, "REST", 0.0)
    assert (await engine.sweep()).reaped == 1


# --- clocks ------------------------------------------------------------------------------


async def test_a_clock_that_is_set_back_delays_no_delay_for_long(
    engine: SQLiteEngine, clock: FakeClock
) -> None:
    """F38: in bites; what was given a time keeps it."""
    await engine.put([a_job()])
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    await engine.settle([(lease, Retried(timedelta(minutes=10)))])
    await engine.put([a_job(n, delay_ms=600_000) for n in range(4)])
    await engine.put([a_job(due_at=clock.now + timedelta(minutes=10))])
    clock.set_back("1h")
    while (await engine.sweep(limit=2)).again_in is not None:
        pass
    await engine.put([a_job(delay_ms=600_000)])  # since then
    assert (await engine.queues())["default"].scheduled == 7
    clock.advance("599s")
    assert (await engine.queues())["default"].ready == 0
    clock.advance("1s")
    assert (await engine.sweep()).promoted == 6
    clock.advance("1h")
    assert (await engine.sweep()).promoted == 1


async def test_a_clock_that_is_set_back_twice_before_all_has_followed(
    engine: SQLiteEngine, clock: FakeClock
) -> None:
    """F38."""
    await engine.put([a_job(n, delay_ms=600_000) for n in range(4)])
    clock.set_back("1h")
    assert (await engine.sweep(limit=1)).again_in == timedelta(0)
    clock.set_back("2h")
    while (await engine.sweep(limit=1)).again_in is not None:
        pass
    clock.advance("10m")
    assert (await engine.sweep()).promoted == 4


async def test_many_leases_of_a_clock_that_is_set_back_end_one_span_from_now(
    engine: SQLiteEngine, clock: FakeClock
) -> None:
    """L2, L5: in bites."""
    await engine.put([a_job() for _ in range(5)])
    await engine.lease({"default": 5}, span=SPAN, holder=HOLDER)
    clock.set_back("1h")
    sweeps = 1
    while (await engine.sweep(limit=2)).again_in is not None:
        sweeps += 1
    assert sweeps == 3
    clock.advance(SPAN)
    assert (await engine.sweep()).reaped == 5


async def test_the_largest_time_is_remembered_while_something_runs(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock
) -> None:
    """F38: also where the time in which the clock went back was idle."""
    await engine.put([a_job(delay_ms=7200_000)])
    for _ in range(6):
        clock.advance("10m")
        await engine.sweep()
    clock.set_back("1h")  # half of the delay is over
    await engine.sweep()
    clock.advance("1h")
    assert (await engine.sweep()).promoted == 1


async def test_a_lease_itself_shows_what_time_it_was(engine: SQLiteEngine, clock: FakeClock) -> None:
    """L2: after an hour in which nothing but ready jobs was there, and nobody wrote the time down."""
    await engine.put([a_job()])
    for _ in range(60):
        clock.advance("1m")
        await engine.sweep()
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    clock.set_back("50s")
    await engine.sweep()
    clock.advance(SPAN)
    assert (await engine.sweep()).reaped == 1


@pytest.mark.parametrize("joins", [False, True], ids=["by itself", "in a transaction of a caller"])
async def test_a_delay_that_is_counted_before_the_next_sweep_follows_nothing(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock, joins: bool
) -> None:
    """I2: else it would be over at once."""
    await engine.put([a_job(delay_ms=7200_000)])
    clock.set_back("1h")
    if joins:
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as caller, caller:
            caller.execute("BEGIN")
            await engine.put_in(caller, [a_job(delay_ms=600_000)])
    else:
        await engine.put([a_job(delay_ms=600_000)])
    await engine.sweep()
    clock.advance("599s")
    assert (await engine.sweep()).promoted == 0
    clock.advance("1s")
    assert (await engine.sweep()).promoted == 1


async def test_a_clock_that_is_slewed_is_no_reason_to_write(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock
) -> None:
    """F38."""
    await engine.put([a_job(), a_job(delay_ms=7200_000)])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    await engine.sweep()
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as other:
        before = other.execute("PRAGMA data_version").fetchone()
        for _ in range(3):
            clock.set_back("300ms")
            assert (await engine.sweep()).again_in is None
        assert other.execute("PRAGMA data_version").fetchone() == before


# --- the file itself ---------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
async def test_a_file_that_is_gone_is_noticed_by_the_next_sweep(
    engine: SQLiteEngine, tmp_path: Path, replaced: bool
) -> None:
    """What is put into it goes nowhere, and nobody would say so."""
    await engine.sweep()
    take_away(tmp_path, replaced=replaced)
    with pytest.raises(StorageBroken, match="deleted or replaced"):
        await engine.sweep()
    with pytest.raises(StorageBroken):
        await engine.put([a_job()])


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
async def test_no_put_into_a_file_that_is_gone_is_acknowledged(
    engine: SQLiteEngine, tmp_path: Path, replaced: bool
) -> None:
    """I8: whoever only puts never sweeps."""
    await engine.put([a_job()])
    take_away(tmp_path, replaced=replaced)
    for _ in range(2):
        with pytest.raises(StorageBroken, match="deleted or replaced"):
            await engine.put([a_job()])


async def test_a_worker_whose_file_is_gone_ends_with_the_reason(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def take_it_away() -> None:
        take_away(tmp_path, replaced=False)

    await take_it_away.aenqueue()
    with pytest.raises(StorageBroken, match="deleted or replaced"):
        await Worker(app).run()


def take_away(folder: Path, *, replaced: bool) -> None:
    for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
        (folder / name).rename(folder / f"old-{name}")
    if replaced:
        with closing(sqlite3.connect(folder / "jobs.db")) as other:
            other.execute("CREATE TABLE other (id)")

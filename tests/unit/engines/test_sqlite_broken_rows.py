"""L7, F56: one row that cannot be read stops no queue: it ends as broken, and the others go on."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from propolis.core.batch import Batch
from propolis.core.job import Done, State
from propolis.core.protocols import Filter
from propolis.core.records import Change, Swap
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

NUMBERS = ["priority", "pos", "put_us", "due_us", "expires_us", "max_crashes", "plain", "chosen", "member"]
COUNTERS = ["stepped", "attempts", "failures", "losses", "crashes", "fence", "started_us"]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SQLiteEngine]:
    engine = await SQLiteEngine(tmp_path / "jobs.db", clock=clock, synchronous="normal").open()
    yield engine
    await engine.close()


def spoil(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "jobs.db", isolation_level=None)) as db:
        assert db.execute(statement, values).rowcount == 1


async def run_all(engine: SQLiteEngine) -> set[str]:
    """The ids of those that ran and ended well."""
    done = set()
    while leases := await engine.lease({"default": 2}, span=SPAN, holder=HOLDER):
        refused = await engine.settle([(lease, Done()) for lease in leases])
        done |= {lease.id for lease in leases} - {lease.id for lease in refused}
    return done


@pytest.mark.parametrize("column", [*NUMBERS, *COUNTERS, "history", "log", "progress", "error"])
@pytest.mark.parametrize("kind", ["plain", "chosen"])
async def test_a_waiting_job_whose_row_is_broken_stops_nobody(
    engine: SQLiteEngine, tmp_path: Path, column: str, kind: str
) -> None:
    jobs = [a_job(n, chosen=kind == "chosen") for n in range(5)]
    await engine.put(jobs)
    spoil(tmp_path, f"UPDATE propolis_job SET {column} = 'garbage' WHERE id = ?", jobs[1].id)
    others = {job.id for job in jobs} - {jobs[1].id}
    assert await run_all(engine) >= others
    await engine.sweep()
    for info in (await engine.find(Filter())).jobs:  # if it did not run to its end, it is on the shelf
        assert (info.id, info.state, info.reason) == (jobs[1].id, State.DEAD, "broken")
        assert info.error is not None
    counts = (await engine.queues())["default"]
    assert (counts.waiting, counts.running, counts.put - counts.deleted) == (0, 0, counts.dead)


@pytest.mark.parametrize("column", [*NUMBERS, *COUNTERS, "history"])
async def test_a_running_job_whose_row_is_broken_keeps_no_sweep_from_the_others(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock, column: str
) -> None:
    jobs = [a_job(n) for n in range(3)]
    await engine.put(jobs)
    await engine.lease({"default": 3}, span=SPAN, holder=HOLDER)
    spoil(tmp_path, f"UPDATE propolis_job SET {column} = 'garbage' WHERE id = ?", jobs[0].id)
    clock.advance(SPAN)
    await engine.sweep()
    assert await run_all(engine) >= {job.id for job in jobs[1:]}
    assert all(info.reason == "broken" for info in (await engine.find(Filter())).jobs)


@pytest.mark.parametrize("state", ["waiting", "scheduled", "running", "expiring"])
async def test_a_job_that_was_taken_away_stops_nobody(
    engine: SQLiteEngine, tmp_path: Path, clock: FakeClock, state: str
) -> None:
    fields = {"scheduled": {"delay_ms": 1000}, "expiring": {"expires_in_ms": 1000}}.get(state, {})
    gone, *others = [a_job(**fields), a_job(), a_job()]
    await engine.put([gone, *others])
    if state == "running":
        await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    spoil(tmp_path, "DELETE FROM propolis_job WHERE id = ?", gone.id)
    clock.advance(SPAN)
    await engine.sweep()
    assert await run_all(engine) == {job.id for job in others}


async def test_a_batch_that_cannot_be_read_ends_without_its_callbacks(
    engine: SQLiteEngine, tmp_path: Path
) -> None:
    await engine.put_batch(Batch(id="b", on_finished=a_job()), [a_job(batch="b", member=0)])
    spoil(tmp_path, "UPDATE propolis_batch SET body = 'garbage'")
    assert len(await run_all(engine)) == 1
    status = await engine.batch("b")
    assert status is not None
    assert (status.pending, status.note) == (0, "it cannot be read")


@pytest.mark.parametrize("column", ["value", "version", "at_us", "expires_us"])
async def test_a_record_that_cannot_be_read_hides_no_other(
    engine: SQLiteEngine, tmp_path: Path, column: str
) -> None:
    at = timedelta(hours=1)
    changes = tuple(Change(kind="k", name=name, value=b"1", at=at, expires_in=2 * at) for name in "abc")
    await engine.swap([Swap(changes=changes)])
    spoil(tmp_path, f"UPDATE propolis_record SET {column} = 'garbage' WHERE name = 'b'")
    found = (await engine.records("k")).records
    assert {record.name for record in found} >= {"a", "c"}
    await engine.sweep()

"""L7, F56: what somebody has written over one job or record, or a flipped bit, stops no other, on any engine.

The damage reads as a value of its type, mostly: a number that is too large, or that is none.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from propolis.core.batch import Batch
from propolis.core.job import Done, JobInfo, Lease, Retried, State
from propolis.core.protocols import Filter
from propolis.core.records import KEEP, Change, ReadOptions, Swap
from propolis.engines.address import Address
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

HUGE = 9_000_000_000_000_000_000
DAMAGES = {"huge": HUGE, "-huge": -HUGE, "fraction": 1.5, "text": "junk", "nothing": None}
STATES = ["ready", "again", "running", "settled", "scheduled"]
FULL = SQLiteEngine | PostgresEngine | RedisEngine


class SQLiteDesk:
    """An engine, and a hand that writes to its storage without it."""

    jobs = (
        *("priority", "pos", "put_us", "due_us", "expires_us", "max_crashes", "member", "stepped"),
        *("attempts", "failures", "losses", "crashes", "fence", "started_us"),
        *("history", "error", "progress", "log"),
    )
    runs = ("fence", "attempt", "started_us", "began")
    ends = ("run:until_us", "run:span_us")
    delays = ("due_us", "place:due_us", "history")
    records = ("version", "at_us", "expires_us")

    def __init__(self, path: Path, clock: FakeClock) -> None:
        self._path = path
        self.engine: FULL = SQLiteEngine(path, clock=clock, synchronous="normal")

    async def spoil(self, job_id: str, column: str, value: object) -> None:
        table, _, name = column.rpartition(":")
        if table:
            await self._write(
                f"UPDATE propolis_{'running' if table == 'run' else 'scheduled'} SET {name} = ? "
                "WHERE seq = (SELECT seq FROM propolis_job WHERE id = ?)",
                value,
                job_id,
            )
        else:
            await self._write(f"UPDATE propolis_job SET {column} = ? WHERE id = ?", value, job_id)

    async def spoil_record(self, name: str, column: str, value: object) -> None:
        await self._write(f"UPDATE propolis_record SET {column} = ? WHERE name = ?", value, name)

    async def spoil_batch(self) -> None:
        await self._write("UPDATE propolis_batch SET body = 'junk', created_us = ?", HUGE)

    async def _write(self, statement: str, *values: object) -> None:
        with (
            closing(sqlite3.connect(self._path, isolation_level=None)) as db,
            suppress(sqlite3.IntegrityError),
        ):
            db.execute(statement, values)  # what is not taken has damaged nothing

    async def close(self) -> None:
        await self.engine.close()


class PostgresDesk:
    jobs = (
        *("rank", "pos", "put_us", "due_us", "expires_us", "max_crashes", "member", "attempts", "failures"),
        *("losses", "crashes", "fence", "started_us", "history", "error", "progress"),
    )
    runs = ("began",)
    ends = ("run:until_us", "run:span_us")
    delays = ("due_us", "put_us", "history")
    records = ("version", "at_us", "expires_us")

    def __init__(self, url: str, schema: str, clock: FakeClock) -> None:
        self._url, self._schema = url, schema
        self.engine: FULL = PostgresEngine(url, schema=schema, clock=clock)

    async def spoil(self, job_id: str, column: str, value: object) -> None:
        column = column.removeprefix("run:")
        for table in ("ready", "scheduled", "running"):
            await self._write(table, column, value, "id", job_id)
        place = f"array_position(ids, '{job_id}')"
        in_chunk = {"put_us": "puts_us", "due_us": "dues_us", "rank": "ranks"}.get(column, column)
        if in_chunk in ("puts_us", "dues_us", "ranks", "max_crashes"):
            kind = "bigint" if in_chunk.endswith("us") else "smallint"
            text = self._as(kind, value)
            await self._run(f"UPDATE chunk SET {in_chunk}[{place}] = {text} WHERE {place} > 0")

    async def spoil_record(self, name: str, column: str, value: object) -> None:
        await self._write("records", column, value, "name", name)

    async def spoil_batch(self) -> None:
        await self._run(
            f"UPDATE batch SET body = 'junk', calls = '[\"on_finished\"]', created_us = {HUGE},"
            f" keep_for_us = {HUGE}"
        )

    async def _write(self, table: str, column: str, value: object, key: str, of: str) -> None:
        connection = await self._connected()
        kind = await connection.fetchval(
            "SELECT format_type(atttypid, NULL) FROM pg_attribute"
            " WHERE attrelid = $1::regclass AND attname = $2",
            table,
            column,
        )
        await connection.close()
        await self._run(f"UPDATE {table} SET {column} = {self._as(kind, value)} WHERE {key} = '{of}'")

    def _as(self, kind: str, value: object) -> str:
        most = {"bigint": 2**63 - 1, "integer": 2**31 - 1, "smallint": 2**15 - 1}.get(kind)
        match value:
            case None:
                return "NULL"
            case int() if most is not None:
                return str(most if value > 0 else -most)
            case _ if kind == "boolean":
                return "true"
            case _ if kind == "jsonb":
                return "'[[1e300, 7], \"junk\"]'" if value == HUGE else "'\"junk\"'"
            case _:
                return "'junk'"

    async def _connected(self) -> Any:
        connection = await asyncpg.connect(self._url)
        await connection.execute(f'SET search_path TO "{self._schema}"')
        return connection

    async def _run(self, statement: str) -> None:
        connection = await self._connected()
        try:
            await connection.execute(statement)
        except (asyncpg.IntegrityConstraintViolationError, asyncpg.DataError):
            pass  # it is not taken, so nothing is damaged
        finally:
            await connection.close()

    async def close(self) -> None:
        await self.engine.close()


class RedisDesk:
    jobs = (
        *("attempts", "failures", "losses", "crashes", "fence", "began", "started", "due", "expires"),
        *("history", "error", "progress", "record:put", "record:seq"),
        *("record:priority", "record:max_crashes"),
    )
    runs = ("fence", "started", "attempt")
    ends = ("lease:span",)
    delays = ("due", "behind", "history")
    records = ("version", "at", "expires")

    def __init__(self, url: str, prefix: str, clock: FakeClock) -> None:
        self._prefix = prefix
        self._link = RedisLink(target_of(Address(url)))
        self.engine: FULL = RedisEngine(target_of(Address(url)), prefix=f"{prefix}:", clock=clock)

    async def _changed(self, key: str, field: str, change: Callable[[bytes], bytes]) -> None:
        await self._link.open()
        before = await self._link.command("HGET", f"{self._prefix}:{key}", field)
        await self._link.command("HSET", f"{self._prefix}:{key}", field, change(before or b""))

    async def spoil(self, job_id: str, field: str, value: object) -> None:
        part, _, name = field.rpartition(":")
        if part == "run":
            number = {"fence": 0, "started": 2, "attempt": 3}[name]
            queue = job_id.rpartition("-")[0]
            await self._changed(f"{{{queue}}}:running", job_id, lambda run: _with_line(run, number, value))
        elif part == "lease":
            await self._changed("bundled", await self._last(), lambda packed: _with_first(packed, value))
        elif part == "record" and name in ("put", "seq"):
            await self._changed("jobs", job_id, lambda text: _with_line(text, 1 + (name == "seq"), value))
        elif part == "record":
            await self._changed("jobs", job_id, lambda text: _with_meta(text, name, value))
        else:
            await self._changed("state", job_id, lambda packed: _with_field(packed, name, value))

    async def _last(self) -> str:
        """The bundle of leases that ends last."""
        await self._link.open()
        [bundle] = await self._link.command("ZREVRANGE", f"{self._prefix}:leases", 0, 0)
        return str(bundle.decode())

    async def spoil_record(self, name: str, field: str, value: object) -> None:
        await self._changed("records:k", name, lambda packed: _with_field(packed, field, value))

    async def spoil_batch(self) -> None:
        await self._link.open()
        fields = ("body", "junk", "calls", "junk", "created", HUGE, "keep_for", "junk", "waiting", "1.5")
        await self._link.command("HSET", f"{self._prefix}:batch:b", *fields)

    async def close(self) -> None:
        await self.engine.close()
        await self._link.close()


def _with_line(text: bytes, n: int, value: object) -> bytes:
    lines = text.split(b"\n")
    if len(lines) > n:
        lines[n] = (lines[n][:1] if n == 0 else b"") + ("" if value is None else str(value)).encode()
    return b"\n".join(lines)


def _with_meta(text: bytes, name: str, value: object) -> bytes:
    *head, meta, body = text.split(b"\n", 4)
    return b"\n".join([*head, msgspec.json.encode({**msgspec.json.decode(meta), name: value}), body])


def _with_field(packed: bytes, name: str, value: object) -> bytes:
    return msgspec.msgpack.encode({**(msgspec.msgpack.decode(packed) if packed else {}), name: value})


def _with_first(packed: bytes, value: object) -> bytes:
    return msgspec.msgpack.encode([value, *msgspec.msgpack.decode(packed)[1:]])


Desk = SQLiteDesk | PostgresDesk | RedisDesk


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def made(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Desk:
    if request.param == "sqlite":
        return SQLiteDesk(tmp_path / "jobs.db", clock)
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
        return PostgresDesk(url, schema, clock)
    return RedisDesk(request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix"), clock)


@pytest_asyncio.fixture
async def desk(made: Desk) -> AsyncIterator[Desk]:
    await made.engine.open()
    yield made
    await made.close()


async def take(engine: FULL, queue: str) -> list[Lease]:
    return await engine.lease({queue: 10}, span=SPAN, holder=HOLDER)


async def trouble(call: Awaitable[object]) -> str | None:
    """What a call has raised: with many columns at once it is to be seen which of them it was."""
    try:
        await call
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


async def drained(engine: FULL, queue: str, ran: set[str]) -> None:
    while leases := await take(engine, queue):
        refused = await engine.settle([(lease, Done()) for lease in leases])
        ran |= {lease.id for lease in leases} - {lease.id for lease in refused}


async def prepared(engine: FULL, state: str, queue: str) -> list[Lease]:
    """Three jobs in a queue of their own, and the leases of those that run."""
    delay = 1000 if state == "scheduled" else 0
    await engine.put([a_job(id=f"{queue}-{n}", queue=queue, delay_ms=delay) for n in range(3)])
    if state in ("ready", "scheduled"):
        return []
    await engine.settle([(lease, Retried()) for lease in await take(engine, queue)])
    return [] if state == "again" else await take(engine, queue)


async def all_jobs(engine: FULL) -> list[JobInfo]:
    found, after = [], None
    while True:
        page = await engine.find(Filter(), after=after)
        found += page.jobs
        if page.after is None:
            return found
        after = page.after


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("damage", DAMAGES)
async def test_one_damaged_job_stops_no_other(desk: Desk, clock: FakeClock, damage: str, state: str) -> None:
    """Each column has a queue of its own, in which one of three jobs is damaged; one sweep sees to all."""
    engine, value = desk.engine, DAMAGES[damage]
    fields = {name.replace(":", "-").replace("_", "-"): name for name in desk.jobs}
    if state in ("running", "settled"):
        fields |= {f"run-{name.replace('_', '-')}": f"run:{name}" for name in desk.runs}
    leases: dict[str, list[Lease]] = {}
    for queue in fields:
        leases[queue] = await prepared(engine, state, queue)
    for queue, field in fields.items():
        await desk.spoil(f"{queue}-1", field, value)
    raised: dict[str, str | None] = {}
    if state == "settled":
        all_leases = chain.from_iterable(leases.values())
        raised["settle"] = await trouble(engine.settle([(lease, Retried()) for lease in all_leases]))
    raised["find"] = await trouble(all_jobs(engine))
    clock.advance(SPAN + timedelta(seconds=1))
    raised["sweep"] = await trouble(engine.sweep())
    ran: set[str] = set()
    for queue in fields:
        raised[queue] = await trouble(drained(engine, queue, ran))
    raised["second sweep"] = await trouble(engine.sweep())

    assert {where: what for where, what in raised.items() if what is not None} == {}
    assert {f"{queue}-{n}" for queue in fields for n in (0, 2)} - ran == set()
    for info in await all_jobs(engine):
        assert info.id not in ran
        if info.state is not State.READY:  # a time that is far away
            assert (info.state, info.reason) in [(State.DEAD, "broken"), (State.DEAD, "expired")], info.id
            assert info.error is not None or info.reason == "expired"


@pytest.mark.parametrize("step", [timedelta(0), timedelta(hours=1)], ids=["no step back", "an hour back"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_lease_moves_no_delay_and_keeps_no_other(
    desk: Desk, clock: FakeClock, damage: str, step: timedelta
) -> None:
    """L2: the lease that ends last shows a time that was, and a damaged one shows any."""
    engine = desk.engine
    for end in desk.ends:
        queue = end.rpartition(":")[2]
        leases = await prepared(engine, "running", queue)
        clock.advance(SPAN / 3)
        await engine.renew([lease for lease in leases if lease.id == f"{queue}-1"], span=SPAN)
        await engine.put([a_job(id=f"{queue}-delayed", queue=queue, delay_ms=4 * 3600_000)])
        await engine.sweep(by="sweeper-1")
        before = await engine.get(f"{queue}-delayed")

        await desk.spoil(f"{queue}-1", end, DAMAGES[damage])
        clock.set_back(step)
        for _ in range(4):
            await engine.sweep(by="sweeper-1")
            clock.advance(SPAN)
        await engine.sweep(by="sweeper-1")

        after = await engine.get(f"{queue}-delayed")
        assert before is not None
        assert after is not None
        assert abs(before.due_at - after.due_at - step) < timedelta(minutes=1)
        assert {f"{queue}-0", f"{queue}-2"} <= {lease.id for lease in await take(engine, queue)}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_delays_follow_the_clock_past_a_damaged_one(desk: Desk, clock: FakeClock, damage: str) -> None:
    """L2: no sweep fails over it."""
    engine, hour = desk.engine, timedelta(hours=1)
    queues = {delay.replace(":", "-").replace("_", "-"): delay for delay in desk.delays}
    for queue, delay in queues.items():
        jobs = [a_job(id=f"{queue}-{n}", queue=queue, delay_ms=4 * 3600_000) for n in range(3)]
        await engine.put(jobs)
        await desk.spoil(f"{queue}-1", delay, DAMAGES[damage])
    await engine.sweep(by="sweeper-1")
    until = clock.now + 4 * hour
    clock.set_back(hour)
    for _ in range(3):
        await engine.sweep(by="sweeper-1")

    for job_id in [f"{queue}-{n}" for queue in queues for n in (0, 2)]:
        info = await engine.get(job_id)
        assert info is not None
        assert abs(until - hour - info.due_at) < timedelta(minutes=1)


@pytest.mark.parametrize("damage", DAMAGES)
async def test_one_damaged_record_hides_no_other(desk: Desk, clock: FakeClock, damage: str) -> None:
    engine, at = desk.engine, timedelta(hours=1)
    names = [*desk.records, "sound"]
    changes = [Change(kind="k", name=name, value=b"1", at=at, expires_in=2 * at) for name in names]
    await engine.swap([Swap(changes=tuple(changes))])
    for field in desk.records:
        await desk.spoil_record(field, field, DAMAGES[damage])
    clock.advance(at)

    reads: list[ReadOptions] = [{}, {"due": True}, {"newest": True}]
    for options in reads:
        assert "sound" in {record.name for record in (await engine.records("k", **options)).records}
    await engine.sweep()
    for record in (await engine.records("k", due=True)).records:  # whoever cannot see to it moves it on
        assert record.at is not None
        await engine.swap([Swap(changes=(Change(kind="k", name=record.name, value=KEEP, at=at),))])
    assert [record.name for record in (await engine.records("k", due=True)).records] == []
    for name in names:
        [stored] = await engine.swap([Swap(changes=(Change(kind="k", name=name, value=b"2"),))])
        assert stored.version is not None
    assert {record.value for record in (await engine.records("k")).records} == {b"2"}


async def test_one_damaged_batch_hides_no_other_and_ends(desk: Desk) -> None:
    engine = desk.engine
    await engine.put_batch(Batch(id="b", on_finished=a_job()), [a_job(batch="b", member=n) for n in range(2)])
    await desk.spoil_batch()
    await engine.put_batch(Batch(id="c"), [a_job(batch="c", member=0)])

    assert [status.id for status in await engine.batches()] == ["b", "c"]
    await drained(engine, "default", set())

    status = await engine.batch("b")
    assert status is None or (status.pending, status.note) == (0, "it cannot be read")
    assert [status.id for status in await engine.batches()][-1] == "c"


@pytest.mark.parametrize("puts_us", ["'{}'", "'{NULL,NULL,NULL}'", f"ARRAY[{HUGE}, 0, {HUGE}]"])
async def test_jobs_of_a_damaged_chunk_are_shelved_and_its_queue_goes_on(
    postgres_url: str, schema: str, clock: FakeClock, puts_us: str
) -> None:
    desk = PostgresDesk(postgres_url, schema, clock)
    await desk.engine.open()
    await prepared(desk.engine, "ready", "chunked")
    assert len(await take(desk.engine, "chunked")) == 3
    await desk._run(f"UPDATE chunk SET puts_us = {puts_us}")
    clock.advance(SPAN)
    await desk.engine.sweep()
    ran: set[str] = set()
    await desk.engine.put([a_job(id="next", queue="chunked")])
    await drained(desk.engine, "chunked", ran)
    assert "next" in ran
    for info in await all_jobs(desk.engine):
        assert (info.state, info.reason) == (State.DEAD, "broken")
    await desk.close()


async def test_what_an_exchange_has_done_stands_where_it_cannot_shelve_a_job(
    postgres_url: str, schema: str, clock: FakeClock
) -> None:
    """L6, L7: a stranger holds the batch of the damaged one."""
    desk = PostgresDesk(postgres_url, schema, clock)
    engine = await desk.engine.open()
    await engine.put([a_job(id="first")])
    [first] = await take(engine, "default")
    members = [a_job(id=name, batch="b", member=n) for n, name in enumerate(["odd", "sound"])]
    await engine.put_batch(Batch(id="b"), members)
    await desk.spoil("odd", "put_us", HUGE)
    stranger = await desk._connected()
    async with stranger.transaction():
        await stranger.execute("SELECT FROM batch FOR UPDATE")
        answer = await engine.exchange([(first, Done())], {"default": 10}, span=SPAN, holder=HOLDER)
    await stranger.close()

    assert answer.lost == []
    assert [lease.id for lease in answer.leases] == ["sound"]
    clock.advance(SPAN)
    await engine.sweep()
    await drained(engine, "default", set())
    odd = await engine.get("odd")
    assert odd is not None
    assert odd.reason == "broken"
    await desk.close()

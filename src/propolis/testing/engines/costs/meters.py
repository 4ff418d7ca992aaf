"""How much work a storage has done, counted where that does not depend on the hour or on its neighbours."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import asyncpg

from propolis.core.clock import Clock
from propolis.core.protocols import Durability, Engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.client import Row
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.book.store import HeldTable, Store, Table
from propolis.engines.shared.book.stored_engine import StoreEngine
from propolis.engines.sqlite.engine import SQLiteEngine


class Meter(Protocol):
    """Work is counted in `unit`.  Below `floor` it is as good as nothing, and growth is no growth.

    Of `repeats` calls the cheapest counts: what a neighbour or a cache has added is not the verb's.
    """

    unit: str
    floor: float
    repeats: int

    async def filled(self) -> None:
        """Before each verb: the storage has changed, and is to do now what it would have done in time."""
        ...

    async def read(self) -> float:
        """All work so far."""
        ...


EVERY = 10  # steps of SQLite's virtual machine are counted together


class SQLiteMeter:
    """Counts the steps of SQLite's virtual machine, which are the same each time."""

    unit, floor, repeats = "VM steps", 500.0, 2

    def __init__(self, engine: SQLiteEngine) -> None:
        self._engine = engine
        self._steps = 0

    async def filled(self) -> None: ...

    async def read(self) -> float:
        file = self._engine._file
        for connection in (file._writer, file._reader):
            if isinstance(connection, sqlite3.Connection):
                connection.set_progress_handler(self._step, EVERY)
        return self._steps

    def _step(self) -> int:
        self._steps += EVERY
        return 0


class PostgresMeter:
    """Counts rows that were read or written and buffers that were touched, of all tables of one schema.

    From the moment it is filled all statements of the engine go through one session, which counts its own
    work: so what others do on the server is not counted.  Before each verb rows that are dead are removed:
    else a verb would cost what those before it have left.
    """

    unit, floor, repeats = "rows and buffers", 150.0, 1

    def __init__(
        self,
        engine: PostgresEngine,
        session: asyncpg.Connection,
        watch: asyncpg.Connection,
        schema: str,
    ) -> None:
        self._engine = engine
        self._session = session
        self._watch = watch
        self._schema = schema
        self._tables: list[str] = []
        self._turn = asyncio.Lock()
        self._work = 0

    async def filled(self) -> None:
        """Sweeps have added the tally up, and nobody vacuums while we count."""
        while await self._watch.fetchval(f"SELECT EXISTS (SELECT FROM {self._schema}.tally)"):
            await self._engine.sweep(limit=0)
        if not self._tables:
            await self._begin()
        async with self._turn:
            await self._watch.execute(f"VACUUM (INDEX_CLEANUP ON) {', '.join(self._tables)}")

    async def _begin(self) -> None:
        rows = await self._watch.fetch(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = $1", self._schema
        )
        self._tables = [table for (table,) in rows]
        for table in self._tables:
            await self._watch.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
        await self._watch.execute(f"ANALYZE {', '.join(self._tables)}")
        link = self._engine._link
        link.write = link.read = self._counted  # type: ignore[method-assign]

    async def put_one_by_one(self, queue: str, calls: int) -> None:
        """So many jobs, each in a call of its own, while nobody sweeps."""
        put = f"{self._engine.function_set}.put_one"
        call = f"{put}(NULL, id::text, 'tests.echo', $1, 0::smallint, 3::smallint, '', NULL)"
        ids = "SELECT gen_random_uuid() AS id FROM generate_series(1, $2)"
        await self._watch.execute(f"SELECT {call} FROM ({ids}) AS each", queue, calls)
        await self._watch.execute(f"VACUUM (INDEX_CLEANUP ON) {self._schema}.tally")

    async def read(self) -> float:
        return self._work

    async def _counted(self, statement: str, *args: object, **_: float) -> list[Row]:
        async with self._turn, self._session.transaction():
            before = await self._session.fetchval(WORK, self._schema)
            rows: list[Row] = await self._session.fetch(statement, *args)
            self._work += await self._session.fetchval(WORK, self._schema) - before
        return rows


WORK = """
    SELECT sum(pg_stat_get_xact_blocks_fetched(oid) + pg_stat_get_xact_tuples_returned(oid)
               + pg_stat_get_xact_tuples_fetched(oid) + pg_stat_get_xact_tuples_inserted(oid)
               + pg_stat_get_xact_tuples_updated(oid) + pg_stat_get_xact_tuples_deleted(oid))::bigint
      FROM (SELECT unnest(ARRAY[c.oid, c.reltoastrelid, i.indexrelid]) AS oid
              FROM pg_class AS c LEFT JOIN pg_index AS i ON i.indrelid = c.reltoastrelid
             WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('r', 'i')) AS each
"""


class RedisMeter:
    """Counts the CPU time of the thread that runs the commands.  The server is nobody else's.

    Unlike the time of a command, it does not grow while the server waits for a processor.
    """

    unit, floor, repeats = "µs of CPU", 400.0, 5

    def __init__(self, engine: RedisEngine | ShardedEngine) -> None:
        self._engine = engine

    async def filled(self) -> None: ...

    async def read(self) -> float:
        text = await self._engine._link.command("INFO", "cpu", reads=True)
        return sum(float(seconds) for seconds in _SECONDS.findall(text)) * 1e6


_SECONDS = re.compile(rb"used_cpu_(?:sys|user)_main_thread:([0-9.]+)")
SHARDS = 4
# What the server does by itself, it does rarely.
QUIET = {"activerehashing": "no", "hz": 1}


class StoreMeter:
    """Counts the pairs that the book reads from its store, or writes."""

    unit, floor, repeats = "pairs", 50.0, 1

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pairs = 0

    async def filled(self) -> None: ...

    async def read(self) -> float:
        return self._pairs

    # --- a store that counts, to give to the engine --------------------------------------

    @property
    def durability(self) -> Durability:
        return self._store.durability

    def open(self) -> None:
        self._store.open()

    def close(self) -> None:
        self._store.close()

    def changes(self) -> object:
        return self._store.changes()

    @contextmanager
    def transaction(self) -> Iterator[Table]:
        with self._store.transaction() as table:
            yield _CountedTable(table, self)

    def count(self, pairs: int) -> None:
        self._pairs += pairs


class HeldStore:
    """A table in this process as a store.  Its transactions are not undone: nothing fails in between."""

    durability = Durability.MEMORY

    def __init__(self) -> None:
        self._table = HeldTable()
        self._commits = 0

    def open(self) -> None: ...

    def close(self) -> None: ...

    def changes(self) -> int:
        return self._commits

    @contextmanager
    def transaction(self) -> Iterator[Table]:
        yield self._table
        self._commits += 1


class _CountedTable:
    def __init__(self, table: Table, meter: StoreMeter) -> None:
        self._table = table
        self._meter = meter

    def get(self, key: str) -> bytes | None:
        self._meter.count(1)
        return self._table.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._meter.count(1)
        self._table.set(key, value)

    def delete(self, key: str) -> None:
        self._meter.count(1)
        self._table.delete(key)

    def range(self, start: str, end: str, limit: int, *, backwards: bool = False) -> list[tuple[str, bytes]]:
        found = self._table.range(start, end, limit, backwards=backwards)
        self._meter.count(1 + len(found))
        return found


class MemoryMeter:
    """Counts what the interpreter does, instruction by instruction, between two looks.

    What a call of C does inside counts as one: a walk in there is not seen.
    """

    unit, floor, repeats = "instructions", 2000.0, 1

    def __init__(self) -> None:
        self._instructions = 0
        self._counting = False
        self._others: Any = None  # whoever traces else: one that measures coverage

    async def filled(self) -> None: ...

    async def read(self) -> float:
        """Each second look ends what the one before began."""
        self._counting = not self._counting
        if self._counting:
            self._others = sys.gettrace()
        sys.settrace(self._trace if self._counting else self._others)
        return self._instructions

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._instructions += event == "opcode"
        return self._trace


@asynccontextmanager
async def metered_memory(clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    yield MemoryEngine(clock=clock), MemoryMeter()


@asynccontextmanager
async def metered_sqlite(path: Path, clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    engine = await SQLiteEngine(path, clock=clock, synchronous="normal").open()
    yield engine, SQLiteMeter(engine)
    await engine.close()


@asynccontextmanager
async def metered_postgres(url: str, schema: str, clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    engine = await PostgresEngine(url, schema=schema, clock=clock, patience="10m").open()
    session, watch = await asyncpg.connect(url), await asyncpg.connect(url)
    yield engine, PostgresMeter(engine, session, watch, schema)
    await engine.close()
    await session.close()
    await watch.execute(dropped(schema))
    await watch.close()


@asynccontextmanager
async def metered_redis(url: str, prefix: str, clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    engine = await RedisEngine(target_of(Address(f"{url}?patience=10m")), prefix=prefix, clock=clock).open()
    yield engine, RedisMeter(engine)
    await engine.close()


@asynccontextmanager
async def metered_shards(url: str, name: str, clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    """All shards on one server: so what a call costs in all of them is counted together."""
    target, shard_map = target_of(Address(f"{url}?patience=10m")), ShardMap(SHARDS)
    engine = await ShardedEngine(target, shard_map, prefix=f"{{{name}}}:", clock=clock).open()
    yield engine, RedisMeter(engine)
    await engine.close()


@asynccontextmanager
async def metered_book(clock: Clock) -> AsyncIterator[tuple[Engine, Meter]]:
    """What engines over a store share, on the smallest one."""
    async with metered_store(HeldStore(), partial(StoreEngine, clock=clock)) as metered:
        yield metered


@asynccontextmanager
async def metered_store(
    store: Store, over: Callable[[Store], StoreEngine]
) -> AsyncIterator[tuple[Engine, Meter]]:
    meter = StoreMeter(store)
    engine = await over(meter).open()
    yield engine, meter
    await engine.close()

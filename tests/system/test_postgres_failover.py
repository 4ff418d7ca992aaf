"""An asynchronous standby is promoted: leases of which it knows nothing are worth nothing."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import asyncpg
import pytest

from propolis.core.job import Done, Lease
from propolis.core.protocols import Note, Renewal
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.serving import PostgresServer, postgres

JOBS = 120  # a server draws numbers in advance, 32 at once: fewer leases would not meet their numbers again


async def cut_off(server: PostgresServer) -> None:
    """From here on it hears nothing of the other one, whatever that acknowledges."""
    connection = await asyncpg.connect(server.url)
    await connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
    await connection.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(60):
        while await connection.fetchval("SELECT count(*) FROM pg_stat_wal_receiver"):
            await asyncio.sleep(0.01)
    await connection.close()


async def caught_up(server: PostgresServer, engine: PostgresEngine) -> None:
    connection = await asyncpg.connect(server.url)
    [row] = await engine._link.read("SELECT pg_current_wal_flush_lsn()::text")
    async with asyncio.timeout(60):
        while not await connection.fetchval("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", row[0]):
            await asyncio.sleep(0.01)
    await connection.close()


async def promote(server: PostgresServer) -> None:
    connection = await asyncpg.connect(server.url)
    assert await connection.fetchval("SELECT pg_promote()")
    await connection.close()


async def taken(engine: PostgresEngine) -> list[Lease]:
    """Everything: of one queue one by one, of the other in bundles."""
    leases: list[Lease] = []
    for queue, n in (("default", 1), ("bundles", 5)):
        while got := await engine.lease({queue: n}, span=SPAN, holder=HOLDER):
            leases += got
    return leases


async def refused(engine: PostgresEngine, leases: list[Lease]) -> None:
    assert await engine.renew(leases, span=SPAN) == [Renewal(None)] * len(leases)
    assert await engine.note([Note(lease, lines=("still here",)) for lease in leases]) == leases
    assert await engine.settle([(lease, Done()) for lease in leases]) == leases


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.full)])
async def test_no_lease_is_given_twice_across_a_failover(times: int) -> None:
    """I3, F28: no two leases are the same, though their holder is; old ones are not renewed nor settled."""
    given: list[Lease] = []
    with postgres() as server, ExitStack() as stack:
        engine = await PostgresEngine(server.url).open()
        for n in range(times):
            await engine.put([a_job() for _ in range(JOBS)] + [a_job(queue="bundles") for _ in range(JOBS)])
            standby = server.standby(server.folder.parent / f"standby-{n}")
            standby.start()
            stack.callback(standby.stop)
            await caught_up(standby, engine)
            await cut_off(standby)
            leases = await taken(engine)
            await refused(engine, given)
            given += leases
            await engine.close()
            server.kill()
            await promote(standby)
            engine, server = await PostgresEngine(standby.url).open(), standby
        leases = await taken(engine)
        await refused(engine, given)

        assert await engine.settle([(lease, Done()) for lease in leases]) == []
        assert len(leases) == 2 * JOBS * times
        given += leases
        assert len({(lease.id, lease.fence) for lease in given}) == len(given)
        await engine.close()


async def test_no_lease_is_given_twice_after_a_crash_that_forgot_some() -> None:
    """I3: with `synchronous_commit=off` a server that is killed does not know its last leases."""
    settings = ("synchronous_commit=off", "wal_writer_delay=10s")
    with postgres(settings=settings) as server:
        engine = await PostgresEngine(server.url).open()
        await engine.put([a_job() for _ in range(JOBS)] + [a_job(queue="bundles") for _ in range(JOBS)])
        await engine._link.read("CHECKPOINT")
        forgotten = await taken(engine)
        server.kill()
        await engine.close()
        server.start()

        engine = await PostgresEngine(server.url).open()
        counts = await engine.queues()
        assert sum(counts[queue].ready for queue in ("default", "bundles")) > JOBS  # it has forgotten them
        again = await taken(engine)
        known = {(lease.id, lease.fence) for lease in forgotten}
        assert [lease for lease in again if (lease.id, lease.fence) in known] == []
        await refused(engine, [lease for lease in forgotten if lease.id in {it.id for it in again}])
        assert await engine.settle([(lease, Done()) for lease in again]) == []
        await engine.close()

"""F51: a process that is stopped while it holds something, as by SIGSTOP, holds it for a moment only."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

# Leases all there is, and stops itself: before the commit, or while a large answer is on its way.
CLIENT = """
import asyncio, asyncpg, os, signal, sys
from datetime import timedelta
from propolis.engines.postgres import client
from propolis.engines.postgres.engine import PostgresEngine

client.IDLE_WITHIN = client.UNREAD_WITHIN = 0.5
url, schema, moment = sys.argv[1:]
fetch = asyncpg.Connection.fetch

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

async def lease(engine, queue):
    return await engine.lease({queue: 1000}, span=timedelta(minutes=1), holder="frozen")

async def stopped_before_commit(connection, watch, statement, args):
    await connection.fetch(statement, *args)
    stop()

async def stopped_when_asked(connection, statement, *args, **options):
    asyncio.get_running_loop().call_soon(stop)  # the statement is sent before anything else is done
    return await fetch(connection, statement, *args, **options)

async def main():
    engine = await PostgresEngine(url, schema=schema).open()
    await lease(engine, "nothing")
    if moment == "before the commit":
        client._fetch_seen = stopped_before_commit
    else:
        asyncpg.Connection.fetch = stopped_when_asked
    await lease(engine, "default")

asyncio.run(main())
"""

SESSION = """
SELECT state, wait_event FROM pg_stat_activity
 WHERE position($1 IN query) > 0 AND position('exchange' IN query) > 0 AND pid <> pg_backend_pid()
   AND state <> 'idle'
"""


@asynccontextmanager
async def stopped(url: str, schema: str, moment: str) -> AsyncIterator[None]:
    """A client that has stopped itself at this moment."""
    command = [sys.executable, "-c", CLIENT, url, schema, moment]
    process = await asyncio.to_thread(subprocess.Popen, command)
    try:
        _, status = await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, process.pid, 0)
        process.returncode = -signal.SIGKILL


async def until_its_session_is(
    observer: asyncpg.Connection, schema: str, wanted: list[tuple[str, str]]
) -> None:
    async with asyncio.timeout(20):
        while [tuple(row) for row in await observer.fetch(SESSION, f'"{schema}')] != wanted:
            await asyncio.sleep(0.02)


async def test_a_client_stopped_before_its_commit_behind_a_pooler_loses_its_transaction(
    engine: PostgresEngine, connection: asyncpg.Connection, pgbouncer_url: str, schema: str
) -> None:
    """L6.3."""
    await engine.put([a_job() for _ in range(10)])
    async with stopped(pgbouncer_url, schema, "before the commit"):
        assert await engine.lease({"default": 10}, span=SPAN, holder=HOLDER) == []
        await until_its_session_is(connection, schema, [])
        assert len(await engine.lease({"default": 10}, span=SPAN, holder=HOLDER)) == 10


async def test_a_client_stopped_while_its_answer_comes_loses_its_claim(
    engine: PostgresEngine, connection: asyncpg.Connection, postgres_url: str, schema: str
) -> None:
    """L6.4: more than fits into the buffers between the server and the client."""
    await engine.put([a_job("x" * 250_000) for _ in range(60)])
    async with stopped(postgres_url, schema, "while the answer comes"):
        await until_its_session_is(connection, schema, [("active", "ClientWrite")])
        await until_its_session_is(connection, schema, [])
        assert len(await engine.lease({"default": 60}, span=SPAN, holder=HOLDER)) == 60

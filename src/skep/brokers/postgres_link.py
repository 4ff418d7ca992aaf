"""Connections to one PostgreSQL: who has them, how long they take, what their errors mean; not what jobs are.

An asyncpg connection belongs to the event loop that made it, and an engine is used from several: the
worker's, the lease keeper's, a producer's.  So each loop has a few of its own, kept open, and given back
when the loop ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from skep.errors import (
    EngineClosed,
    EngineError,
    EngineUnavailable,
    ForkedEngine,
    OutcomeUnknown,
    StorageFull,
)

T = TypeVar("T")
Connection = Any  # asyncpg.Connection, which has no types of its own
Row = Any  # asyncpg.Record

MOST_CONNECTIONS = 6  # per event loop
RETRIES = 20  # of what the server gave up because of others: deadlocks, mostly
CONNECT_WITHIN = 10.0
CLOSE_WITHIN = 2.0

# Serialization, deadlock, lock not available; and the id that somebody else put in this very moment: whoever
# looks again finds it.
_GAVE_UP = ("40001", "40P01", "55P03", "23505")
# What the driver raises when a connection is gone, or is just being closed by the server.
LOST = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_FULL = ("53100",)
_GOING_DOWN = ("57P01", "57P02", "57P03", "57P05")
_NOT_REPLICATED = "canceling wait for synchronous replication"


class Refused(Exception):
    """The server raised an error that our own SQL wrote: a code that begins with SK, and a detail."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


class PostgresLink:
    """Statements on one database, from any number of event loops."""

    def __init__(self, url: str, *, shown: str, patience: float, prepare: bool = True) -> None:
        self._url = url
        self._shown = shown
        self._patience = patience
        self._prepare = prepare
        self._lock = threading.Lock()
        self._lines: dict[asyncio.AbstractEventLoop, _Lines] = {}
        self._pid = 0

    def open(self) -> bool:
        """False if it was open already."""
        if self._pid:
            self.check_usable()
            return False
        self._pid = os.getpid()
        return True

    async def close(self) -> None:
        forked, self._pid = self._pid != os.getpid(), 0
        with self._lock:
            lines, self._lines = self._lines, {}
        if forked:  # they are the parent's
            return
        for each in lines.values():
            await each.close()

    def check_usable(self) -> None:
        if self._pid != os.getpid():
            if self._pid == 0:
                raise EngineClosed
            raise ForkedEngine(self._pid, os.getpid())

    async def connect(self) -> Connection:
        """A new connection of one's own, for the running loop."""
        options: dict[str, Any] = {"statement_cache_size": 200 if self._prepare else 0}
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await asyncpg.connect(
                    self._url, server_settings={"application_name": "skep"}, **options
                )
        except (asyncpg.PostgresError, *LOST) as error:
            raise EngineUnavailable(
                f"{self._shown} cannot be reached ({_said(error)}): nothing was changed"
            ) from error
        return connection

    async def read(self, statement: str, *args: object) -> list[Row]:
        """What has no effect is repeated once where a connection turns out to be gone."""
        try:
            return await self._fetch(statement, args)
        except OutcomeUnknown:
            try:
                return await self._fetch(statement, args)
            except OutcomeUnknown as error:
                raise EngineUnavailable(f"{self._shown} did not answer: {error.__cause__}") from error

    async def write(self, statement: str, *args: object) -> list[Row]:
        """One statement, one commit.  `OutcomeUnknown` when the answer was lost."""
        return await self._fetch(statement, args)

    async def run(self, act: Callable[[Connection], Awaitable[T]]) -> T:
        """Several statements in one transaction: for migrations."""
        self.check_usable()
        lines = self._lines_here()
        connection = await lines.take()
        try:
            async with connection.transaction():
                return await act(connection)
        except (asyncpg.PostgresError, *LOST) as error:
            raise self._explained(error) from error
        finally:
            lines.give_back(connection)

    async def _fetch(self, statement: str, args: Sequence[object]) -> list[Row]:
        self.check_usable()
        lines = self._lines_here()
        for _ in range(RETRIES):
            try:
                return await self._fetch_once(lines, statement, args)
            except asyncpg.PostgresError as error:
                if error.sqlstate not in _GAVE_UP:
                    raise self._explained(error) from error
            except LOST as error:
                raise self._explained(error) from error
            await asyncio.sleep(random.uniform(0.001, 0.01))
        raise EngineUnavailable(
            f"{self._shown} gave up {RETRIES} times because of others: nothing was changed"
        )

    async def _fetch_once(self, lines: _Lines, statement: str, args: Sequence[object]) -> list[Row]:
        connection = await lines.take()
        try:
            rows: list[Row] = await connection.fetch(statement, *args, timeout=self._patience)
        except asyncpg.PostgresError as error:
            if error.sqlstate in _GOING_DOWN:
                connection.terminate()
            raise
        except (
            BaseException
        ):  # also when the caller no longer waits: the answer must not be taken for another's
            connection.terminate()
            raise
        finally:
            warning = lines.give_back(connection)
        if warning is not None:
            raise OutcomeUnknown(f"{self._shown}: {warning}")
        return rows

    def _lines_here(self) -> _Lines:
        loop = asyncio.get_running_loop()
        lines = self._lines.get(loop)
        if lines is None:
            lines = _Lines(self, loop)
            with self._lock:
                self._lines[loop] = lines
        return lines

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._lines.pop(loop, None)

    def _explained(self, error: Exception) -> Exception:
        """The same in our words."""
        code = getattr(error, "sqlstate", None) or ""
        if code.startswith("SK"):
            return Refused(code, getattr(error, "detail", None) or "")
        if code in _FULL:
            return StorageFull(self._shown)
        if code in _GAVE_UP:
            return EngineUnavailable(f"{self._shown}: {error}: nothing was changed")
        if isinstance(error, asyncpg.PostgresError) and not (
            code in _GOING_DOWN or isinstance(error, asyncpg.PostgresConnectionError)
        ):
            return EngineError(f"{self._shown}: {error}")
        return OutcomeUnknown(f"{self._shown}: the answer was lost ({_said(error)})")


class _Lines:
    """The connections of one event loop."""

    def __init__(self, link: PostgresLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._free: list[Connection] = []
        self._warnings: dict[Connection, str] = {}
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        # A loop that ends cancels what still runs in it: that is how we hear of it.
        self._guardian = loop.create_task(self._guard(), name="skep-postgres")

    async def take(self) -> Connection:
        await self._room.acquire()
        try:
            while self._free:
                connection = self._free.pop()
                if not connection.is_closed():
                    return connection
            connection = await self._link.connect()
            connection.add_log_listener(self._warned)
        except BaseException:
            self._room.release()
            raise
        return connection

    def give_back(self, connection: Connection) -> str | None:
        """Gives what the server said of a commit that may not have reached its copies."""
        self._room.release()
        if self._guardian.done():
            connection.terminate()
        elif not connection.is_closed():
            self._free.append(connection)
        return self._warnings.pop(connection, None)

    async def close(self) -> None:
        """From any loop."""
        if self._loop is asyncio.get_running_loop():
            self._guardian.cancel()
            await asyncio.wait({self._guardian})
        elif self._loop.is_running():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._guardian.cancel)

    async def _guard(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._link.forget(self._loop)
            free, self._free = self._free, []
            for connection in free:
                await _let_go(connection)

    def _warned(self, connection: Connection, message: Any) -> None:
        if _NOT_REPLICATED in str(message):
            self._warnings[connection] = str(message)


async def _let_go(connection: Connection) -> None:
    try:
        await connection.close(timeout=CLOSE_WITHIN)
    except (asyncpg.PostgresError, *LOST):
        connection.terminate()


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__

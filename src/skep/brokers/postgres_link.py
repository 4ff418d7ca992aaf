"""Connections to one PostgreSQL: who has them, how long they take, what their errors mean; not what jobs are.

An asyncpg connection belongs to the event loop that made it, and an engine is used from several: the
worker's, the lease keeper's, a producer's.  So each loop has a few of its own, kept open, and given back
when the loop ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
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
SPARE_FOR = 60.0  # seconds after which a connection that was not needed is closed, but for the last one
MIGRATE_WITHIN = 600.0
LEEWAY = 0.1  # seconds
QUIET, PROBE_EVERY, PROBES = (
    15,
    5,
    3,
)  # seconds until an idle connection is probed by the system, and how often

# Serialization, deadlock, lock not available; and the id that somebody else put in this very moment: whoever
# looks again finds it.
_GAVE_UP = ("40001", "40P01", "55P03", "23505")
# What the driver raises when a connection is gone, or is just being closed by the server.
LOST = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_FULL = ("53100",)
# Cancelled by an administrator or a timeout of the server's; a standby; out of memory or of connections: all
# of them before anything was changed.
_NOT_NOW = ("57014", "25006", "53000", "53200", "53300", "53400")
_STANDBY = "25006"
_NO_RIGHTS = "42501"
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

    def __init__(
        self,
        url: str,
        *,
        shown: str,
        patience: float,
        prepare: bool | None = None,
        most: int = MOST_CONNECTIONS,
    ) -> None:
        """`prepare` says whether statements may be prepared under a name; None: unless there is a pooler."""
        self._url = url
        self.shown = shown
        self.patience = patience
        self.most = most
        self._prepare = prepare
        self.named = bool(prepare)
        self._settings = {"application_name": "skep"}
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

    async def look_for_pooler(self) -> bool:
        """Whether something between us and the server gives us sessions of the server in turn.

        If nothing does, the server is asked to give up by itself what takes longer than our patience: else
        it would go on for clients that have left, wait for locks, and lease jobs to nobody.

        It must then answer requests to cancel by itself, so the process it names is not the one that serves
        us.  Named statements are not safe there, and not only because they may be missing: another client's
        may have the same name.
        """
        connection = await self.connect()
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                ask = partial(connection.fetchval, "SELECT pg_backend_pid()")
                pooled = await _in_transaction(connection, CONNECT_WITHIN, ask) != connection.get_server_pid()
        except (asyncpg.PostgresError, *LOST) as error:
            raise EngineUnavailable(f"{self.shown} did not answer ({_said(error)})") from error
        finally:
            connection.terminate()
        self.named = not pooled if self._prepare is None else self._prepare
        if not pooled:  # which would refuse it, or give it to everybody
            self._settings = {**self._settings, "statement_timeout": _milliseconds(self.patience)}
        return bool(pooled)

    async def connect(self) -> Connection:
        """A new connection of one's own, for the running loop."""
        options: dict[str, Any] = {"statement_cache_size": 200 if self.named else 0}
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await asyncpg.connect(self._url, server_settings=self._settings, **options)
                _keep_alive(connection, self.patience)
        except (asyncpg.PostgresError, *LOST) as error:
            raise EngineUnavailable(
                f"{self.shown} cannot be reached ({_said(error)}): nothing was changed"
            ) from error
        return connection

    async def insist(self, name: str, value: str) -> None:
        """Have a setting of the server's on every connection from now on, whatever its default is."""
        self._settings = {**self._settings, name: value}
        await self._lines_here().let_go()

    async def read(self, statement: str, *args: object) -> list[Row]:
        """What has no effect is repeated once where a connection turns out to be gone."""
        try:
            return await self._fetch(statement, args)
        except OutcomeUnknown as lost:
            if isinstance(lost.__cause__, TimeoutError):
                raise EngineUnavailable(f"{self.shown} did not answer in time") from lost
            try:
                return await self._fetch(statement, args)
            except OutcomeUnknown as error:
                raise EngineUnavailable(f"{self.shown} did not answer: {error.__cause__}") from error

    async def write(self, statement: str, *args: object) -> list[Row]:
        """One statement, one commit.  `OutcomeUnknown` when the answer was lost."""
        return await self._fetch(statement, args)

    async def run(self, act: Callable[[Connection], Awaitable[T]]) -> T:
        """Several statements in one transaction: for migrations."""
        self.check_usable()
        lines = self._lines_here()
        connection = await self._take(lines)
        try:
            async with asyncio.timeout(MIGRATE_WITHIN):
                return await _in_transaction(connection, MIGRATE_WITHIN, partial(act, connection))
        except asyncpg.PostgresError as error:
            raise self.explained(error) from error
        except LOST as error:
            connection.terminate()
            raise self.explained(error) from error
        except BaseException:
            connection.terminate()
            raise
        finally:
            lines.give_back(connection)

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[Connection]:
        """A connection for as long as the caller wants it; the next one gets it as it is left."""
        self.check_usable()
        lines = self._lines_here()
        connection = await lines.take()  # with all patience: those that run jobs have it for long
        try:
            yield connection
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
                    raise self.explained(error) from error
            except LOST as error:
                raise self.explained(error) from error
            await asyncio.sleep(random.uniform(0.001, 0.01))
        raise EngineUnavailable(
            f"{self.shown} gave up {RETRIES} times because of others: nothing was changed"
        )

    async def _fetch_once(self, lines: _Lines, statement: str, args: Sequence[object]) -> list[Row]:
        began = asyncio.get_running_loop().time()
        connection = await self._take(lines)
        remaining = max(0.01, self.patience - (asyncio.get_running_loop().time() - began))
        try:
            if self.named:
                rows: list[Row] = await connection.fetch(statement, *args, timeout=remaining)
            else:
                async with asyncio.timeout(remaining):
                    # Asking for an unnamed statement and running it must reach the same session.
                    fetch = partial(connection.fetch, statement, *args)
                    rows = await _in_transaction(connection, remaining, fetch)
        except asyncpg.PostgresError as error:
            if error.sqlstate in (*_GOING_DOWN, _STANDBY):
                connection.terminate()  # the next one may lead elsewhere
            raise
        except (
            BaseException
        ):  # also when the caller no longer waits: the answer must not be taken for another's
            connection.terminate()
            raise
        finally:
            warning = lines.give_back(connection)
        if warning is not None:
            raise OutcomeUnknown(f"{self.shown}: {warning}")
        return rows

    async def _take(self, lines: _Lines) -> Connection:
        if lines.at_hand():  # as mostly: without the cost of a timer
            return await lines.take()
        try:
            async with asyncio.timeout(self.patience):
                return await lines.take()
        except TimeoutError as error:
            raise EngineUnavailable(
                f"{self.shown}: no connection was free in time: nothing was changed"
            ) from error

    def _lines_here(self) -> _Lines:
        loop = asyncio.get_running_loop()
        lines = self._lines.get(loop)
        if lines is None:
            lines = _Lines(self, loop)
            with self._lock:
                self._lines[loop] = lines
        return lines

    def call_soon(self, act: Callable[..., object], *args: object) -> None:
        """In one of the event loops that use this link, from any thread; in none if none of them runs."""
        with self._lock:
            loops = [loop for loop in self._lines if loop.is_running()]
        for loop in loops:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(act, *args)
                return

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._lines.pop(loop, None)

    def explained(self, error: Exception) -> Exception:
        """The same in our words."""
        code = getattr(error, "sqlstate", None) or ""
        if code.startswith("SK"):
            return Refused(code, getattr(error, "detail", None) or "")
        if code in _FULL:
            return StorageFull(self.shown)
        if code in _NOT_NOW:
            return EngineUnavailable(f"{self.shown}: {error}: nothing was changed")
        if code == _NO_RIGHTS:
            return EngineError(
                f"{self.shown}: {error}: grant that to this user, or let another one run what "
                f"`skep init --sql` prints"
            )
        if code in _GAVE_UP:
            return EngineUnavailable(f"{self.shown}: {error}: nothing was changed")
        if isinstance(error, asyncpg.PostgresError) and not (
            code in _GOING_DOWN or isinstance(error, asyncpg.PostgresConnectionError)
        ):
            return EngineError(f"{self.shown}: {error}")
        return OutcomeUnknown(f"{self.shown}: the answer was lost ({_said(error)})")


class _Lines:
    """The connections of one event loop."""

    def __init__(self, link: PostgresLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._free: list[tuple[float, Connection]] = []  # since when; the one used last is used next
        self._leaving: set[asyncio.Task[None]] = set()
        self._warnings: dict[Connection, str] = {}
        self._room = asyncio.Semaphore(link.most)
        # A loop that ends cancels what still runs in it: that is how we hear of it.
        self._guardian = loop.create_task(self._guard(), name="skep-postgres")

    def at_hand(self) -> bool:
        """Whether there is a connection for whoever takes one now, without waiting."""
        return bool(self._free) and not self._free[-1][1].is_closed() and not self._room.locked()

    async def take(self) -> Connection:
        await self._room.acquire()
        try:
            while self._free:
                _, connection = self._free.pop()
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
            self._free.append((self._loop.time(), connection))
            self._part_with_spare()
        return self._warnings.pop(connection, None)

    def _part_with_spare(self) -> None:
        """Of those that nobody has needed for long, one at a time."""
        since, connection = self._free[0]
        if len(self._free) > 1 and self._loop.time() - since > SPARE_FOR:
            del self._free[0]
            leaving = self._loop.create_task(_let_go(connection))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

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
            await self.let_go()

    async def let_go(self) -> None:
        """Close those that nobody uses."""
        free, self._free = self._free, []
        for _, connection in free:
            await _let_go(connection)

    def _warned(self, connection: Connection, message: Any) -> None:
        if _NOT_REPLICATED in str(message):
            self._warnings[connection] = str(message)


async def _let_go(connection: Connection) -> None:
    try:
        await connection.close(timeout=CLOSE_WITHIN)
    except (asyncpg.PostgresError, *LOST):
        connection.terminate()
    except asyncio.CancelledError:  # no time is left to say goodbye
        connection.terminate()
        raise


def _milliseconds(seconds: float) -> str:
    """As a setting of the server: a little longer than we wait, so that it is always we who give up first."""
    return str(round((seconds + LEEWAY) * 1000))


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _in_transaction(connection: Connection, within: float, act: Callable[[], Awaitable[T]]) -> T:
    """Not the driver's own, which waits for a rollback also where no answer comes any more.

    No statement of it is given more seconds than that by the server, should we no longer be there.
    """
    await connection.execute(f"BEGIN; SET LOCAL statement_timeout = {_milliseconds(within)}")
    try:
        done = await act()
        await connection.execute("COMMIT")
    except asyncpg.PostgresError:
        await connection.execute("ROLLBACK")
        raise
    return done


def _keep_alive(connection: Connection, patience: float) -> None:
    """Let the system find out that the other side is gone, also while nobody asks anything."""
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": QUIET,
        "TCP_KEEPINTVL": PROBE_EVERY,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": max(1, round(patience * 1000)),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not everywhere
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

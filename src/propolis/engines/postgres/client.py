"""Connections to one PostgreSQL: how they are shared, how long they take, what their errors mean; no jobs.

An asyncpg connection belongs to the event loop that made it, and an engine is used from several: the
worker's, the lease keeper's, a producer's.  So each loop has a few of its own, kept open, and given back
when the loop ends.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401  # now: the first name is resolved in a thread, which a fork may interrupt
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import asyncpg

from propolis.engines.address import Address
from propolis.engines.forks import check_opener
from propolis.engines.shared.guarded_lock import GuardedLock
from propolis.engines.shared.loop_guardian import LoopGuardian
from propolis.errors import (
    BadSetting,
    Busy,
    EngineError,
    EngineUnavailable,
    OutcomeUnknown,
    PropolisError,
    StorageFull,
)

log = logging.getLogger("propolis.postgres")
T = TypeVar("T")
Connection = Any  # asyncpg.Connection, which has no types of its own
Row = Any  # asyncpg.Record

SCHEMES = ("postgres", "postgresql")
MAX_CONNECTIONS = 6  # per event loop
RETRIES = 20  # of what the server gave up because of others: deadlocks, mostly
CONNECT_WITHIN = 10.0
CLOSE_WITHIN = 2.0
SPARE_FOR = 60.0  # seconds after which a connection that was not needed is closed, but for the last one
THIRD_FOR = 5.0  # the same where two others are free as well
MIGRATE_WITHIN = 600.0
LOCK_WITHIN = 0.4  # seconds that one of our statements waits for what others hold
IDLE_WITHIN = (
    5.0  # seconds that a transaction of ours may stand still: its client has been stopped, or is gone
)
UNREAD_WITHIN = 10.0  # seconds that the server waits for us to read on, holding what the statement has locked
LOOK_EVERY = 0.02
LOG_EVERY = 60.0  # seconds between two equal complaints
LEEWAY = 0.1  # seconds
QUIET, PROBE_EVERY, PROBES = (
    15,
    5,
    3,
)  # seconds until an idle connection is probed by the system, and how often

# Serialization, deadlock, lock not available; and the id that somebody else put in this very moment: whoever
# looks again finds it.
_GAVE_UP = ("40001", "40P01", "55P03", "23505")
_LOCKED = "55P03"
_TAKEN = ("42P07", "42710")
_HINDERED = "PP006"  # a warning: see put_off() and part_failed()
# What the driver raises when a connection is gone, or is just being closed by the server.
LOST = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_FULL = ("53100",)
# Cancelled by an administrator or a timeout of the server's; a standby; out of memory or of connections: all
# of them before anything was changed.
_NOT_NOW = ("57014", "25006", "53000", "53200", "53300", "53400")
_STANDBY = "25006"
_NO_RIGHTS = "42501"
_NO_SETTING = ("42704", "22023", "55P02")  # a name or a value that the server does not know, or not here
_GONE = ("3F000", "42883")  # no such schema, no such function
_GOING_DOWN = ("57P01", "57P02", "57P03", "57P05")
_NOT_REPLICATED = "canceling wait for synchronous replication"


# Those that a session waits for, with what they are, as far as this user may see it; but not those of ours
# that are at work, and have done with it in a moment.
_HOLDERS = """
SELECT b.pid, coalesce(a.application_name, '') AS application, coalesce(a.state, '') AS state,
       a.xact_start AT TIME ZONE 'UTC' AS since, a.query_start AT TIME ZONE 'UTC' AS asked
  FROM (SELECT DISTINCT unnest(pg_blocking_pids($1)) AS pid) AS b
  LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = b.pid
 WHERE (a.application_name = 'propolis' AND coalesce(a.state, 'active') = 'active') IS NOT TRUE
 ORDER BY a.xact_start, b.pid
"""


class SchemaRefused(Exception):
    """The server raised an error that our own SQL wrote: a code that begins with PP, and a detail."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


class Undone(ConnectionError):
    """A transaction of ours was lost before its commit was sent: nothing was changed."""


def gave_up(error: BaseException | None) -> bool:
    """Whether the server did because of others."""
    return getattr(error, "sqlstate", None) in _GAVE_UP


def is_of_data(error: BaseException | None) -> bool:
    """Whether a statement has met a value with which it cannot go on: it is out of range, or missing."""
    return str(getattr(error, "sqlstate", None)).startswith(("22", "23"))


def lacks_rights(error: BaseException | None) -> bool:
    return getattr(error, "sqlstate", None) == _NO_RIGHTS


def is_taken(error: BaseException | None) -> bool:
    """Whether a table, a sequence, an index or a type was to be made that is there."""
    return getattr(error, "sqlstate", None) in _TAKEN


class PostgresLink:
    """Statements on one database, from any number of event loops."""

    def __init__(
        self,
        url: str,
        *,
        patience: float,
        prepare: bool | None = None,
        max_connections: int = MAX_CONNECTIONS,
        lock_within: float | None = None,
    ) -> None:
        """`prepare` says whether statements may be prepared under a name; None: unless there is a pooler.

        What waits longer than `lock_within` for what others hold is given up: `Busy`.
        """
        self._address = Address(url)
        self._url = _driver_url(self._address)
        self._tls = _tls_of(self._address)
        self.shown = self._address.shown
        self.patience = patience
        self.max_connections = max_connections
        self._lock_within = lock_within
        self._prepare = prepare
        self.named = bool(prepare)
        self._settings = {"application_name": "propolis"}
        self._logged_at: dict[str, float] = {}  # what a sweep could not do, and when that was logged
        self.hindered = False  # somebody is in the way of a sweep, and nobody has searched for them yet
        self._lock = GuardedLock()
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
        check_opener(self._pid)

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
            raise EngineUnavailable(f"{self.shown} did not answer ({_text_of(error)})") from error
        finally:
            connection.terminate()
        self.named = not pooled if self._prepare is None else self._prepare
        if not pooled:  # which would refuse it, or give it to everybody
            self._settings |= _deadlines(self.patience, self._lock_within)
        return bool(pooled)

    async def connect(self) -> Connection:
        """A new connection of one's own, for the running loop."""
        options: dict[str, Any] = {"statement_cache_size": 200 if self.named else 0}
        if self._tls is not None:
            options["ssl"] = self._tls
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await asyncpg.connect(self._url, server_settings=self._settings, **options)
                _keep_alive(connection, self.patience)
        except (asyncpg.PostgresError, ValueError, *LOST) as error:
            why = self._address.hide_secrets(_text_of(error))
            # What the driver says of a secret is not chained either: whoever prints the chain would show it.
            raise self._not_connected(error, why) from (error if why == _text_of(error) else None)
        return connection

    def _not_connected(self, error: Exception, why: str) -> PropolisError:
        # A wrong certificate is both, and bytes that are no text came from a server.
        wrong = isinstance(error, ValueError) and not isinstance(error, OSError | UnicodeDecodeError)
        if wrong or getattr(error, "sqlstate", None) in _NO_SETTING:
            return BadSetting(f"{self.shown} cannot be used by the driver ({why}): correct its options")
        if self._tls is not None and (isinstance(error, ssl.SSLError) or "rejected SSL upgrade" in why):
            return EngineUnavailable(
                f"{self.shown} has no TLS to be trusted ({why}): give the certificate of its authority as "
                f"?sslrootcert=, or, on a network that you trust, write ?tls=off"
            )
        return EngineUnavailable(f"{self.shown} cannot be reached ({why}): nothing was changed")

    async def insist(self, name: str, value: str) -> None:
        """Have a setting of the server's on every connection from now on, whatever its default is."""
        self._settings = {**self._settings, name: value}
        await self._lines_here().let_go()

    async def read(self, statement: str, *args: object, patient: float = 0.0) -> list[Row]:
        """What has no effect is repeated once where a connection turns out to be gone.

        What is not urgent is `patient` for some seconds before it opens a connection of its own.
        """
        try:
            return await self._fetch(statement, args, patient=patient)
        except OutcomeUnknown as lost:
            if isinstance(lost.__cause__, TimeoutError):
                raise EngineUnavailable(f"{self.shown} did not answer in time") from lost
            try:
                return await self._fetch(statement, args)
            except OutcomeUnknown as error:
                raise EngineUnavailable(f"{self.shown} did not answer: {error.__cause__}") from error

    async def write(self, statement: str, *args: object, patient: float = 0.0) -> list[Row]:
        """One statement, one commit.  `OutcomeUnknown` when the answer was lost."""
        return await self._fetch(statement, args, patient=patient)

    async def run(self, act: Callable[[Connection], Awaitable[T]]) -> T:
        """Several statements in one transaction: for migrations."""
        self.check_usable()
        lines = self._lines_here()
        connection = await self._take(lines)
        try:
            async with asyncio.timeout(MIGRATE_WITHIN):
                waits = 0.0  # for as long as others are at it
                return await _in_transaction(connection, MIGRATE_WITHIN, partial(act, connection), waits)
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

    async def _fetch(self, statement: str, args: Sequence[object], *, patient: float = 0.0) -> list[Row]:
        self.check_usable()
        lines = self._lines_here()
        if patient:
            await lines.wait_for_free(patient)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(RETRIES):
            try:
                return await self._fetch_once(lines, statement, args)
            except Undone as error:
                if loop.time() - began > self.patience:
                    raise self.explained(error) from error
            except asyncpg.PostgresError as error:
                if error.sqlstate == _LOCKED:
                    return await self._fetch_watched(lines, statement, args)
                if error.sqlstate not in _GAVE_UP:
                    raise self.explained(error) from error
            except LOST as error:
                raise self.explained(error) from error
            await asyncio.sleep(random.uniform(0.001, 0.01))
        raise EngineUnavailable(
            f"{self.shown} gave up {RETRIES} times because of others: nothing was changed"
        )

    async def _fetch_watched(self, lines: _Lines, statement: str, args: Sequence[object]) -> list[Row]:
        """Once more, after somebody was in the way; `Busy` says who that is."""
        watcher = await self.connect()
        holders: dict[int, str] = {}
        try:
            for _ in range(RETRIES):
                watch = _Watch(watcher, holders)
                try:
                    return await self._fetch_once(lines, statement, args, watch)
                except asyncpg.PostgresError as error:
                    if error.sqlstate not in _GAVE_UP:
                        raise self.explained(error) from error
                    if holders:
                        break
                except LOST as error:
                    raise self.explained(error) from error
                finally:
                    await watch.end()
                await asyncio.sleep(
                    random.uniform(0.001, 0.1)
                )  # or those who were in each other's way still are
        finally:
            watcher.terminate()
        raise Busy(self.shown, holders)

    async def _fetch_once(
        self, lines: _Lines, statement: str, args: Sequence[object], watch: _Watch | None = None
    ) -> list[Row]:
        began = asyncio.get_running_loop().time()
        connection = await self._take(lines)
        remaining = max(0.01, self.patience - (asyncio.get_running_loop().time() - began))
        try:
            if self.named:
                if watch is not None:
                    watch.begin(connection.get_server_pid())
                rows: list[Row] = await connection.fetch(statement, *args, timeout=remaining)
            else:
                async with asyncio.timeout(remaining):
                    # Asking for an unnamed statement and running it must reach the same session.
                    fetch = partial(_fetch_seen, connection, watch, statement, args)
                    rows = await _in_transaction(connection, remaining, fetch, self._lock_within)
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

    def hear_of_hindrance(self, message: str) -> None:
        """What our own SQL warns of, once a minute."""
        now = time.monotonic()
        if now - self._logged_at.get(message, -LOG_EVERY) >= LOG_EVERY:
            self._logged_at = {text: at for text, at in self._logged_at.items() if now - at < LOG_EVERY} | {
                message: now
            }
            self.hindered = True
            log.warning("%s: %s", self.shown, message)

    def forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._lines.pop(loop, None)

    def explained(self, error: Exception) -> Exception:
        """The same in our words."""
        if isinstance(error, Undone):
            return EngineUnavailable(f"{self.shown}: {error}: nothing was changed")
        code = getattr(error, "sqlstate", None) or ""
        if code.startswith("PP"):
            return SchemaRefused(code, getattr(error, "detail", None) or "")
        if code in _FULL:
            return StorageFull(self.shown)
        if code in _NOT_NOW:
            return EngineUnavailable(f"{self.shown}: {error}: nothing was changed")
        if code == _NO_RIGHTS:
            return EngineError(
                f"{self.shown}: {error}: grant that to this user, or let another one run what "
                f"`propolis init --sql` prints"
            )
        if code in _GAVE_UP:
            return EngineUnavailable(f"{self.shown}: {error}: nothing was changed")
        if code in _GONE:
            return EngineError(
                f"{self.shown}: {error}: if `propolis init` has removed the functions of this code, which is "
                f"older than the tables, upgrade it; otherwise start it again, and it installs them"
            )
        if isinstance(error, asyncpg.PostgresError) and not (
            code in _GOING_DOWN or isinstance(error, asyncpg.PostgresConnectionError)
        ):
            return EngineError(f"{self.shown}: {error}")
        return OutcomeUnknown(f"{self.shown}: the answer was lost ({_text_of(error)})")


class _Watch:
    """Looks, while a statement waits, for the sessions that it waits for."""

    def __init__(self, connection: Connection, holders: dict[int, str]) -> None:
        self._connection = connection
        self._holders = holders
        self._task: asyncio.Task[None] | None = None

    def begin(self, pid: int) -> None:
        """The statement is about to be run by this session."""
        self._task = asyncio.get_running_loop().create_task(self._look(pid))

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _look(self, pid: int) -> None:
        fetch_holders = partial(self._connection.fetch, _HOLDERS, pid)
        with suppress(asyncpg.PostgresError, *LOST):
            while not self._holders:
                rows = await _in_transaction(self._connection, CONNECT_WITHIN, fetch_holders)
                self._holders |= {row["pid"]: session_of(**row) for row in rows}
                await asyncio.sleep(LOOK_EVERY)


async def _fetch_seen(
    connection: Connection, watch: _Watch | None, statement: str, args: Sequence[object]
) -> list[Row]:
    if watch is not None:
        watch.begin(await connection.fetchval("SELECT pg_backend_pid()"))
    rows: list[Row] = await connection.fetch(statement, *args)
    return rows


def session_of(pid: int, application: str, state: str, since: datetime | None, asked: datetime | None) -> str:
    """A session of the server's, for whoever is to end it.  Not all may see those of others."""
    when = "" if since is None else f", in a transaction since {since:%Y-%m-%d %H:%M:%S} UTC"
    when += "" if asked is None else f", last statement at {asked:%H:%M:%S}"
    return f"session {pid} ({application or 'no name'}, {state or 'state not shown'}{when})"


class _Lines:
    """The connections of one event loop."""

    def __init__(self, link: PostgresLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._free: list[tuple[float, Connection]] = []  # since when; the one used last is used next
        self._leaving: set[asyncio.Task[None]] = set()
        self._parting: asyncio.TimerHandle | None = None
        self._warnings: dict[Connection, str] = {}
        self._room = asyncio.Semaphore(link.max_connections)
        self._lent = 0
        self._given_back = asyncio.Event()
        self._guardian = LoopGuardian(loop, self._release, name="propolis-postgres")

    def at_hand(self) -> bool:
        """Whether there is a connection for whoever takes one now, without waiting."""
        return bool(self._free) and not self._free[-1][1].is_closed() and not self._room.locked()

    async def wait_for_free(self, within: float) -> None:
        """An idle fleet has fewer connections where only what is urgent opens another one at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._lent and not self.at_hand():
                    self._given_back.clear()
                    await self._given_back.wait()

    async def take(self) -> Connection:
        await self._room.acquire()
        self._lent += 1
        try:
            while self._free:
                _, connection = self._free.pop()
                if not connection.is_closed():
                    return connection
            connection = await self._link.connect()
            connection.add_log_listener(self._warned)
        except BaseException:
            self._return_room()
            raise
        return connection

    def _return_room(self) -> None:
        self._room.release()
        self._lent -= 1
        self._given_back.set()

    def give_back(self, connection: Connection) -> str | None:
        """Gives the server's words about a commit that may not have reached its copies."""
        self._return_room()
        if self._guardian.done:
            connection.terminate()
        elif not connection.is_closed():
            self._free.append((self._loop.time(), connection))
            if len(self._free) == 3 or (len(self._free) == 2 and self._parting is None):
                self._part_with_spare()
        return self._warnings.pop(connection, None)

    def _part_with_spare(self) -> None:
        """Of those that nobody has needed for long, one at a time; and come back while there are more."""
        if self._parting is not None:
            self._parting.cancel()
            self._parting = None
        while len(self._free) > 1:
            since, connection = self._free[0]
            left = since + (SPARE_FOR if len(self._free) == 2 else THIRD_FOR) - self._loop.time()
            if left > 0:
                self._parting = self._loop.call_later(left, self._part_with_spare)
                return
            del self._free[0]
            leaving = self._loop.create_task(_let_go(connection))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """From any loop."""
        await self._guardian.close()

    async def _release(self) -> None:
        self._link.forget(self._loop)
        await self.let_go()

    async def let_go(self) -> None:
        """Close those that nobody uses."""
        free, self._free = self._free, []
        for _, connection in free:
            await _let_go(connection)

    def _warned(self, connection: Connection, message: Any) -> None:
        if getattr(message, "sqlstate", None) == _HINDERED:
            self._link.hear_of_hindrance(str(message))
        elif _NOT_REPLICATED in str(message):
            self._warnings[connection] = str(message)


async def _let_go(connection: Connection) -> None:
    try:
        await connection.close(timeout=CLOSE_WITHIN)
    except (asyncpg.PostgresError, *LOST):
        connection.terminate()
    except asyncio.CancelledError:  # no time is left to say goodbye
        connection.terminate()
        raise


def _driver_url(address: Address) -> str:
    """As the driver reads it: with everything percent-encoded, where we also take it as it is."""
    if address.scheme not in SCHEMES:
        raise BadSetting(f"{address.shown} leads to no PostgreSQL: write postgresql://host/database")
    login = "" if address.user is None else quote(address.user, safe="")
    if address.password is not None:
        login += ":" + quote(address.password, safe="")
    hosts = ",".join(_driver_host(*host) for host in address.hosts)
    query = urlencode({name: value for name, value in address.options.items() if name != "tls"})
    return f"{address.scheme}://{login}{'@' if login else ''}{hosts}{quote(address.path)}?{query}".rstrip("?")


def _tls_of(address: Address) -> ssl.SSLContext | bool | None:
    """How a server that is elsewhere has to show who it is, unless the URL or the environment says how.

    None leaves it to the driver, which speaks plain text to whoever asks for it, and takes any certificate.
    """
    options = address.options
    if options.get("tls", "verify") not in ("verify", "off"):
        raise BadSetting(f"tls={options['tls']!r}: write tls=off, or leave it out and have TLS verified")
    if "sslmode" in options or "PGSSLMODE" in os.environ:
        return None
    if options.get("tls") == "off":
        return False
    named = options.get("host") or os.environ.get("PGHOST", "")
    hosts = [name for name, _ in address.hosts] or named.split(",")
    if all(map(_is_here, hosts)):
        return None
    try:
        context = ssl.create_default_context(
            cafile=options.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
        )
        if "sslcert" in options:
            context.load_cert_chain(options["sslcert"], options.get("sslkey"), options.get("sslpassword"))
    except OSError as error:
        raise BadSetting(f"{address.shown}: a certificate cannot be read ({error})") from error
    return context


def _is_here(host: str) -> bool:
    """On this machine: a socket, or a loopback address."""
    if host in ("", "localhost") or host.startswith(("/", "@")):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _driver_host(name: str, port: int | None) -> str:
    text = f"[{quote(name, safe=':')}]" if ":" in name else quote(name or "localhost", safe="")
    return text if port is None else f"{text}:{port}"


def _deadlines(within: float, lock_within: float | None) -> dict[str, str]:
    """Settings of the server's, so that no session of ours holds for long what others need."""
    deadlines = {
        "statement_timeout": _milliseconds(within),
        "idle_in_transaction_session_timeout": _milliseconds(IDLE_WITHIN),
        "tcp_user_timeout": _milliseconds(min(within, UNREAD_WITHIN)),  # ignored where a system has none
    }
    if lock_within is not None:
        deadlines["lock_timeout"] = str(round(lock_within * 1000))
    return deadlines


def _milliseconds(seconds: float) -> str:
    """As a setting of the server: a little longer than we wait, so that it is always we who give up first."""
    return str(round((seconds + LEEWAY) * 1000))


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__


async def _in_transaction(
    connection: Connection, within: float, act: Callable[[], Awaitable[T]], lock_within: float | None = None
) -> T:
    """Not the driver's own, which waits for a rollback also where no answer comes any more.

    No statement of it is given more seconds than that by the server, should we no longer be there.  Behind a
    pooler it is for this transaction that the server is told so.
    """
    settings = "; ".join(
        f"SET LOCAL {name} = {value}" for name, value in _deadlines(within, lock_within).items()
    )
    try:
        await connection.execute(f"BEGIN; {settings}")
        try:
            done = await act()
        except asyncpg.PostgresError:
            await connection.execute("ROLLBACK")
            raise
    except LOST as error:  # the server ends it where we do not go on within IDLE_WITHIN
        raise Undone(_text_of(error)) from error
    try:
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

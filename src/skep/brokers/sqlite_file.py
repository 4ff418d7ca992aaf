"""One SQLite file: connections, transactions, settings and migrations, and nothing about jobs.

Writes run in the event loop itself: a commit costs a tenth of a millisecond where a hop to a thread
costs as much again, and bundles make commits few.  Only when somebody else is writing, or the disk
turns out to be slow, does a write go to a thread and wait there, so that the loop never does.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from skep.broker import Durability
from skep.brokers.mounts import file_system_of
from skep.brokers.statements import load_migrations
from skep.errors import (
    BadSetting,
    EngineClosed,
    EngineError,
    EngineUnavailable,
    ForkedEngine,
    SchemaTooNew,
    SkepError,
    StorageBroken,
    StorageFull,
    UnsafeStorage,
)

T = TypeVar("T")

OLDEST_SQLITE = (3, 35, 0)  # RETURNING
FIRST_PAUSE, LAST_PAUSE = 0.0005, 0.003  # seconds between two tries to begin
SLOW_COMMIT = 0.005  # seconds: beyond this the loop would be felt to stand still
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "afs", "ceph", "gluster", "lustre", "vboxsf", "prl_fs")
VOLATILE = ("tmpfs", "ramfs")
LEVELS = {"normal": Durability.PROCESS, "full": Durability.POWER, "extra": Durability.POWER}
_SYNCHRONOUS = {"normal": 1, "full": 2, "extra": 3}


class SQLiteFile:
    """Transactions on one database file, for any number of threads, loops and processes.

    SQLite keeps its locks in tables of the process, which a fork would inherit and believe in: it would
    write without a lock, or wait for one that nobody holds.  So the connections are closed before every
    fork of this process and opened again, by the parent only, when they are next needed.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, synchronous: str, patience: float, unsafe: bool
    ) -> None:
        if synchronous not in LEVELS:
            raise BadSetting(f"synchronous={synchronous!r}: choose one of {', '.join(LEVELS)}")
        self.path = Path(path).absolute()
        self.durability = LEVELS[synchronous]
        self._synchronous = synchronous
        self._patience = patience
        self._unsafe = unsafe
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._pid = 0
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._write_thread: ThreadPoolExecutor | None = None
        self._read_thread: ThreadPoolExecutor | None = None
        self._commit_time = 0.0
        self._broken: str | None = None
        self._seen: dict[str, int] = {}  # the version of the file at the last look into each queue

    # --- open and close ------------------------------------------------------------------

    def open(self) -> None:
        if self._pid:
            self._check_usable()
            return
        self._check_place()
        with self._lock, self._read_lock:  # who closes it meanwhile waits
            try:
                self._writer = self._connect()
                self._migrate(self._writer)
                self._reader = self._connect_reader()
            except sqlite3.Error as error:
                self._disconnect()
                raise self._explain(error) from error
            except SkepError:
                self._disconnect()
                raise
            self._write_thread = ThreadPoolExecutor(1, "skep-sqlite-write")
            self._read_thread = ThreadPoolExecutor(1, "skep-sqlite-read")
            self._pid = os.getpid()
        _open_files.add(self)

    def close(self) -> None:
        _open_files.discard(self)
        if self._pid in (0, os.getpid()):  # in a fork these threads are not there
            for thread in (self._write_thread, self._read_thread):
                if thread is not None:
                    thread.shutdown(wait=True)
        self._let_go()

    def _let_go(self) -> None:
        with self._lock, self._read_lock:
            self._disconnect()
            self._write_thread = self._read_thread = None
            self._pid = 0

    def _disconnect(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                connection.close()
        self._writer = self._reader = None
        self._seen.clear()  # each connection counts versions by itself

    # --- forks ---------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait for what is going on, then leave nothing that a child could inherit."""
        self._lock.acquire()
        self._read_lock.acquire()
        self._disconnect()

    def after_fork(self) -> None:
        self._read_lock.release()
        self._lock.release()

    def _connected(self) -> sqlite3.Connection:
        """The writing connection; made again if a fork has closed it.  The lock is held."""
        if self._writer is None:
            self._writer = self._connect()
        return self._writer

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = on")
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path,
            timeout=self._patience,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        (mode,) = self._patiently(lambda: connection.execute("PRAGMA journal_mode = wal").fetchone())
        if mode != "wal":
            raise UnsafeStorage(
                f"{self.path} cannot use a write-ahead log (it answered {mode!r}): use a local disk"
            )
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[self._synchronous]}")
        connection.execute("PRAGMA busy_timeout = 0")  # waiting is done by us, outside the loop
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute("PRAGMA temp_store = memory")
        connection.execute("PRAGMA secure_delete = fast")  # Debian's default would write pages to blank them
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        (level,) = connection.execute("PRAGMA synchronous").fetchone()
        if level != _SYNCHRONOUS[self._synchronous]:
            raise UnsafeStorage(f"{self.path} did not accept synchronous={self._synchronous}")

    def _check_place(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise EngineError(f"SQLite {sqlite3.sqlite_version} is too old: skep needs {needed} or newer")
        folder = self.path.parent
        if not folder.is_dir():
            raise EngineUnavailable(f"there is no folder {folder}: make it, or give another path")
        kind = file_system_of(folder)
        if kind.startswith(NETWORK) and not self._unsafe:
            raise UnsafeStorage(
                f"{folder} is on a {kind} file system, whose locks SQLite cannot trust: use a local disk, or "
                f"say unsafe=1 if only one process will ever open it"
            )
        if kind in VOLATILE:  # it survives the process, not the power
            self.durability = min(self.durability, Durability.PROCESS)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        migrations = load_migrations("sqlite")
        newest = migrations[-1][0]
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found == newest:
            return
        self._patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            (found,) = connection.execute(
                "PRAGMA user_version"
            ).fetchone()  # another process may have been faster
            if found > newest:
                raise SchemaTooNew(found, newest)
            for number, _, script in migrations:
                if number > found:
                    for statement in _statements_of(script):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    # --- transactions --------------------------------------------------------------------

    async def write(self, work: Callable[[sqlite3.Connection], T], *, long: bool = False) -> T:
        """Run `work` in a transaction of its own and commit; whatever it raises rolls everything back."""
        self._check_usable()
        if not long and self._commit_time < SLOW_COMMIT and self._lock.acquire(blocking=False):
            try:
                if self._begin():
                    return self._run(work)
            finally:
                self._lock.release()
        assert self._write_thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._write_thread, self.write_now, work)

    def write_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The same, from a thread that may wait."""
        self._check_usable()
        with self._lock:
            self._wait_to_begin()
            return self._run(work)

    def peek(self, look: Callable[[sqlite3.Connection], T]) -> T | None:
        """A quick look by index, without a transaction; None when the connection is in use."""
        self._check_usable()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return look(self._connected())
        except sqlite3.Error as error:
            if _is_busy(error):
                return None
            raise self._explain(error) from error
        finally:
            self._lock.release()

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on one consistent snapshot, in a thread: it may be long."""
        self._check_usable()
        assert self._read_thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._read_thread, self._read_now, work)

    def changed(self, queues: Iterable[str]) -> bool:
        """Has another connection committed anything since it was last looked into one of these queues?"""
        version = self.peek(_data_version)
        return version is None or any(self._seen.get(queue) != version for queue in queues)

    def saw(self, connection: sqlite3.Connection, queues: Iterable[str]) -> None:
        self._seen.update(dict.fromkeys(queues, _data_version(connection)))

    def _begin(self) -> bool:
        try:
            self._connected().execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if _is_busy(error):
                return False
            raise self._explain(error) from error
        return True

    def _wait_to_begin(self) -> None:
        """Try again soon: who writes without a break leaves the lock free for a few hundred microseconds."""
        deadline = time.monotonic() + self._patience
        pause = FIRST_PAUSE
        while not self._begin():
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"another process has kept {self.path} busy for {self._patience:g} s: nothing was changed"
                )
            time.sleep(pause * random.uniform(0.1, 1))  # so that nobody waits for ever behind the others
            pause = min(pause * 1.1, LAST_PAUSE)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connected()
        try:
            result = work(connection)
            began = time.perf_counter()
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(connection)
            raise self._explain(error) from error
        except BaseException:
            _roll_back(connection)
            raise
        self._commit_time += (time.perf_counter() - began - self._commit_time) / 8
        return result

    def _read_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self._check_usable()
        with self._read_lock:
            try:
                return self._snapshot(work)
            except sqlite3.Error as error:
                raise self._explain(error) from error

    def _snapshot(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._reader is None:
            self._reader = self._connect_reader()
        connection = self._reader
        self._patiently(lambda: connection.execute("BEGIN"))
        try:
            return self._patiently(lambda: work(connection))
        finally:
            connection.execute("COMMIT")

    def _patiently(self, act: Callable[[], T]) -> T:
        """Repeat what may be busy: opening, migrating and reading all meet writers now and then."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return act()
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.0005, 0.005))

    @contextmanager
    def joining(self, tx: sqlite3.Connection) -> Iterator[None]:
        """Let what follows happen in the transaction of somebody else's connection to this file."""
        self._check_usable()
        if not isinstance(tx, sqlite3.Connection):
            raise BadSetting(f"tx={type(tx).__qualname__} is no sqlite3.Connection to {self.path}")
        try:
            self._check_joinable(tx)
            yield
        except sqlite3.ProgrammingError as error:  # closed, or another thread's
            raise BadSetting(f"this connection cannot be used: {error}") from error
        except sqlite3.OperationalError as error:
            raise EngineUnavailable(
                f"the jobs could not be put: {error}: roll your transaction back"
            ) from error
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _check_joinable(self, tx: sqlite3.Connection) -> None:
        [leads_to] = [file for _, name, file in tx.execute("PRAGMA database_list") if name == "main"]
        if not leads_to or not self.path.samefile(leads_to):
            raise BadSetting(
                f"this connection leads to {leads_to or 'memory'}, and the jobs are in {self.path}"
            )
        begins_by_itself = tx.isolation_level is not None and getattr(tx, "autocommit", -1) is not True
        if not (tx.in_transaction or begins_by_itself):
            raise BadSetting(
                "this connection is not in a transaction, so the job would not wait for your commit: execute "
                "BEGIN IMMEDIATE first, or leave tx= out"
            )

    # --- errors --------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            if self._pid == 0:
                raise EngineClosed
            raise ForkedEngine(self._pid, os.getpid())
        if self._broken is not None:
            raise StorageBroken(self._broken)

    def _explain(self, error: sqlite3.Error) -> SkepError:
        """The same in our words, with what to do about it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return StorageFull(str(self.path))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return EngineUnavailable(
                f"{self.path} is in use by another process: nothing was changed ({error})"
            )
        if code in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_PERM,
            sqlite3.SQLITE_AUTH,
        ):
            return EngineUnavailable(
                f"{self.path} cannot be written ({error}): check its permissions and its folder's"
            )
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            # After a failed sync nobody knows what is on the disk: acknowledge nothing more.
            self._broken = f"{self.path} failed ({error}): check the disk and the file, then start again"
            return StorageBroken(self._broken)
        return EngineError(f"{self.path}: {error}")


_open_files: weakref.WeakSet[SQLiteFile] = weakref.WeakSet()
_forking: list[SQLiteFile] = []


def _before_fork() -> None:
    for file in list(_open_files):
        file.before_fork()
        _forking.append(file)


def _after_fork() -> None:
    while _forking:
        _forking.pop().after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _data_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA data_version").fetchone()[0]
    return version


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _statements_of(script: str) -> list[str]:
    """The statements of a script one by one, since executescript would commit in between."""
    found, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            found.append(pending)
            pending = ""
    return found

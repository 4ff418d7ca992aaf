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
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from propolis.core.protocols import Durability
from propolis.engines.forks import check_opener, closes_before_forks, forgets
from propolis.engines.shared.guarded_lock import GuardedLock, serves_others
from propolis.engines.sqlite import schema
from propolis.engines.sqlite.mounts import file_system_of
from propolis.errors import (
    BadSetting,
    EngineError,
    EngineUnavailable,
    PropolisError,
    SchemaTooOld,
    StorageBroken,
    StorageFull,
    StorageNotReady,
    UnsafeStorage,
)

T = TypeVar("T")

OLDEST_SQLITE = (3, 35, 0)  # RETURNING
FIRST_PAUSE, LAST_PAUSE = 0.0005, 0.003  # seconds between two tries to begin
SLOW_COMMIT = 0.005  # seconds: beyond this the loop would be felt to stand still
NETWORK = ("nfs", "cifs", "smb", "9p", "fuse", "afs", "ceph", "gluster", "lustre", "vboxsf", "prl_fs")
VOLATILE = ("tmpfs", "ramfs")
BLOCKED = 1.0  # seconds of waiting for one that writes: others have waited too, and could not renew
REST = 2.0  # seconds in which they can, or settle, before anybody reaps
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
        self._lock = GuardedLock()
        self._read_lock = GuardedLock()
        self._pid = 0
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._write_thread: ThreadPoolExecutor | None = None
        self._read_thread: ThreadPoolExecutor | None = None
        self._commit_time = 0.0
        self._looks = False  # it was opened only to look
        self._mode = "rw"
        self._lacks_tables = False  # older code has made it, and who looks leaves it so
        self._broken: str | None = None
        self._seen: dict[str, int] = {}  # the version of the file at the last read of each queue
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was opened
        self._blocked_until = -REST  # the moment at which we had waited for long

    # --- open and close ------------------------------------------------------------------

    def open(self, *, looks: bool = False, migrates: bool = False) -> list[str]:
        """Gives the migrations that were run; those that old code could not live with only if it `migrates`.

        `looks`: nothing is created, migrated or set; `StorageNotReady` if there is nothing to look at.
        """
        if self._pid:
            self._check_usable()
            return []
        self._check_place()
        self._looks = looks
        # Whoever only looks leaves the log of others as it is, and none behind.  Read-only, SQLite does not
        # remove the log that it makes where there is none; otherwise it moves all that is in one to the file.
        self._mode = "ro" if looks and Path(f"{self.path}-wal").exists() else "rw"
        if not looks:
            _create_private(self.path)
        elif not self.path.exists():
            raise StorageNotReady(str(self.path), "there is no such file")
        closes_before_forks(self)  # before there is a connection: a fork waits until it can be closed
        with self._lock, self._read_lock:  # and so does whoever closes it meanwhile
            try:
                self._writer = self._connect()
                ran = self._migrate(self._writer, migrates=migrates)
                self._identity = self._identity_now()
                self._reader = self._connect_reader()
            except sqlite3.Error as error:
                self._give_up()
                raise self._explain(error) from error
            except PropolisError:
                self._give_up()
                raise
            self._write_thread = ThreadPoolExecutor(1, "propolis-sqlite-write", serves_others)
            self._read_thread = ThreadPoolExecutor(1, "propolis-sqlite-read", serves_others)
            self._pid = os.getpid()
        return ran

    def close(self) -> None:
        forgets(self)
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

    def _give_up(self) -> None:
        forgets(self)
        self._disconnect()

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
            self.check_place()
            self._writer = self._connect()
        return self._writer

    def _identity_now(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)  # each commit comes by here
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def check_place(self) -> None:
        """`StorageBroken` if the file was deleted or replaced: what we wrote would go nowhere."""
        if self._identity is not None and self._identity_now() != self._identity:
            self._broken = (
                f"{self.path} was deleted or replaced while it was open, so what is put is lost: bring it "
                f"back, then start again"
            )
            raise StorageBroken(self._broken)

    def was_blocked(self) -> bool:
        """Did somebody else's write keep us, and so all others, waiting for long until a moment ago?"""
        return time.monotonic() < self._blocked_until + REST

    def _connect_reader(self) -> sqlite3.Connection:
        connection = self._connect()
        connection.execute("PRAGMA query_only = on")
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?mode={self._mode}",
            uri=True,
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
        if self._looks:
            connection.execute("PRAGMA query_only = on")
        else:
            self._set_up_file(connection)
        connection.execute("PRAGMA busy_timeout = 0")  # waiting is done by us, outside the loop
        connection.execute("PRAGMA cache_size = -16000")
        connection.execute("PRAGMA temp_store = memory")

    def _set_up_file(self, connection: sqlite3.Connection) -> None:
        (mode,) = self._patiently(lambda: connection.execute("PRAGMA journal_mode = wal").fetchone())
        if mode != "wal":
            raise UnsafeStorage(
                f"{self.path} cannot use a write-ahead log (it answered {mode!r}): use a local disk"
            )
        connection.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[self._synchronous]}")
        connection.execute("PRAGMA secure_delete = fast")  # Debian's default would write pages to blank them
        connection.execute("PRAGMA wal_autocheckpoint = 4000")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        (level,) = connection.execute("PRAGMA synchronous").fetchone()
        if level != _SYNCHRONOUS[self._synchronous]:
            raise UnsafeStorage(f"{self.path} did not accept synchronous={self._synchronous}")

    def _check_place(self) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            needed = ".".join(map(str, OLDEST_SQLITE))
            raise EngineError(f"SQLite {sqlite3.sqlite_version} is too old: propolis needs {needed} or newer")
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

    def _migrate(self, connection: sqlite3.Connection, *, migrates: bool) -> list[str]:
        where = str(self.path)
        missing = self._patiently(lambda: schema.missing(connection, where))
        if not missing:
            return []
        first = missing[0].number
        if self._looks:
            if first == 1:
                raise StorageNotReady(where, "there are no tables of propolis in it")
            self._lacks_tables = True
            return []
        breaking = [each.file for each in missing if each.compatible_from >= first > 1]
        if breaking and not migrates:
            raise SchemaTooOld(where, f"it lacks {', '.join(breaking)}, with which old code could not go on")
        self._patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        try:
            missing = schema.missing(connection, where)  # another process may have been faster
            schema.run(connection, missing)
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise
        return [each.file for each in missing]

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

    def peek(self, read: Callable[[sqlite3.Connection], T]) -> T | None:
        """A quick read by index, without a transaction; None when the connection is in use."""
        self._check_usable()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return read(self._connected())
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
        version = self.version()
        return version is None or any(self._seen.get(queue) != version for queue in queues)

    def version(self) -> int | None:
        """Another one whenever another connection has committed; None when ours is in use."""
        return self.peek(_data_version)

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
        """Try again soon: a writer without a break leaves the lock free for a few hundred microseconds."""
        began = time.monotonic()
        deadline = began + self._patience
        pause = FIRST_PAUSE
        while not self._begin():
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"another process has kept {self.path} busy for {self._patience:g} s: nothing was changed"
                )
            time.sleep(pause * random.uniform(0.1, 1))  # so that nobody waits for ever behind the others
            pause = min(pause * 1.1, LAST_PAUSE)
        if (now := time.monotonic()) - began >= BLOCKED:
            self._blocked_until = now

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
        self.check_place()  # whoever only puts never sweeps, and would be told of nothing
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
        """Let what follows happen in the transaction of somebody else's connection to this file.

        What it raises has changed nothing, so that whoever catches it can go on and commit.
        """
        self._check_usable()
        if not isinstance(tx, sqlite3.Connection):
            raise BadSetting(f"tx={type(tx).__qualname__} is no sqlite3.Connection to {self.path}")
        try:
            with _plain_rows(tx):
                self._check_joinable(tx)
                with _part_of(tx):
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
        check_opener(self._pid)
        if self._broken is not None:
            raise StorageBroken(self._broken)

    def _explain(self, error: sqlite3.Error) -> PropolisError:
        """The same in our words, with what to do about it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_ERROR and self._lacks_tables:
            return StorageNotReady(str(self.path), f"its tables are those of an older version ({error})")
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


def _data_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA data_version").fetchone()[0]
    return version


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


@contextmanager
def _plain_rows(tx: sqlite3.Connection) -> Iterator[None]:
    """Whatever its owner has its rows made into."""
    factories = tx.row_factory, tx.text_factory
    tx.row_factory, tx.text_factory = None, str
    try:
        yield
    finally:
        tx.row_factory, tx.text_factory = factories


@contextmanager
def _part_of(tx: sqlite3.Connection) -> Iterator[None]:
    """A savepoint; and a transaction, where the owner's connection would begin one by itself."""
    begun = not tx.in_transaction
    if begun:
        tx.execute(f"BEGIN {tx.isolation_level or ''}")
    tx.execute("SAVEPOINT propolis_put")
    try:
        yield
    except BaseException:
        if tx.in_transaction:  # SQLite itself rolls all of it back when the disk is full
            tx.execute("ROLLBACK TO propolis_put")
            tx.execute("RELEASE propolis_put")
            if begun:
                tx.execute("ROLLBACK")
        raise
    tx.execute("RELEASE propolis_put")


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _create_private(path: Path) -> None:
    """Make an empty file that only its owner can read, if there is none; its log gets the same mode.

    It is not even opened, where the system can do that: closing it would drop the locks that another handle
    of this process may have got meanwhile.  What goes wrong, SQLite says in a moment.
    """
    real = os.path.realpath(path)
    with suppress(OSError):
        try:
            os.mknod(real, 0o600)
        except (AttributeError, PermissionError):  # Windows has none, and others keep it for the superuser
            os.close(os.open(real, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

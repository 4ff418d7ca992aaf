"""Transactions of the caller's own: one statement on a connection of whichever library the caller has.

The statement takes one text and gives pairs, so that it means the same to all of them.  What an object is,
is known by the module that its class comes from: a library that the caller does not use is never imported.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from propolis.engines.postgres.client import SchemaRefused
from propolis.errors import BadSetting, Busy, EngineError, EngineUnavailable, PropolisError

log = logging.getLogger("propolis.postgres")

Pairs = Sequence[Any]  # rows of two columns each, whatever the library calls a row

IDLE = 0  # of psycopg's transaction status: no transaction has begun
_LATER = "propolis.committed"  # where a session of SQLAlchemy keeps what is to be called after its commit
_NO_TRANSACTION = (
    "{what} is not in a transaction, so the job would not wait for your commit: {advice}, or leave tx= out"
)
_MUST_BE_AWAITED = "{what} has to be awaited: `await task.using(tx=...).aenqueue(...)`"

# What the server says when the schema, or a function of it, is not there.
_NOT_THERE = ("3F000", "42883", "42P01")
_TRY_AGAIN = ("40001", "40P01")
_LOCKED = "55P03"
_ABORTED = "25P02"


class AfterCommit(Protocol):
    """Is called once a transaction of the caller's has committed, in whatever thread that was."""

    def __call__(self) -> None: ...


class Caller(Protocol):
    """A connection of the caller's in a transaction, for one statement."""

    def fetch(self, statement: str, text: str) -> Pairs:
        """In this thread.  `BadSetting` for a connection that must be awaited."""
        ...

    async def afetch(self, statement: str, text: str) -> Pairs:
        """In this event loop; a connection that cannot be awaited is used all the same, and blocks it."""
        ...

    @property
    def announces_commits(self) -> bool:
        """Does this library announce its commits?"""
        ...

    def after_commit(self, act: AfterCommit) -> None:
        """Call `act` once the transaction has committed, if this library announces that; maybe in vain."""
        ...


def caller_of(tx: Any) -> Caller:
    """`BadSetting` for what is no connection to PostgreSQL, or is not in a transaction."""
    for kind in type(tx).__mro__:
        adapt = _LIBRARIES.get(kind.__module__.partition(".")[0])
        if adapt is not None:
            return adapt(tx)
    raise BadSetting(
        f"tx={type(tx).__qualname__} is no connection to PostgreSQL that propolis knows: give one of "
        f"asyncpg, psycopg 3, SQLAlchemy (also a session) or Django, or the Transaction of a running job"
    )


# --- the libraries -----------------------------------------------------------------------


class _Asyncpg:
    """`Connection`, and what a pool lends."""

    announces_commits = False

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        if not hasattr(connection, "is_in_transaction"):
            raise _wrong_object(connection, "a Connection")
        with explained():
            if connection.is_closed():
                raise EngineUnavailable("this connection is closed: nothing was put")
            if not connection.is_in_transaction():
                raise BadSetting(
                    _NO_TRANSACTION.format(
                        what="this connection", advice="use `async with connection.transaction()`"
                    )
                )

    def fetch(self, statement: str, text: str) -> Pairs:  # noqa: ARG002
        raise BadSetting(_MUST_BE_AWAITED.format(what="a connection of asyncpg"))

    async def afetch(self, statement: str, text: str) -> Pairs:
        with explained():
            rows: Pairs = await self._connection.fetch(statement, text)
            return rows

    def after_commit(self, act: AfterCommit) -> None:
        """It does not announce its commits."""


class _Psycopg:
    """`Connection` and `AsyncConnection`; a cursor stands for its connection."""

    announces_commits = False

    def __init__(self, given: Any) -> None:
        connection = given if hasattr(given, "autocommit") else getattr(given, "connection", None)
        if connection is None or not hasattr(connection, "info"):
            raise _wrong_object(given, "a Connection, an AsyncConnection or a cursor of one")
        self._connection = connection
        self._awaited = any(kind.__name__ == "AsyncConnection" for kind in type(connection).__mro__)
        with explained():
            if connection.autocommit and connection.info.transaction_status == IDLE:
                raise BadSetting(
                    _NO_TRANSACTION.format(
                        what="this connection (autocommit=True)", advice="use `with connection.transaction()`"
                    )
                )

    def fetch(self, statement: str, text: str) -> Pairs:
        if self._awaited:
            raise BadSetting(_MUST_BE_AWAITED.format(what="an AsyncConnection of psycopg"))
        with explained(), self._connection.cursor(row_factory=_as_tuples) as cursor:
            rows: Pairs = cursor.execute(_with_percent(statement), (text,)).fetchall()
            return rows

    async def afetch(self, statement: str, text: str) -> Pairs:
        if not self._awaited:
            return self.fetch(statement, text)
        with explained():
            async with self._connection.cursor(row_factory=_as_tuples) as cursor:
                await cursor.execute(_with_percent(statement), (text,))
                rows: Pairs = await cursor.fetchall()
                return rows

    def after_commit(self, act: AfterCommit) -> None:
        """It does not announce its commits."""


class _SQLAlchemy:
    """`Session`, `AsyncSession`, their scoped kinds, `Connection` and `AsyncConnection`, on any driver."""

    def __init__(self, given: Any) -> None:
        if callable(getattr(given, "registry", None)):  # a scoped session stands for the one of this scope
            given = given.registry()
        self._given = given
        self._awaited = hasattr(given, "run_sync")
        if not hasattr(given, "in_transaction"):
            raise _wrong_object(given, "a Session, an AsyncSession, a Connection or an AsyncConnection")

    def fetch(self, statement: str, text: str) -> Pairs:
        if self._awaited:
            raise BadSetting(_MUST_BE_AWAITED.format(what=f"an {type(self._given).__name__} of SQLAlchemy"))
        with explained():
            return self._fetch_on(self._given, statement, text)

    async def afetch(self, statement: str, text: str) -> Pairs:
        if not self._awaited:
            return self.fetch(statement, text)
        with explained():
            rows: Pairs = await self._given.run_sync(self._fetch_on, statement, text)
            return rows

    def _fetch_on(self, given: Any, statement: str, text: str) -> Pairs:
        """`given` is a session or a connection of the synchronous kind, which begins by itself."""
        connection = given.connection() if callable(given.connection) else given
        if connection.dialect.name != "postgresql":
            raise BadSetting(
                f"this connection leads to {connection.dialect.name}, and the jobs are in PostgreSQL"
            )
        if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
            raise BadSetting(
                _NO_TRANSACTION.format(
                    what="this connection (AUTOCOMMIT)", advice="use another isolation level"
                )
            )
        numbered = connection.dialect.paramstyle.startswith("numeric")
        rows: Pairs = connection.exec_driver_sql(
            statement if numbered else _with_percent(statement), (text,)
        ).fetchall()
        return rows

    @property
    def announces_commits(self) -> bool:
        """A session does; a connection does not."""
        return hasattr(self._given, "flush")

    def after_commit(self, act: AfterCommit) -> None:
        if not self.announces_commits:
            return
        session = getattr(self._given, "sync_session", self._given)
        if _LATER not in session.info:
            event = importlib.import_module("sqlalchemy.event")
            event.listen(session, "after_commit", _session_committed)
            event.listen(session, "after_soft_rollback", _session_rolled_back)
        session.info.setdefault(_LATER, []).append(act)


def _session_committed(session: Any) -> None:
    if not session.in_nested_transaction():  # a savepoint is no commit
        acts, session.info[_LATER] = session.info[_LATER], []
        for act in acts:
            _run_quietly(act)


def _session_rolled_back(session: Any, transaction: Any) -> None:
    if transaction.parent is None:  # of a savepoint that is rolled back, some may stand before it
        session.info[_LATER] = []


class _Django:
    """`connection`, `connections["..."]`."""

    def __init__(self, connection: Any) -> None:
        # Django's settings, for one, raise whatever they are asked before they are set up.
        known = type(connection).__module__.startswith(("django.db.", "django.utils.connection"))
        vendor = getattr(connection, "vendor", None) if known else None
        if vendor is None or not hasattr(connection, "in_atomic_block"):
            raise _wrong_object(connection, "django.db.connection or one of django.db.connections")
        if vendor != "postgresql":
            raise BadSetting(f"this connection leads to {vendor}, and the jobs are in PostgreSQL")
        self._connection = connection
        with explained():
            if not connection.in_atomic_block and connection.get_autocommit():
                raise BadSetting(
                    _NO_TRANSACTION.format(what="this connection", advice="use `with transaction.atomic()`")
                )

    def fetch(self, statement: str, text: str) -> Pairs:
        with explained(), self._connection.cursor() as cursor:
            cursor.execute(_with_percent(statement), [text])
            rows: Pairs = cursor.fetchall()
            return rows

    async def afetch(self, statement: str, text: str) -> Pairs:
        """Django refuses this in an event loop; it says so itself."""
        return self.fetch(statement, text)

    @property
    def announces_commits(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def after_commit(self, act: AfterCommit) -> None:
        if self.announces_commits:
            self._connection.on_commit(lambda: _run_quietly(act))


def _lent(transaction: Any) -> Caller:
    """The `Transaction` of a running job stands for its connection."""
    if getattr(transaction, "connection", None) is None:
        raise _wrong_object(transaction, "the Transaction of a running job")
    return caller_of(transaction.connection)


_LIBRARIES: dict[str, Callable[[Any], Caller]] = {
    "asyncpg": _Asyncpg,
    "psycopg": _Psycopg,
    "sqlalchemy": _SQLAlchemy,
    "django": _Django,
    "propolis": _lent,
}


# --- what they have in common ------------------------------------------------------------


def _with_percent(statement: str) -> str:
    """With its one parameter as most drivers want it; before that, the name of a schema may be anything."""
    head, _, tail = statement.rpartition("$1")
    return f"{head.replace('%', '%%')}%s{tail}"


def _as_tuples(_cursor: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    return tuple


def _run_quietly(act: AfterCommit) -> None:
    """A hint that fails must not make a commit look failed."""
    try:
        act()
    except Exception as error:
        log.debug("nobody was notified: %s", error)


def _wrong_object(given: Any, wanted: str) -> BadSetting:
    kind = type(given)
    return BadSetting(f"tx={kind.__module__}.{kind.__qualname__} is no transaction to join: give {wanted}")


# --- errors ------------------------------------------------------------------------------


@contextmanager
def explained() -> Iterator[None]:
    """What a library raises, in our words; what its own code does not raise passes."""
    try:
        yield
    except PropolisError:
        raise
    except Exception as error:
        libraries = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        if not (libraries & _LIBRARIES.keys() or isinstance(error, OSError | TimeoutError)):
            raise
        raise _explanation(error) from error


def _explanation(error: BaseException) -> Exception:
    code, detail = _code_of(error)
    error_text = str(error).strip().partition("\n")[0] or type(error).__name__
    if code.startswith("PP"):
        return SchemaRefused(code, detail)
    if code in _NOT_THERE:
        return BadSetting(
            f"there is no propolis in the database of this connection ({error_text}): give one to the "
            f"database that the app was made with"
        )
    if code == _LOCKED:
        return Busy("your transaction", {})
    if code in _TRY_AGAIN:
        return EngineUnavailable(
            f"the server gave up because of others ({error_text}): repeat your transaction"
        )
    if code == _ABORTED:
        return BadSetting(f"your transaction has failed before ({error_text}): roll it back first")
    if type(error).__name__ == "SynchronousOnlyOperation":
        return BadSetting(
            "Django's connection cannot be used in an event loop: call `enqueue` inside of `sync_to_async`"
        )
    if not code:
        return EngineUnavailable(f"the connection cannot be used ({error_text}): nothing was put")
    return EngineError(f"the jobs could not be put: {error_text}")


def _code_of(error: BaseException) -> tuple[str, str]:
    """The SQLSTATE and the detail, from whichever of the errors behind this one has them."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue:
        one = queue.pop(0)
        if one is None or one in seen:
            continue
        seen.append(one)
        code = getattr(one, "sqlstate", None) or getattr(one, "pgcode", None)  # psycopg2
        queue += [getattr(one, "orig", None), one.__cause__]
        if not isinstance(code, str):
            continue
        if hasattr(one, "diag"):  # psycopg
            return code, one.diag.message_detail or ""
        if hasattr(one, "detail") and not hasattr(one, "orig"):  # asyncpg
            return code, getattr(one, "detail", None) or ""
    return "", ""

"""How tables are brought up to date, and how a set of functions is installed beside the older ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from propolis.engines.postgres.client import (
    RETRIES,
    Connection,
    PostgresLink,
    Row,
    gave_up,
    is_taken,
    lacks_rights,
)
from propolis.engines.postgres.schema import (
    function_set,
    is_set,
    locked,
    migrated,
    prelude,
    quoted,
    set_of,
)
from propolis.engines.shared.migrations import Installed, Migration, made_by, pending
from propolis.engines.shared.statements import load_migrations
from propolis.errors import EngineError, EngineUnavailable, SchemaDrifted, SchemaTooOld, StorageNotReady

T = TypeVar("T")

KEPT_SETS = 5  # by --prune
LOCK_WITHIN = "2s"  # whoever waits for a table keeps everybody who comes after from it


class Fetch(Protocol):
    """Runs a statement, on whichever connection."""

    async def __call__(self, statement: str, /, *args: object) -> list[Row]: ...


class Installer:
    """What is installed in one schema, and what is still to be."""

    def __init__(self, link: PostgresLink, sql: Mapping[str, str], schema: str) -> None:
        self._link = link
        self._sql = sql
        self._schema = schema
        self._set = set_of(schema)
        self._where = f"{link.shown} (schema {schema})"

    async def look(self) -> str:
        """The functions to look with: our own, or the newest there are, as where new code is not deployed
        yet; `StorageNotReady` if there is nothing."""
        missing = await self._missing(self._link.read)
        if missing and missing[0].number == 1:
            raise StorageNotReady(self._where, "there are no tables of propolis in it")
        if await self._has_set():
            return self._set
        for row in await self._link.read(self._sql["last_set"]):
            return str(row[0])
        raise StorageNotReady(self._where, "there are no functions of propolis beside it")

    async def install(self, *, migrates: bool, prune: bool = False) -> list[str]:
        """Make empty storage, and our own functions wherever they are missing; tables that are there change
        only if it `migrates`.  Gives what was done."""
        missing = await self._missing(self._link.read)
        self._check(missing, migrates=migrates)
        if not missing and not prune and await self._has_set():
            return []
        try:
            return await self._patiently(partial(self._install, migrates, prune))
        except EngineError as error:
            if is_taken(error.__cause__):
                raise SchemaDrifted(self._where, f"somebody else's are there: {error.__cause__}") from error
            if missing or prune or not lacks_rights(error.__cause__):
                raise
            why = f"its functions ({self._set}) are not installed, and this role may not create them"
            raise SchemaTooOld(self._where, why) from error

    async def check_rights(self) -> None:
        """`EngineError` for a role that could not do all that a worker does, before it does a part of it.

        `SchemaDrifted` where somebody has taken tables away.
        """
        wanted = (self._schema, self._set, made_by(load_migrations("postgres")))
        [(read_only, missing, gone)] = await self._link.read(self._sql["rights"], *wanted)
        if gone:
            raise SchemaDrifted(self._where, f"without {', '.join(gone)}")
        if read_only:
            raise EngineUnavailable(
                f"{self._where} is read-only, as a standby is: give the URL of the primary; with several "
                f"hosts in it, add target_session_attrs=primary"
            )
        if missing:
            raise EngineError(f"{self._where}: this role lacks rights: GRANT {'; GRANT '.join(missing)}")

    async def _patiently(self, act: Callable[[Connection], Awaitable[T]]) -> T:
        """As often as the server gives up because of others, who go on meanwhile."""
        for _ in range(RETRIES):
            try:
                return await self._link.run(act)
            except EngineUnavailable as error:
                if not gave_up(error.__cause__):
                    raise
            await asyncio.sleep(random.uniform(0.05, 0.5))
        return await self._link.run(act)

    def _check(self, missing: Sequence[Migration], *, migrates: bool) -> None:
        if missing and missing[0].number > 1 and not migrates:
            files = ", ".join(each.file for each in missing)
            raise SchemaTooOld(self._where, f"its tables lack {files}, and only ?migrate=auto runs it here")

    async def _missing(self, fetch: Fetch) -> list[Migration]:
        known = load_migrations("postgres")
        [there] = await fetch(self._sql["installed"], self._schema)
        rows = await fetch(self._sql["migrations"]) if there[0] else []
        if there[0] and known[0].number not in [
            row[0] for row in rows
        ]:  # it and its table are made in one step
            raise SchemaDrifted(self._where, "its table migration is somebody else's")
        return pending(known, [Installed(*row) for row in rows], self._where)

    async def _has_set(self) -> bool:
        return bool((await self._link.read(self._sql["has_set"], self._set))[0][0])

    # --- in one transaction, one after the other -----------------------------------------

    async def _install(self, migrates: bool, prune: bool, connection: Connection) -> list[str]:
        await connection.execute(locked(self._schema))
        await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_WITHIN}'")
        missing = await self._missing(connection.fetch)  # somebody may have been faster
        self._check(missing, migrates=migrates)
        done = [f"ran {each.file}" for each in missing]
        if missing:
            await connection.execute("\n".join([prelude(self._schema), *map(migrated, missing)]))
        incompatible = [row[0] for row in await connection.fetch(self._sql["incompatible_sets"])]
        done += [await self._drop(connection, name) for name in incompatible]
        if not (await connection.fetchval(self._sql["has_set"], self._set)):
            done.append(await self._add_set(connection))
        if prune:
            old = [row[0] for row in await connection.fetch(self._sql["old_sets"], self._set, KEPT_SETS)]
            done += [await self._drop(connection, name) for name in old]
        return done

    async def _add_set(self, connection: Connection) -> str:
        last = await connection.fetchval(self._sql["last_set"])
        await connection.execute(function_set(self._schema))
        for row in await connection.fetch(self._sql["grants"], last, self._set):
            await connection.execute(row[0])
        return f"installed the functions {self._set}"

    async def _drop(self, connection: Connection, name: str) -> str:
        """Whoever works with jobs may have written a name into our table: no schema but a set is dropped."""
        if not is_set(name, self._schema):
            raise SchemaDrifted(self._schema, f"its table function_set names {name!r}, which is no set of it")
        await connection.execute(f"DROP SCHEMA IF EXISTS {quoted(name)} CASCADE")
        await connection.execute(self._sql["forget_set"], name)
        return f"removed the functions {name}"

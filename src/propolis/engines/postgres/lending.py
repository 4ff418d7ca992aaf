"""Transactions of the engine's own, lent to running jobs: what a job writes and its end are one commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import asyncpg

from propolis.core.job import Lease, Outcome
from propolis.engines.postgres.client import LOST, Connection, PostgresLink
from propolis.errors import BadSetting, EngineUnavailable, OutcomeUnknown

TIDY_WITHIN = 5.0  # seconds for a connection to become as good as new; else it is closed


class SettlesLent(Protocol):
    """Settles a lease in the transaction of this connection; False if the lease is lost."""

    async def __call__(self, connection: Connection, lease: Lease, outcome: Outcome, /) -> bool: ...


class AfterLentCommit(Protocol):
    """Is called once the transaction in which this lease was settled has committed."""

    def __call__(self, lease: Lease, outcome: Outcome, /) -> None: ...


class LentTransaction:
    """One transaction, from its begin to its commit or its end without one."""

    def __init__(
        self, link: PostgresLink, connection: Connection, settle: SettlesLent, committed: AfterLentCommit
    ) -> None:
        self._link = link
        self._settle = settle
        self._committed = committed
        self._transaction = connection.transaction()
        self.connection = connection

    async def begin(self) -> None:
        await self._transaction.start()

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        if self.connection.is_closed():
            raise OutcomeUnknown("the connection was lost, and with it the transaction")
        if not self.connection.is_in_transaction():
            raise BadSetting("the job has ended its transaction itself: leave that to the worker")
        try:
            async with asyncio.timeout(self._link.patience):
                if not await self._settle(self.connection, lease, outcome):
                    return False
                await self._transaction.commit()
        except (asyncpg.PostgresError, *LOST) as error:
            explained = self._link.explained(error)
            if isinstance(explained, OutcomeUnknown):
                self.connection.terminate()
                raise explained from error
            raise  # it was refused, as when a deferred constraint fails: that is the job's own error
        except BaseException:  # nobody waits for the answer any more
            self.connection.terminate()
            raise
        self._committed(lease, outcome)
        return True

    async def end(self) -> None:
        """Roll back what was not committed, and leave nothing of the job behind: settings, locks, cursors."""
        connection = self.connection
        if connection.is_closed():
            return
        try:
            async with asyncio.timeout(TIDY_WITHIN):
                if connection.is_in_transaction():
                    await self._transaction.rollback()
                await connection.reset()
        except (asyncpg.PostgresError, *LOST):
            connection.terminate()
        except BaseException:
            connection.terminate()
            raise


@asynccontextmanager
async def lending(
    link: PostgresLink, settle: SettlesLent, committed: AfterLentCommit
) -> AsyncIterator[LentTransaction]:
    """A transaction that has begun; on leaving, what was not settled is rolled back.

    `EngineUnavailable` if there is no connection: nothing has begun.
    """
    async with link.borrowed() as connection:
        lent = LentTransaction(link, connection, settle, committed)
        try:
            await lent.begin()
        except (asyncpg.PostgresError, *LOST) as error:
            connection.terminate()
            raise EngineUnavailable(f"no transaction could be begun: {error}") from error
        try:
            yield lent
        finally:
            await lent.end()

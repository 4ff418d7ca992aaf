"""The transaction in which a job runs and ends, for tasks that ask for it."""

from __future__ import annotations

from typing import Any, Self

from propolis.app.signature import Provided


class Transaction(Provided):
    """The engine's own transaction, for a parameter annotated with it (its position does not matter).

    What the task writes through `connection` and the end of its lease are committed together: each row stands
    exactly once, however often the job is run.  If the task raises, is stopped, or has lost its lease, all
    of it is rolled back.  `using(tx=transaction)` puts jobs in it as well.  Do not commit or roll back
    yourself; savepoints are yours.  With PostgreSQL, `connection` is one of asyncpg.
    """

    __slots__ = ("connection",)

    @classmethod
    async def given(cls, job: Any) -> Self:
        lent: Self = job.transaction  # the runner has begun it
        return lent

    def __init__(self, connection: Any) -> None:
        """A test that calls the function itself makes one of its own connection."""
        self.connection = connection

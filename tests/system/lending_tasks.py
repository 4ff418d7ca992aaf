"""The app of the tests that kill workers in the middle of a transaction."""

from __future__ import annotations

import asyncio
import os
import signal

from propolis import App, Job, Transaction
from propolis.strategies import fixed, repeat

app = App(os.environ["PROPOLIS_TEST_URL"])
TABLE = os.environ["PROPOLIS_TEST_TABLE"]


@app.task(name="next")
async def next_one(number: int) -> None: ...


@app.task(name="write", on_error=repeat(5, fixed(0)))
async def write(tx: Transaction, job: Job, number: int) -> None:
    """The first run of every third job kills the worker between the job's row and the commit."""
    await tx.connection.execute(f"INSERT INTO {TABLE} VALUES ($1, $2)", number, job.fence)
    job.emit(next_one.using(queue="after"), number)
    if number % 3 == 0 and job.lease.losses == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="pause")
async def pause(tx: Transaction, job: Job, number: int) -> None:
    """The first run goes on for longer than its lease, while its worker is stopped."""
    await tx.connection.execute(f"INSERT INTO {TABLE} VALUES ($1, $2)", number, job.fence)
    if job.lease.losses == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.sleep(0)

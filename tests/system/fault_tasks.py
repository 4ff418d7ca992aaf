"""The app that the fault tests run: every start and end is a line in a ledger outside of the engine."""

from __future__ import annotations

import asyncio
import os
import time

from skep import App, Job, archive, fixed, repeat

app = App(os.environ["SKEP_TEST_URL"])
LEDGER = os.environ["SKEP_TEST_LEDGER"]


def tell(what: str, job: Job) -> None:
    line = f"{what} {job.id} {job.fence} {os.getpid()} {time.monotonic():.6f}\n"
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


@app.task(name="sleep", on_success=archive)
async def sleep(job: Job, seconds: float) -> None:
    tell("start", job)
    await asyncio.sleep(seconds)
    tell("end", job)


@app.task(name="count", on_success=archive, max_crashes=1000)
async def count(job: Job, seconds: float) -> None:
    """One of many."""
    tell("start", job)
    await asyncio.sleep(seconds)
    tell("end", job)


@app.task(name="sleep_first", on_success=archive)
async def sleep_first(job: Job, seconds: float) -> None:
    """Long the first time, however often that time is tried; short once it has crashed or been released."""
    tell("start", job)
    if job.lease.crashes == 0:
        await asyncio.sleep(seconds)
    tell("end", job)


@app.task(name="block", on_success=archive)
async def block(job: Job, seconds: float) -> None:
    tell("start", job)
    time.sleep(seconds)  # noqa: ASYNC251  # blocks the loop on purpose
    tell("end", job)


@app.task(name="fail_once", on_success=archive, on_error=repeat(1, fixed(0)))
async def fail_once(job: Job) -> None:
    tell("start", job)
    if job.attempt == 1:
        raise ValueError("once")
    tell("end", job)


@app.task(name="swallow")
async def swallow(n: int, payload: str) -> None:
    assert len(payload) > n

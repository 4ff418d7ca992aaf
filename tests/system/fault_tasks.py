"""The app that the fault tests run: every start and end is a line in a ledger outside of the engine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tests.system.moved_clock import clock_of_the_test

from propolis import App, Job
from propolis.strategies import archive, fixed, repeat

LEDGER = Path(os.environ["PROPOLIS_TEST_LEDGER"])

app = App(os.environ["PROPOLIS_TEST_URL"], clock=clock_of_the_test())


def write_down(what: str, job: Job) -> None:
    line = f"{what} {job.id} {job.fence} {os.getpid()} {time.monotonic():.6f}\n"
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(ledger, line.encode())
    os.close(ledger)


def read_ledger() -> str:
    return LEDGER.read_text() if LEDGER.exists() else ""


@app.task(name="sleep", on_success=archive)
async def sleep(job: Job, seconds: float) -> None:
    write_down("start", job)
    await asyncio.sleep(seconds)
    write_down("end", job)


@app.task(name="count", on_success=archive, max_crashes=1000)
async def count(job: Job, seconds: float) -> None:
    """One of many."""
    write_down("start", job)
    await asyncio.sleep(seconds)
    write_down("end", job)


@app.task(name="sleep_first", on_success=archive)
async def sleep_first(job: Job, seconds: float) -> None:
    """Long the first time, however often that time is tried; short once it has crashed or been released."""
    write_down("start", job)
    if job.lease.losses == 0:
        await asyncio.sleep(seconds)
    write_down("end", job)


@app.task(name="in_steps", on_success=archive)
async def in_steps(job: Job, steps: int) -> None:
    """Saves where it is after each step, and stays at half of them the first time."""
    for step in range(job.checkpoint or 0, steps):
        write_down(f"step-{step}", job)
        await job.save(step + 1)
        if step == steps // 2 and job.lease.losses == 0:
            write_down("half", job)
            await asyncio.sleep(60)


@app.task(name="sleep_once", on_success=archive)
async def sleep_once(job: Job, seconds: float) -> None:
    """Long the first time; short when it has been started before, by whichever worker."""
    is_first = f"start {job.id} " not in read_ledger()
    write_down("start", job)
    if is_first:
        await asyncio.sleep(seconds)
    write_down("end", job)


@app.task(name="block", on_success=archive)
async def block(job: Job, seconds: float) -> None:
    write_down("start", job)
    time.sleep(seconds)  # noqa: ASYNC251  # blocks the loop on purpose
    write_down("end", job)


@app.task(name="fail_once", on_success=archive, on_error=repeat(1, fixed(0)))
async def fail_once(job: Job) -> None:
    write_down("start", job)
    if job.attempt == 1:
        raise ValueError("once")
    write_down("end", job)


@app.task(name="devour", on_success=archive)
async def devour(job: Job, pause: float) -> None:
    write_down("start", job)
    eaten = []
    while True:
        eaten.append(b"x" * 1_000_000)
        await asyncio.sleep(pause)


@app.task(name="swallow")
async def swallow(n: int, payload: str) -> None:
    assert len(payload) > n

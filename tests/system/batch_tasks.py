"""The app of the batch and flow faults: every member and every callback is a line in a ledger of its own."""

from __future__ import annotations

import os
import time

from propolis import App, BatchReport, Job
from propolis.strategies import archive, fixed, repeat

app = App(os.environ["PROPOLIS_TEST_URL"])
LEDGER = os.open(os.environ["PROPOLIS_TEST_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
CRASHES = 10_000  # killed all the time, and not to blame for it


def write_down(what: str, job: Job, batch: str) -> None:
    os.write(LEDGER, f"{what} {batch} {job.envelope.member} {job.fence} {time.monotonic():.6f}\n".encode())


@app.task(name="member", max_crashes=CRASHES)
async def member(job: Job) -> None:
    write_down("end", job, job.batch or "")


@app.task(name="called", on_success=archive, max_crashes=CRASHES)
async def called(job: Job, report: BatchReport) -> None:
    assert (report.done, report.status.pending) == (report.total, 0)
    write_down("call", job, report.id)


@app.task(name="numbers", max_crashes=CRASHES)
def numbers(count: int) -> list[int]:
    return list(range(count))


@app.task(name="square", on_error=repeat(3, fixed("100ms")), max_crashes=CRASHES)
async def square(job: Job, n: int) -> int:
    """One of ten fails once: the first time that it is not a crash that brings it back."""
    if n % 10 == 3 and job.lease.failures == 0:
        raise ValueError("once")
    return n * n


@app.task(name="in_order", max_crashes=CRASHES)
def in_order(squares: list[int]) -> int:
    assert squares == [n * n for n in range(len(squares))]
    return sum(squares)

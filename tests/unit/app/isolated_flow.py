"""Steps that run in threads and in child processes."""

from __future__ import annotations

import os

from propolis import App, BatchReport, Job
from propolis.strategies import archive, fixed, repeat

app = App(os.environ.get("ISOLATED_FLOW_URL", "memory://"))


@app.task(name="spread")
def spread(count: int) -> list[int]:
    return list(range(1, count + 1))


@app.task(name="double_apart", isolate="process")
def double_apart(n: int) -> int:
    return n


@app.task(name="add_apart", isolate="process")
async def add_apart(ns: list[int], more: int) -> int:
    return sum(ns) + more


@app.task(name="report_apart", isolate="process", result_ttl="1h")
def report_apart(report: BatchReport) -> str:
    return f"{report.state}: {report.done} of {report.total}"


@app.task(name="emitted", on_success=archive)
async def emitted(n: int) -> None: ...


def emit_twice_and_fail_once(job: Job) -> None:
    job.emit(emitted, 1)
    if job.attempt == 1:
        raise ValueError("what was emitted is not put")
    job.emit(emitted, 2)


@app.task(name="emit_async", on_success=archive, on_error=repeat(1, fixed(0)))
async def emit_async(job: Job) -> None:
    emit_twice_and_fail_once(job)


@app.task(name="emit_thread", on_success=archive, on_error=repeat(1, fixed(0)))
def emit_thread(job: Job) -> None:
    emit_twice_and_fail_once(job)


@app.task(name="emit_process", on_success=archive, on_error=repeat(1, fixed(0)), isolate="process")
def emit_process(job: Job) -> None:
    emit_twice_and_fail_once(job)

"""The app of the demo: five tasks, each with a different temper."""

from __future__ import annotations

import asyncio
import os

from propolis import App, Job
from propolis.demo.ledger import started
from propolis.strategies import archive, dead, exponential, repeat

app = App(os.environ.get("PROPOLIS_DEMO_URL", "sqlite:///demo.db"))


@app.task(name="send_mail", on_success=archive)
async def send_mail(job: Job, to: str) -> None:
    started(job)
    await asyncio.sleep(0.02)
    job.log(f"sent to {to}")


@app.task(name="call_partner", on_success=archive, on_error=repeat(4, exponential("500ms")).then(dead))
async def call_partner(job: Job, works_at_attempt: int) -> None:
    started(job)
    if job.attempt < works_at_attempt:
        raise ConnectionError(f"attempt {job.attempt}: the partner does not answer")


@app.task(name="render", on_success=archive, timeout="1s", on_timeout=repeat(2, "500ms").then(dead))
async def render(job: Job, works_at_attempt: int) -> None:
    started(job)
    if job.attempt < works_at_attempt:
        await asyncio.sleep(3600)  # hangs: the worker stops it after a second


@app.task(name="import_file", on_success=archive)
async def import_file(job: Job, rows: int) -> None:
    started(job)
    for row in range(rows):
        job.progress(row, rows)
        await asyncio.sleep(0.25)


@app.task(name="charge_card", on_success=archive, on_error=dead)
def charge_card(job: Job) -> None:
    started(job)
    raise PermissionError("the card was declined")

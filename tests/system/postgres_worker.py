"""A worker for the run of faults: every start is a line in a ledger outside of the engine.  To be killed.

usage: postgres_worker.py URL LEDGER
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta

from propolis import App, Job
from propolis.strategies import archive
from propolis.worker import Lane, Settings, Worker

LEASE = timedelta(seconds=2)
WORK = 0.03  # seconds
NAME = "tests.work"


def the_app(url: str, ledger: int) -> App:
    app = App(url)

    @app.task(name=NAME, on_success=archive, max_crashes=100)
    async def work(job: Job, number: int) -> None:
        os.write(ledger, f"{job.id} {number}\n".encode())
        await asyncio.sleep(WORK)

    return app


async def main(url: str, ledger_path: str) -> None:
    ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    app = the_app(url, ledger)
    settings = Settings(lanes=[Lane({"default": 1}, 24)], lease=LEASE, isolate_suspects=False)
    worker = Worker(app, settings)
    worker.stop_on_signals()
    await worker.run()
    await app.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

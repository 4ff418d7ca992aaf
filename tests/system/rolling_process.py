"""One process of a deployment: it works and puts jobs, or it listens for those of others.

usage: rolling_process.py work|drain|listen URL LEDGER

It writes into its ledger what it has put and what it has run.  `work` goes on until a signal; `drain` puts
nothing, and ends when nothing is left.  `listen` does what its standard input says, line by line.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from datetime import timedelta

from propolis import App
from propolis.core.envelope import Envelope
from propolis.core.ids import new_id
from propolis.core.job import Done
from propolis.engines import open_engine
from propolis.worker import Mode, Settings, Worker

PACE = 0.01  # seconds between two puts
PATIENCE = 120.0  # seconds for a hint to arrive
QUEUE = "hinted"


def main(mode: str, url: str, ledger: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(listen(url) if mode == "listen" else work(url, ledger, drains=mode == "drain"))


async def work(url: str, ledger: str, *, drains: bool) -> None:
    app = App(url)
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @app.task(name="rolling")
    async def rolling(name: str) -> None:
        os.write(file, f"ran {name}\n".encode())

    async def put_forever() -> None:
        await worker.started.wait()
        for number in range(1_000_000):
            name = f"{os.path.basename(ledger)}-{number}"
            await rolling.aenqueue(name)
            os.write(file, f"put {name}\n".encode())
            await asyncio.sleep(PACE)

    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY if drains else Mode.FOREVER))
    worker.stop_on_signals()
    putting = asyncio.create_task(asyncio.sleep(0) if drains else put_forever())
    await worker.run()
    if putting.done():
        putting.result()  # it has failed
    putting.cancel()
    with suppress(asyncio.CancelledError):
        await putting
    await app.aclose()


async def listen(url: str) -> None:
    """`put`: put a job.  `wait`: look, say so, wait for a hint, say whether one came, and take the job."""
    engine = await open_engine(url)

    async def take() -> None:
        leases = await engine.lease({QUEUE: 10}, span=timedelta(minutes=1), holder="listener")
        await engine.settle([(lease, Done()) for lease in leases])

    for line in iter(sys.stdin.readline, ""):
        if line.strip() == "put":
            await engine.put([Envelope(id=new_id(), task="rolling", queue=QUEUE)])
            print("put", flush=True)
            continue
        await take()
        waiting = asyncio.create_task(engine.wait([QUEUE], PATIENCE))
        await asyncio.sleep(
            0.05
        )  # it has begun by then, most likely: a job that is put before is seen as well
        print("waiting", flush=True)
        print("heard" if await waiting else "heard nothing", flush=True)
        await take()
    await engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker without a worker: leases, tells a ledger, settles, until nothing is left.  Killed by its parent.

usage: sqlite_worker.py DATABASE LEDGER
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import timedelta

from propolis.core.job import Done, Lease
from propolis.engines.sqlite.engine import SQLiteEngine

SPAN = timedelta(seconds=1)
KEEP = timedelta(hours=1)


def write_down(ledger: int, what: str, leases: list[Lease]) -> None:
    """One write per bundle, so that a kill leaves whole lines."""
    os.write(ledger, "".join(f"{what} {lease.id} {lease.fence} {os.getpid()}\n" for lease in leases).encode())


async def main(database: str, ledger_path: str) -> None:
    ledger = os.open(ledger_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    engine = await SQLiteEngine(database).open()
    holder = str(os.getpid())
    while True:
        await engine.sweep()
        leases = await engine.lease({"default": 5}, span=SPAN, holder=holder)
        if not leases:
            counts = (await engine.queues())["default"]
            if not counts.waiting and not counts.running:
                break
            await engine.wait(["default"], 0.2)
            continue
        write_down(ledger, "start", leases)
        lost = await engine.settle([(lease, Done(keep=KEEP)) for lease in leases])
        write_down(ledger, "end", [lease for lease in leases if lease not in lost])
        write_down(ledger, "lost", lost)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))

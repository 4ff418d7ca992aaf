"""Swaps records and publishes, until it is killed.  Prints what it was told, a line each.

usage: swapping_process.py ENGINE PATH

Each swap counts two records up together, puts a job, and removes a third record or makes it anew; its line is
`swap <count> <version>`.  That of an entry of the feed is `publish <number> <entry>` or `dropped - <entry>`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from examples.json_engine import json_engine
from examples.lmdb_engine import lmdb_engine

from propolis.core.records import Change, Swap
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.engines.samples import a_job

ENGINES: dict[str, Callable[[Path], Any]] = {"sqlite": SQLiteEngine, "lmdb": lmdb_engine, "json": json_engine}
KIND, FEED, QUEUE = "k", "feed", "counted"
LEFT, RIGHT, OFTEN_GONE = "left", "right", "often gone"


def engine_at(name: str, path: Path) -> Any:
    """All of them keep records and feeds."""
    return ENGINES[name](path)


def tell(what: str) -> None:
    """One write, so that a kill leaves whole lines."""
    os.write(sys.stdout.fileno(), f"{what}\n".encode())


async def swap(engine: Any) -> None:
    """Refused where another process was quicker."""
    read = await engine.records(KIND, names=[LEFT, RIGHT, OFTEN_GONE])
    found = {record.name: record for record in read.records}
    counted = int(found[LEFT].value) + 1 if found else 1
    versions = {name: record.version for name, record in found.items()}
    changes = [
        Change(kind=KIND, name=name, value=b"%d" % counted, expected=versions.get(name, 0))
        for name in (LEFT, RIGHT)
    ]
    changes.append(Change(kind=KIND, name=OFTEN_GONE, value=None if OFTEN_GONE in found else b"there"))
    [answer] = await engine.swap([Swap(changes=tuple(changes), puts=(a_job(queue=QUEUE),))])
    if answer.version is not None:
        tell(f"swap {counted} {answer.version}")


async def main(name: str, path: Path) -> None:
    engine = await engine_at(name, path).open()
    for n in count():
        await swap(engine)
        entry = f"{os.getpid()}-{n}"
        number = await engine.publish(FEED, [entry.encode()], keep=100_000)
        tell(f"publish {number} {entry}" if number is not None else f"dropped - {entry}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))

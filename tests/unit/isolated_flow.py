"""Steps that run in threads and in child processes."""

from __future__ import annotations

import os

from skep import App

app = App("memory://")
HERE = os.getpid()


@app.task(name="spread")
def spread(count: int) -> list[int]:
    return list(range(1, count + 1))


@app.task(name="double_apart", isolate="process")
def double_apart(n: int) -> int:
    return n


@app.task(name="add_apart", isolate="process")
async def add_apart(ns: list[int], more: int) -> int:
    return sum(ns) + more

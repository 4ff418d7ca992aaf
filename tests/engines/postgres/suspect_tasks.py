"""The app of test_lending_in_children.py: in a module of its own, because every child imports it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated, Any

from propolis import App, Depends, Job, Transaction
from propolis.strategies import archive, dead, fixed, repeat

app = App(os.environ["PROPOLIS_TEST_URL"])
TABLE = os.environ["PROPOLIS_TEST_TABLE"]


class Unhappy(ValueError):
    """A class that only the child raises."""


@app.on_startup
async def start(state: Any) -> None:
    state.base = 40


async def base(job: Job) -> int:
    return int(job.state.base)


async def write(tx: Transaction, number: int) -> None:
    await tx.connection.execute(f"INSERT INTO {TABLE} VALUES ($1)", number)


@app.task(name="after")
async def after(number: int) -> None: ...


@app.task(name="plain", on_success=archive, result_ttl="1h")
async def plain() -> int:
    return os.getpid()


@app.task(name="succeed", on_success=archive, result_ttl="1h")
async def succeed(tx: Transaction, job: Job, more: Annotated[int, Depends(base)], number: int) -> int:
    await write(tx, number + more)
    job.log("written")
    job.emit(after.using(queue="after"), number)
    await after.using(tx=tx, queue="after").aenqueue(number)
    return os.getpid()


@app.task(name="apart", isolate="process")
async def apart() -> None:
    """That there is such a task keeps the children alive between two suspects."""


@app.task(name="exit")
async def exit_at_once(tx: Transaction, number: int) -> None:
    await write(tx, number)
    os._exit(7)


@app.task(name="raise", on_error={ValueError: repeat(1, fixed(0)), Exception: dead})
async def fail(tx: Transaction, number: int) -> None:
    await write(tx, number)
    raise Unhappy(f"in {os.getpid()}")


@app.task(name="conflict", on_error=dead)
async def conflict(tx: Transaction, number: int) -> None:
    await write(tx, number)
    await write(tx, number)  # which is looked at when it commits


@app.task(name="unkept", on_error=dead, result_ttl="1h")
async def unkept(tx: Transaction, number: int) -> object:
    await write(tx, number)
    return object()


@app.task(name="hang", timeout="500ms", on_timeout=dead)
async def hang(tx: Transaction, number: int) -> None:
    await write(tx, number)
    await asyncio.Event().wait()


@app.task(name="fork", on_success=archive)
async def fork(tx: Transaction, number: int) -> None:
    await write(tx, number)
    child = os.fork()
    if child == 0:
        raise Unhappy("in the fork")
    os.waitpid(child, 0)  # noqa: ASYNC222


@app.task(name="silent", on_success=archive, max_crashes=1)
async def silent(tx: Transaction, number: int) -> None:
    """Its process ends after its commit, before anybody is told of it."""
    await write(tx, number)
    link = sys.modules["__main__"].WorkerLink
    send = link.send

    def send_or_end(self: Any, reply: Any) -> None:
        if type(reply).__name__ == "Settled":
            os._exit(9)
        send(self, reply)

    link.send = send_or_end

"""The app of test_hostile_jobs.py: what jobs do to the process that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

from propolis import App
from propolis.strategies import dead

app = App(os.environ.get("WORKER_JOBS_URL", "memory://"))


@app.task(name="neighbour", result_ttl="1h")
async def neighbour(sign: str) -> str:
    while not Path(sign).exists():  # noqa: ASYNC240  # quick
        await asyncio.sleep(0.01)
    return "unharmed"


def square(number: int) -> int:
    return number * number


def _pooled() -> list[int]:
    with multiprocessing.get_context("fork").Pool(2) as pool:  # its end is a SIGTERM for both
        return pool.map(square, [1, 2, 3])


@app.task(name="pool", result_ttl="1h")
def pool() -> list[int]:
    return _pooled()


@app.task(name="pool_in_loop", result_ttl="1h")
async def pool_in_loop() -> list[int]:
    return _pooled()


@app.task(name="pool_in_child", result_ttl="1h", isolate="process")
def pool_in_child() -> list[int]:
    return _pooled()


@app.task(name="exits", on_error=dead)
async def exits() -> None:
    async def leave() -> None:
        sys.exit()

    await asyncio.create_task(leave())


@app.task(name="exits_in_callback", result_ttl="1h")
async def exits_in_callback() -> str:
    asyncio.get_running_loop().call_soon(sys.exit)
    await asyncio.sleep(0.01)
    return "went on"


@app.task(name="fork_comes_back", result_ttl="1h")
async def fork_comes_back() -> int:
    """The fork would be a second worker, with the same leases."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222  # it is to block
    await asyncio.sleep(0)
    return -1


@app.task(name="fork_in_thread", result_ttl="1h")
def fork_in_thread() -> int:
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return -1


@app.task(name="replaces_handlers", result_ttl="1h")
async def replaces_handlers() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


@app.task(name="floods", result_ttl="1h")
def floods() -> None:
    for _ in range(20_000):
        print("x" * 100)


@app.task(name="never_ends", timeout="1ms", abandon=True, on_timeout=dead)
def never_ends() -> None:
    threading.Event().wait()


LEFT: list[asyncio.Task[object]] = []


@app.task(name="leaves_task", result_ttl="1h")
async def leaves_task() -> None:
    async def stay() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)

    LEFT.append(asyncio.create_task(stay()))
    await asyncio.sleep(0)


@app.task(name="leaves_pooled_thread", result_ttl="1h")
async def leaves_pooled_thread() -> None:
    LEFT.append(asyncio.create_task(asyncio.to_thread(threading.Event().wait)))
    await asyncio.sleep(0)


@app.task(name="leaves_thread", result_ttl="1h")
async def leaves_thread() -> None:
    threading.Thread(target=threading.Event().wait).start()


@app.task(name="closes_descriptors")
async def closes_descriptors() -> None:
    """All that the worker has: its database, its pipes, and what its event loop waits for."""
    os.closerange(3, 4096)


@app.task(name="closes_sockets", result_ttl="1h")
async def closes_sockets() -> None:
    """With them goes what tells the event loop of signals; the storage may be a file, and goes on."""
    for number in range(3, 4096):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


@app.task(name="sleeps")
async def sleeps(sign: str) -> None:
    await asyncio.to_thread(Path(sign).touch)
    await asyncio.to_thread(time.sleep, 0)
    await asyncio.sleep(600)

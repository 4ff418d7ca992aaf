"""The app of the system tests of workers: on the engine that WORKER_JOBS_URL names."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path

from propolis import App, Job
from propolis.strategies import dead

app = App(os.environ.get("WORKER_JOBS_URL", "memory://"))


@app.task(name="neighbour", result_ttl="1h")
async def neighbour(seconds: float) -> None:
    await asyncio.sleep(seconds)


@app.task(name="bomb")
async def bomb(how: str) -> None:
    """In the worker's own process, unless somebody has become suspicious."""
    match how:
        case "exit":
            os._exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            eaten = bytearray(2**28)
            eaten[::4096] = b"x" * len(eaten[::4096])
            await asyncio.sleep(0.5)  # it is seen to be the largest
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short


@app.task(name="loop", isolate="process", timeout="10ms", on_timeout=dead)
def loop() -> None:
    while True:
        pass


@app.task(name="hold", isolate="process")
def hold(sign: str) -> None:
    """For ten minutes no thread of this process can do anything."""
    Path(sign).write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)


@app.task(name="until_stopping", result_ttl="1h")
def until_stopping(job: Job, sign: str) -> str:
    Path(sign).touch()
    while not job.stopping:
        time.sleep(0.01)
    time.sleep(0.3)  # some of the grace period
    return "finished in peace"


@app.task(name="forever")
async def forever(sign: str) -> None:
    await asyncio.to_thread(Path(sign).touch)
    await asyncio.sleep(600)

"""The app of test_processes.py: in a module of its own, small, because every child imports it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from skep import App, Depends, Failure, Job, Retry, Snooze, dead, repeat
from skep.context import current_job

app = App("memory://")


class Unhappy(ValueError):
    """A class that the worker never sees."""


@app.on_startup
async def start(state: SimpleNamespace) -> None:
    state.base = 40
    state.loop = asyncio.get_running_loop()


async def one(job: Job) -> AsyncIterator[int]:
    job.log("opened")
    yield 1
    job.log("closed")


One = Annotated[int, Depends(one)]


@app.task(name="plain", isolate="process", result_ttl="1h")
def plain(job: Job, number: int, more: One) -> int:
    job.progress(1, 2, "half")
    assert asyncio.run(asyncio.sleep(0, current_job())) is job
    return int(job.state.base) + number + more


@app.task(name="awaited", isolate="process", result_ttl="1h")
async def awaited(job: Job, number: int, more: One) -> int:
    assert asyncio.get_running_loop() is job.state.loop
    job.emit(here, 5)
    return int(job.state.base) + number + more


@app.task(name="here", result_ttl="1h")
async def here(number: int = 0) -> int:
    return os.getpid()


@app.task(name="here_in_thread", result_ttl="1h")
def here_in_thread() -> int:
    return os.getpid()


@app.task(name="pid", isolate="process", result_ttl="1h")
def pid() -> int:
    os.kill(os.getpid(), signal.SIGTERM)  # sent to everybody, as a service manager does
    return os.getpid()


@app.task(name="fail", isolate="process", on_error={ValueError: dead, Exception: repeat(1).then(dead)})
def fail(how: str) -> None:
    raise Unhappy("so") if how == "unhappy" else RuntimeError(how)


@app.task(name="leave", isolate="process", on_error=dead)
def leave() -> None:
    raise SystemExit(3)


@app.task(name="judge", isolate="process", on_error=repeat(1).then(dead), result_ttl="1h")
async def judge(job: Job, how: str) -> object:
    if job.lease.fence > 1 and how != "failure":
        return None
    match how:
        case "retry":
            return Retry("later", after=0)
        case "snooze":
            return Snooze(0)
    raise Failure("never")


@app.task(name="loop", isolate="process", timeout="1s", on_timeout=dead)
def loop() -> None:
    while True:
        try:
            while True:
                pass
        except BaseException:  # it wants to survive everything
            pass


@app.task(name="segfault", isolate="process")
def segfault(job: Job) -> None:
    job.log("last words")
    ctypes.string_at(0)


@app.task(name="exit", isolate="process")
def exit_at_once() -> None:
    os._exit(7)


@app.task(name="devour", isolate="process", memory_limit=300 * 2**20, on_error=dead)
def devour() -> None:
    eaten = []
    while True:
        eaten.append(bytearray(10**7))


@app.task(name="killed_by_kernel", isolate="process", max_crashes=1)
def killed_by_kernel() -> None:
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short


@app.task(name="wait_for_stop", isolate="process", result_ttl="1h")
def wait_for_stop(job: Job, sign: str) -> bool:
    Path(sign).touch()
    while not job.stopping:
        time.sleep(0.01)
    return True


@app.task(name="parent", isolate="process", timeout="500ms", on_timeout=dead)
def parent(sign: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(sign).write_text(f"{child.pid}")
    child.wait()


@app.task(name="strange", isolate="process")
def strange() -> object:
    return object()


@app.task(name="strange_and_kept", isolate="process", result_ttl="1h")
def strange_and_kept() -> object:
    return object()


@app.task(name="descriptors", isolate="process", result_ttl="1h")
def descriptors() -> list[str]:
    folder = Path("/proc/self/fd")
    links = []
    for name in os.listdir(folder):
        try:
            links.append(os.readlink(folder / name))
        except FileNotFoundError:  # that of the listing itself
            continue
    return links


@app.task(name="enqueue", isolate="process", on_error=dead)
async def enqueue() -> None:
    await here.aenqueue(1)


@app.task(name="forks", isolate="process", result_ttl="1h")
def forks() -> str:
    """Its fork raises, and so would come to its own end in our place."""
    child = os.fork()
    if child == 0:
        os.execvp("there-is-no-such-program", ["x"])
    os.waitpid(child, 0)
    return "parent"


@app.task(name="turn", isolate="process", timeout="1s", on_error=dead, on_timeout=dead)
def turn(job: Job, how: str, always: bool) -> object:
    job.again(after="1h", always=always)
    match how:
        case "raise":
            raise Unhappy
        case "fail":
            return Failure("for good")
        case "hang":
            time.sleep(600)
    return None

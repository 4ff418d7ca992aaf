"""The app of test_processes.py: in a module of its own, small, because every child imports it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from propolis import App, Depends, Discard, Job, Retry, Snooze
from propolis.app.context import current_job
from propolis.errors import LeaseLost
from propolis.strategies import dead, fixed, repeat

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


@app.task(name="saves", isolate="process", result_ttl="1h", on_error=repeat(2, fixed(0)))
def saves(job: Job) -> object:
    if job.checkpoint is None:
        job.save_now({"at": 1})
        job.save_now({"at": 2})
        raise Unhappy
    return job.checkpoint


@app.task(name="saves-wrongly", isolate="process", on_error=repeat(2, fixed(0)))
def saves_wrongly(job: Job, how: str) -> None:
    if how == "object":
        job.save_now(object())
    raise TypeError("a mistake of the task's own")


@app.task(name="saves-awaited", isolate="process", result_ttl="1h", on_error=repeat(2, fixed(0)))
async def saves_awaited(job: Job) -> object:
    if job.checkpoint is None:
        await job.save({"at": 2})
        raise Unhappy
    return job.checkpoint


@app.task(name="saves-unawaited", isolate="process", on_error=dead)
def saves_unawaited(job: Job) -> None:
    job.save(1)  # type: ignore[unused-coroutine]  # this is what it is about


@app.task(name="saves-late", isolate="process", on_error=dead)
def saves_late(job: Job, path: str) -> None:
    if job.lease.losses:
        return
    Path(path).touch()
    while not Path(f"{path}-lost").exists():
        time.sleep(0.001)
    try:
        job.save_now(1)
    except LeaseLost as error:
        Path(f"{path}-caught").write_text(error.job_id)


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


@app.task(name="environment", isolate="process", result_ttl="1h", env={"LANG": "C", "ADDED": "yes"})
def environment() -> list[str]:
    began_with = Path("/proc/self/environ").read_text(errors="replace").split("\0")
    return [*os.environ, *(line.partition("=")[0] for line in began_with), os.environ["ADDED"]]


@app.task(name="environment_here", result_ttl="1h")
def environment_here() -> str | None:
    return os.environ.get("A_SECRET")


@app.task(name="fail", isolate="process", on_error={ValueError: dead, Exception: repeat(1).then(dead)})
def fail(how: str) -> None:
    raise Unhappy("so") if how == "unhappy" else RuntimeError(how)


@app.task(name="fail-awaited", isolate="process", on_error=dead)
async def fail_awaited(how: str) -> None:
    await asyncio.sleep(0)
    raise Unhappy(how)


@app.task(name="leave", isolate="process", on_error=dead)
def leave() -> None:
    raise SystemExit(3)


@app.task(name="judge", isolate="process", on_error=repeat(1).then(dead), result_ttl="1h")
async def judge(job: Job, how: str) -> object:
    if job.lease.failures + (job.checkpoint or 0) and how != "failure":
        return None
    match how:
        case "retry":
            return Retry("later", after=0)
        case "snooze":
            await job.save(1)
            return Snooze(0)
    raise Discard("never")


@app.task(name="loop", isolate="process", timeout="1s", on_timeout=dead)
def loop() -> None:
    while True:
        try:
            while True:
                pass
        except BaseException:  # it wants to survive everything
            pass


@app.task(name="says", isolate="process", result_ttl="1h")
def says(text: str) -> None:
    logging.getLogger("shop").error("no such %s", text)
    logging.getLogger("propolis.worker").debug("a detail of ours")


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
def killed_by_kernel(eats: int) -> None:
    eaten = bytearray(eats)
    eaten[::4096] = b"x" * len(eaten[::4096])  # it has all of it, and not only the promise
    time.sleep(0.5 if eats else 0)  # it is seen so
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
            return Discard("for good")
        case "hang":
            time.sleep(600)
    return None


def plain_base() -> int:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return 41
    raise AssertionError("in the loop")


@app.middleware
def count_here(job: Job, call: Any) -> Any:
    job.app.state.wrapped = os.getpid()
    return call()


@app.middleware
async def between(job: Job, call: Any) -> Any:
    return await call()


@app.task(name="wrapped", isolate="process", result_ttl="1h")
def wrapped(job: Job, base: Annotated[int, Depends(plain_base)]) -> bool:
    return base == 41 and bool(job.state.wrapped == os.getpid())


@app.task(name="wrapped_awaited", isolate="process", result_ttl="1h")
async def wrapped_awaited(job: Job, base: Annotated[int, Depends(plain_base)]) -> bool:
    return base == 41 and bool(job.state.wrapped == os.getpid())

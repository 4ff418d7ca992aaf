"""What the adapters of all Python peers have in common.  Standard library only: it runs in any environment.

An adapter is a program: `python -P -m adapters.<name> COMMAND OPTIONS`, with OPTIONS one JSON object and the
commands

    about     say the version of the peer and the settings that were chosen for it
    setup     make the tables that the peer needs, in a storage that is empty
    send      send jobs one by one, each acknowledged before the next
    bulk      send jobs in bundles, by the peer's own means for that
    latency   send jobs one by one with pauses, so that the worker is idle when each arrives
    work      run one worker process until it is killed

What it has to tell goes as JSON lines to the named pipe in BENCH_PIPE, because peers write to stdout and
stderr as they like, and may run jobs in processes of their own.  `protocol.mjs` is the same for Node.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import itertools
import json
import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

BODY = 300  # bytes of a job's only argument
SLOW = 0.005  # seconds that a job of the crash check takes
TICK = 0.5  # seconds between two words about progress


class Peer(ABC):
    """How one peer sends and works.  `settings` is printed beside its figures."""

    distribution: str
    settings: str
    needs_worker_first = False  # jobs that are sent while no worker listens are never delivered

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options

    def version(self) -> str:
        return importlib.metadata.version(self.distribution)

    def setup(self) -> None:  # noqa: B027  # most peers need none
        """Make what the peer needs in its storage; nothing for those that make it as they go."""

    @abstractmethod
    def send(self, bodies: Bodies) -> None:
        """Send one job for each body, each acknowledged before the next is asked for."""

    @abstractmethod
    def work(self, jobs: Jobs) -> None:
        """Run one worker process that calls `jobs` for every job, until it is killed."""


class BulkPeer(Peer):
    """A peer with a way of its own to send many jobs at once."""

    @abstractmethod
    def bulk(self, bundles: Bundles) -> None:
        """Send one job for each body of each bundle, a bundle at a time."""


def emit(**fields: Any) -> None:
    """Tell the harness; one write, so that lines of several threads never mix."""
    os.write(_pipe(), json.dumps(fields).encode() + b"\n")


@functools.cache
def _pipe() -> int:
    return os.open(os.environ["BENCH_PIPE"], os.O_WRONLY)


def make_body(number: int) -> str:
    """The only argument of a job: its number, when it was sent, and something to carry."""
    return f"{number}|{time.monotonic_ns()}|".ljust(BODY, "x")


class Bodies:
    """The bodies to send.  Time counts from the first that is asked for to the end, so connecting is free."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._first: int = options.get("first", 0)
        self._count: int = options["count"]
        self._seconds: float = options.get("seconds", 3600.0)
        self._pause: tuple[float, float] | None = options.get("pause")
        self._began = self._ended = self._cpu = 0.0
        self.sent = 0

    def __iter__(self) -> Iterator[str]:
        while self._more():
            if self._pause:
                time.sleep(random.uniform(*self._pause))
            yield make_body(self._first + self.sent)
            self.sent += 1

    async def __aiter__(self) -> AsyncIterator[str]:
        while self._more():
            if self._pause:
                await asyncio.sleep(random.uniform(*self._pause))
            yield make_body(self._first + self.sent)
            self.sent += 1

    def _more(self, size: int = 1) -> bool:
        if not self.sent:
            self._began, self._cpu = time.perf_counter(), time.process_time()
        self._ended = time.perf_counter()
        return self.sent + size <= self._count and self._ended - self._began < self._seconds

    def tell(self) -> None:
        emit(
            sent=self.sent,
            seconds=self._ended - self._began,
            cpu=time.process_time() - self._cpu,
        )


class Bundles(Bodies):
    """The same, in lists of `size`."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._size = min(options.get("size", 1000), self._count)

    def lists(self) -> Iterator[list[str]]:
        while self._more(self._size):
            yield [make_body(self._first + self.sent + place) for place in range(self._size)]
            self.sent += self._size


class Jobs:
    """The work, the same for every peer: `run` where jobs are functions, `arun` where they are coroutines."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.task: str = options["task"]
        self._total: int = options.get("count", 0)
        self._numbers = itertools.count(1)
        self._done = 0
        runs = {
            "noop": (self._noop, self._anoop),
            "latency": (self._latency, self._alatency),
            "slow": (self._slow, self._aslow),
        }
        self.run, self.arun = runs[self.task]

    def _noop(self, _: str) -> None:
        self._done = done = next(self._numbers)
        if done == 1 or done == self._total:
            self._mark(done)
        if done == 1:
            threading.Thread(target=self._tick, daemon=True).start()

    async def _anoop(self, body: str) -> None:
        self._noop(body)

    def _latency(self, body: str) -> None:
        now = time.monotonic_ns()
        number, sent, _ = body.split("|", 2)
        emit(number=int(number), latency=(now - int(sent)) / 1e6)

    async def _alatency(self, body: str) -> None:
        self._latency(body)

    def _slow(self, body: str) -> None:
        number = int(body.split("|", 1)[0])
        emit(started=number)
        time.sleep(SLOW)
        emit(finished=number)

    async def _aslow(self, body: str) -> None:
        number = int(body.split("|", 1)[0])
        emit(started=number)
        await asyncio.sleep(SLOW)
        emit(finished=number)

    def _mark(self, done: int) -> None:
        emit(done=done, at=time.monotonic(), cpu=time.process_time(), rss=_memory_mb())

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self._mark(self._done)


def _memory_mb() -> float | None:
    """Resident memory now.  Not the peak that getrusage tells: it begins with that of whoever started us."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


def _end_with_parent() -> None:
    """A harness that dies, even by SIGKILL, closes the pipe: no worker is left behind."""
    while os.read(0, 1024):
        pass
    os._exit(0)


def main(peer_type: type[Peer]) -> None:
    command, options = sys.argv[1], json.loads(sys.argv[2])
    peer = peer_type(options.get("url", ""), options)
    match command:
        case "about":
            emit(
                version=peer.version(),
                settings=peer.settings,
                bulk=isinstance(peer, BulkPeer),
                needs_worker_first=peer.needs_worker_first,
            )
        case "setup":
            peer.setup()
            emit(ready=True)
        case "send" | "latency":
            bodies = Bodies(options)
            peer.send(bodies)
            bodies.tell()
        case "bulk":
            bundles = Bundles(options)
            assert isinstance(peer, BulkPeer), "about says whether there is a bulk"
            peer.bulk(bundles)
            bundles.tell()
        case "work":
            threading.Thread(target=_end_with_parent, daemon=True).start()
            peer.work(Jobs(options))
        case _:
            sys.exit(f"no command {command!r}: see the docstring of adapters/protocol.py")
    sys.stdout.flush()
    os._exit(0)  # what peers leave running (threads, pools) is not what is measured

"""The memory engine: the raw loop is a deque and a dict, and no other process can see either."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from propolis.bench.target import BUNDLE, LEASE_SECONDS, BenchPlace, BenchTarget, Raw, envelope, fresh_name


class MemoryTarget:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[BenchPlace]:
        yield BenchPlace(url, fresh_name())

    async def raw(self, place: BenchPlace, jobs: int, payload: str) -> Raw:  # noqa: ARG002
        body = envelope(payload)
        line: deque[tuple[int, bytes]] = deque()
        began = time.perf_counter()
        for number in range(jobs):
            line.append((number, body))
        put = time.perf_counter()
        leases: dict[int, tuple[bytes, float]] = {}
        while line:
            until = time.monotonic() + LEASE_SECONDS
            bundle = [line.popleft() for _ in range(min(BUNDLE, len(line)))]
            for number, body in bundle:
                leases[number] = (body, until)
            for number, _ in bundle:
                await _noop()
                del leases[number]
        return Raw(jobs / (put - began), jobs / (time.perf_counter() - put))

    async def about(self, place: BenchPlace) -> dict[str, str]:  # noqa: ARG002
        return {}


def target() -> BenchTarget:
    return MemoryTarget()


async def _noop() -> None: ...

"""The memory engine: the raw loop is a deque and a dict, and no other process can see either."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skep.bench.ground import BUNDLE, LEASE_SECONDS, Place, Raw, envelope, fresh_name


class Ground:
    @asynccontextmanager
    async def place(self, url: str) -> AsyncIterator[Place]:
        yield Place(url, fresh_name())

    async def raw(self, place: Place, jobs: int, payload: str) -> Raw:  # noqa: ARG002
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

    async def about(self, place: Place) -> dict[str, str]:  # noqa: ARG002
        return {}


async def _noop() -> None: ...

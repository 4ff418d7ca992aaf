"""Callers that go away while they wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from propolis.core.job import Done, Lease
from propolis.core.protocols import Engine
from propolis.testing.engines.samples import HOLDER, a_job

A_DAY = timedelta(days=1)  # no test waits for the end of such a lease


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return 10_000 if request.config.getoption("--full") else 60


async def test_a_caller_that_leaves_takes_no_job_along(make: Callable[[], Engine], rounds: int) -> None:
    """S4.5: wherever it is cancelled, the next one has the job, long before a lease would have ended."""
    engine = await make().open()
    for number in range(rounds):
        [receipt] = await engine.put([a_job(number)])
        leases = await cancelled_after(engine, steps=number % 12)
        async with asyncio.timeout(20):
            while not leases:
                leases = await engine.lease({"default": 10}, span=A_DAY, holder=HOLDER)
        assert [(lease.id, lease.attempt, lease.crashes) for lease in leases] == [(receipt.id, 1, 0)]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []
    await engine.close()


async def cancelled_after(engine: Engine, *, steps: int) -> list[Lease]:
    """What a call has got that is cancelled after so many steps of the loop; nothing if it was."""
    call = asyncio.create_task(engine.lease({"default": 10}, span=A_DAY, holder=HOLDER))
    for _ in range(steps):
        await asyncio.sleep(0)
    call.cancel()
    try:
        return await call
    except asyncio.CancelledError:
        return []

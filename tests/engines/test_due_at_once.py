"""S3.28: many jobs become due in one moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from propolis.core.protocols import Engine
from propolis.engines.address import Address
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

BITE = 1000
MANY = 100_000


@pytest.fixture(params=["sqlite", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[FakeClock], Engine]:
    """PostgreSQL has a test of its own, which counts pages."""
    if request.param == "sqlite":
        return lambda clock: SQLiteEngine(tmp_path / "jobs.db", clock=clock)
    target, prefix = (
        target_of(Address(request.getfixturevalue("valkey_url"))),
        request.getfixturevalue("prefix"),
    )
    return lambda clock: RedisEngine(target, prefix=f"{prefix}:", clock=clock)


@pytest.mark.parametrize("size", [5 * BITE, pytest.param(MANY, marks=pytest.mark.full)])
async def test_one_sweeper_promotes_all_in_as_many_sweeps_as_there_are_bites(
    make: Callable[[FakeClock], Engine], size: int
) -> None:
    """S3.28: and each sweep says that there is more; what a bite costs is in the costs suite (`due`)."""
    clock = FakeClock()
    engine = await make(clock).open()
    for _ in range(0, size, BITE):
        await engine.put([a_job(n, queue=f"q{n % 7}", delay_ms=60_000) for n in range(BITE)])
    clock.advance("1m")

    promoted, again = [], []
    while (swept := await engine.sweep(by="one")).promoted:
        promoted.append(swept.promoted)
        again.append(swept.again_in)

    assert promoted == [BITE] * (size // BITE)
    assert all(again_in is not None and again_in.total_seconds() <= 0.1 for again_in in again[:-1])
    assert sum(counts.ready for counts in (await engine.queues()).values()) == size
    wants = {f"q{n}": 10 for n in range(7)}
    assert len(await engine.lease(wants, span=SPAN, holder=HOLDER)) == 70
    await engine.close()

"""A fleet at work on one queue, while something is done to others: nobody there notices it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from propolis.testing.servers.serving import database

from .disturbances import EVERYWHERE, ON_POSTGRES
from .fleet import Fleet, wait_for
from .load import Bench, LockWatch

CASES = [
    (engine, name)
    for engine in ("sqlite", "postgres", "redis")
    for name in (*EVERYWHERE, *(ON_POSTGRES if engine == "postgres" else ()))
]


@pytest.fixture
def waiting(request: pytest.FixtureRequest, disturbance: str) -> int:
    if request.config.getoption("--full"):
        return 200_000
    return 50_000 if disturbance == "pause" else 10_000


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path, engine: str, waiting: int) -> Iterator[Bench]:
    server = pooled = ""
    with ExitStack() as stack:
        if engine == "sqlite":
            fleet = Fleet(tmp_path)
        elif engine == "redis":
            url, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix")
            fleet = Fleet(tmp_path, url=f"{url}?prefix={prefix}:")
        else:
            server = stack.enter_context(database(request.getfixturevalue("postgres_url")))
            name = server.rpartition("/")[2]
            pooled = f"{request.getfixturevalue('pgbouncer_url').rpartition('/')[0]}/{name}"
            fleet = Fleet(tmp_path, url=f"{server}?schema=propolis")
        made = Bench(fleet, waiting=waiting, server=server, pooled=pooled)
        yield made
        fleet.close()
        made.app.close()


@pytest.mark.parametrize(("engine", "disturbance"), CASES)
def test_a_fleet_goes_on_whatever_is_done_to_other_queues(
    bench: Bench, engine: str, disturbance: str, times_count: bool
) -> None:
    """F49, F50, F51, F52, L5, L6: nothing is lost, no lease of a healthy worker is, and nobody waits."""
    locks = LockWatch(bench.server) if engine == "postgres" else None
    with bench.loaded(), locks or nullcontext():
        (EVERYWHERE | ON_POSTGRES)[disturbance](bench)

    wait_for(lambda: bench.ended() >= bench.steady.keys())

    runs = bench.runs()
    assert {job_id: n for job_id, n in runs.items() if n > 1} == {}  # no second run: no lease was lost
    assert bench.steady.keys() <= runs.keys() <= bench.steady.keys() | bench.others
    assert locks is None or locks.found == []
    assert bench.p99_wait() < 1 or not times_count
    wait_for(lambda: is_over(bench))  # outcomes are recorded after their jobs have written their ends


def is_over(bench: Bench) -> bool:
    counts = bench.app.queues.counts()["default"]
    return (counts.waiting, counts.running, counts.dead) == (0, 0, 0)

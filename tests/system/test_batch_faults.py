"""Batches and flows whose workers are killed all the time, on the engines that processes share.

    pytest tests/system/test_batch_faults.py --full

runs the rounds in full: 200 batches of 1,000 on four processes, and a map over 10,000.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from propolis import App
from propolis.app.batch.new_batch import BatchHandle
from propolis.app.loading import load_app
from propolis.core.batch import callback_id
from propolis.core.ids import derive_id
from propolis.flows import each
from propolis.values import BatchState, Filter, State

from .fleet import HERE, Fleet, Killer, wait_for

EXAMPLES = HERE.parents[1] / "examples"


class Bars(NamedTuple):
    """How much: a little in every run, all of it when that is asked for."""

    rounds: int
    size: int
    elements: int
    most_seconds: float
    lives_for: float  # seconds of CPU, on average


@pytest.fixture
def bars(request: pytest.FixtureRequest) -> Bars:
    if request.config.getoption("--full"):
        return Bars(rounds=200, size=1000, elements=10_000, most_seconds=3600, lives_for=1.0)
    return Bars(rounds=10, size=300, elements=2000, most_seconds=240, lives_for=0.3)


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    if request.param == "redis":
        return f"{request.getfixturevalue('valkey_url')}?prefix={request.getfixturevalue('prefix')}"
    server: str = request.getfixturevalue("postgres_url")
    schema: str = request.getfixturevalue("schema")
    return f"{server}?schema={schema}"


@pytest.fixture
def fleet(tmp_path: Path, url: str) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, url=url, app="batch_tasks:app")
    yield fleet
    fleet.close()


@pytest.fixture
def app(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setenv("PROPOLIS_TEST_URL", fleet.url)
    monkeypatch.setenv("PROPOLIS_TEST_LEDGER", str(fleet.ledger))
    with loaded("batch_tasks", HERE, monkeypatch) as app:
        yield app


@contextmanager
def loaded(module: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """The app as the workers see it, on this test's engine."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    app = load_app(f"{module}:app")
    assert isinstance(app, App)
    yield app
    app.close()
    monkeypatch.delitem(sys.modules, module)


@contextmanager
def example(
    module: str, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Fleet, App]]:
    fleet = Fleet(folder, url=url, app=f"{module}:app", path=EXAMPLES)
    with loaded(module, EXAMPLES, monkeypatch) as app:
        try:
            yield fleet, app
        finally:
            fleet.close()


def written_by(fleet: Fleet) -> tuple[dict[str, dict[int, float]], dict[str, float]]:
    """When each member of each batch first came to its end, and when each callback first ran."""
    ends: dict[str, dict[int, float]] = defaultdict(dict)
    calls: dict[str, float] = {}
    for line in fleet.ledger.read_text().splitlines():
        what, batch, number, _, at = line.split()
        if what == "end":
            ends[batch].setdefault(int(number), float(at))
        else:
            calls.setdefault(batch, float(at))
    return ends, calls


@pytest.mark.more_time(full=3700)
def test_every_batch_calls_back_once_and_after_its_last_member(fleet: Fleet, app: App, bars: Bars) -> None:
    """F01, F42, S3.6, S3.7, S3.8, I11: four processes, each of them killed after a moment."""
    tasks = app.tasks
    killer = Killer(fleet.start_nursery(4), cpu=bars.lives_for)
    took = []
    batches = []
    for _ in range(bars.rounds):
        batch = app.batch(tasks["member"].many([()] * bars.size), callback=tasks["called"].job()).enqueue()
        batches.append(batch.id)
        callback = callback_id(batch.id, "finished")
        took.append(killer.wait_for(lambda job=callback: is_done(app, job), bars.most_seconds))  # type: ignore[misc]
    ends, calls = written_by(fleet)
    assert sorted(calls) == sorted(batches)
    for batch_id in batches:
        assert len(ends[batch_id]) == bars.size
        assert max(ends[batch_id].values()) <= calls[batch_id]
        status = app.batches.get(batch_id)
        assert status is not None
        assert (status.state, status.done) == (BatchState.SUCCESS, bars.size)
    called = app.jobs.find(Filter(task="called"), limit=bars.rounds + 10)
    assert Counter(record.state for record in called) == {State.DONE: bars.rounds}
    assert killer.kills
    print(f"{bars.rounds} rounds of {bars.size} in {sum(took):.0f} s with {killer.kills} kills")


def is_done(app: App, job_id: str) -> bool:
    record = app.jobs.get(job_id)
    return record is not None and record.state is State.DONE


def test_members_that_end_within_a_millisecond_call_back_once(fleet: Fleet, app: App) -> None:
    """F42, S3.6: a hundred batches of two, their members next to each other in two processes."""
    members = app.tasks["member"]
    handles = [
        app.batch(members.many([(), ()]), callback=app.tasks["called"].job()).enqueue() for _ in range(100)
    ]
    for _ in range(2):
        fleet.start("--concurrency", "1", quiet=True)
    wait_for(lambda: len(app.jobs.find(Filter(task="called", state=State.DONE), limit=101)) == 100, 240)
    ends, calls = written_by(fleet)
    assert sorted(calls) == sorted(ends) == sorted(handle.id for handle in handles)
    assert app.queues.counts()["default"].put == 300


@pytest.mark.more_time(full=3700)
def test_a_map_is_reduced_in_order_although_members_fail_and_workers_die(
    fleet: Fleet, app: App, bars: Bars
) -> None:
    """S0.40, S0.41, S0.43."""
    tasks = app.tasks
    flow = tasks["numbers"].step(bars.elements) | each(tasks["square"].step()) | tasks["in_order"].step()
    run = flow.enqueue()
    killer = Killer(fleet.start_nursery(4), cpu=bars.lives_for)
    took = killer.wait_for(lambda: flow_has_ended(app, run.id), bars.most_seconds)
    assert run.result(timeout="1s") == sum(n * n for n in range(bars.elements))
    counts = app.queues.counts()["default"]
    assert (counts.put, counts.total) == (bars.elements + 2, 0)
    assert killer.kills
    print(f"map {bars.elements} and reduce in {took:.1f} s with {killer.kills} kills")


def flow_has_ended(app: App, flow: str) -> bool:
    """By its own batch, which has few members: looking at all of them would keep the workers waiting."""
    status = app.batches.get(flow)
    return status is not None and status.finished_at is not None


# --- the examples ------------------------------------------------------------------------


def test_the_flow_example_survives_kills_at_random_points(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0.40, S0.41."""
    monkeypatch.setenv("PROPOLIS_URL", url)
    with example("star_map", tmp_path, url, monkeypatch) as (fleet, app):
        for task in app.tasks.values():
            task.options = replace(task.options, max_crashes=1000)  # they are not to blame
        runs = [sys.modules["star_map"].sum_of_squares(count).enqueue() for count in (0, 1, 30, 60)]
        killer = Killer(fleet.start_nursery(3), cpu=0.3)
        killer.wait_for(lambda: all(flow_has_ended(app, run.id) for run in runs), 240)
        assert killer.kills
        assert [run.result(timeout="1s") for run in runs] == [0, 1, 9455, 73810]


def test_reduce_by_messages_alone_survives_kills_at_random_points(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0.39, S0.42: the right sum, reported once."""
    monkeypatch.setenv("PROPOLIS_URL", url)
    with example("star_map_messages", tmp_path, url, monkeypatch) as (fleet, app):
        reports = [sys.modules["star_map_messages"].sum_of_squares(count) for count in (1, 20, 30)]
        killer = Killer(fleet.start_nursery(2), cpu=0.3)
        killer.wait_for(lambda: all(is_done(app, report) for report in reports), 240)
        assert killer.kills
        results = [record.result for report in reports if (record := app.jobs.get(report))]
        assert results == [b"1", b"2870", b"9455"]
        assert len(app.jobs.find(Filter(task="messages.report"))) == len(reports)


# --- producers that die ------------------------------------------------------------------

PRODUCER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from batch_tasks import app, called, member

async def main():
    async with app.batch(callback=called, batch_id={batch!r}, open_for="2s") as b:
        for n in range(10_000_000):
            await b.add(member)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_producer_that_is_killed_leaves_an_open_batch_that_expires(fleet: Fleet, app: App) -> None:
    """S3.2, S3.17: its members run, nobody is called, and it is forgotten."""
    batch_id = derive_id("a batch", random.random())
    handle = BatchHandle(app.client, batch_id)
    env = {**os.environ, "PROPOLIS_TEST_URL": fleet.url, "PROPOLIS_TEST_LEDGER": str(fleet.ledger)}
    code = PRODUCER.format(here=str(HERE), batch=batch_id)
    producer = subprocess.Popen([sys.executable, "-c", code], env=env)
    wait_for(lambda: (status := handle.status()) is not None and status.total >= 3000)
    producer.send_signal(signal.SIGSTOP)
    ports = ports_of(producer.pid)
    assert bool(ports) is not fleet.url.startswith("sqlite")
    producer.kill()
    producer.wait()
    wait_for(lambda: not is_served(ports))  # a server may still commit what it was given last
    status = handle.status()
    assert status is not None
    assert (status.state, status.sealed, status.total % 1000) == (BatchState.OPEN, False, 0)
    fleet.start(quiet=True)
    wait_for(lambda: handle.status() is None)
    wait_for(lambda: app.queues.counts()["default"].total == 0, 240)
    ends, calls = written_by(fleet)
    assert len(ends[batch_id]) == status.total
    assert calls == {}
    assert asyncio.run(gone(app, batch_id))


class Socket(NamedTuple):
    port: int
    peer: int
    state: str
    inode: str


def sockets() -> list[Socket]:
    """All that this machine has, by TCP."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return [
        Socket(int(own.rpartition(":")[2], 16), int(peer.rpartition(":")[2], 16), state, more[5])
        for _, own, peer, state, *more in lines
    ]


def ports_of(pid: int) -> set[int]:
    """Those from which a process is connected."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {each.port for each in sockets() if f"socket:[{each.inode}]" in links}


def is_served(ports: set[int]) -> bool:
    """Has somebody not yet closed the other end, who may still be at work with what came by it?"""
    established, half_closed = "01", "08"
    return any(each.peer in ports and each.state in (established, half_closed) for each in sockets())


async def gone(app: App, batch_id: str) -> bool:
    return [each async for each in app.batches.amembers(batch_id)] == []

"""Processes that swap records and publish are killed without warning, on engines that live in a file."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.system.swapping_process import (
    ENGINES,
    FEED,
    KIND,
    LEFT,
    OFTEN_GONE,
    QUEUE,
    RIGHT,
    engine_at,
)

ROOT = Path(__file__).parents[2]
AT_ONCE = 2
KILLS = 4
LAST = "last"
LINES = 30  # that a process has told before it is killed


class Writers:
    """Some processes at a time; whoever is killed has a successor."""

    def __init__(self, engine: str, path: Path) -> None:
        self._argv = [sys.executable, str(ROOT / "tests/system/swapping_process.py"), engine, str(path)]
        self.running: list[Process] = []
        self.told: list[list[str]] = []

    async def start(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "PYTHONPATH": path}
        self.running.append(
            await asyncio.create_subprocess_exec(*self._argv, stdout=PIPE, stderr=PIPE, env=env)
        )

    async def kill_oldest(self) -> None:
        """After it has told some lines; with all that it told until then."""
        process = self.running.pop(0)
        assert process.stdout is not None
        assert process.stderr is not None
        told = [await process.stdout.readline() for _ in range(LINES)]
        if told[-1]:
            process.kill()
        told += (await process.stdout.read()).splitlines()
        assert await process.stderr.read() == b""
        await process.wait()
        self.told.append([line.decode().strip() for line in told])

    def swaps(self) -> dict[int, int]:
        """The version that each count was told."""
        found = [(int(n), int(version)) for what, n, version in self._lines() if what == "swap"]
        assert len(found) == len(dict(found))  # no count was reached twice
        return dict(sorted(found))

    def dropped(self) -> set[str]:
        """What is perhaps in the feed: nobody confirmed it."""
        return {entry for what, _, entry in self._lines() if what == "dropped"}

    def entries(self) -> dict[int, str]:
        """What was told to be in the feed, by number."""
        found = [(int(number), entry) for what, number, entry in self._lines() if what == "publish"]
        assert len(found) == len(dict(found))
        return dict(found)

    def _lines(self) -> list[list[str]]:
        return [line.split() for told in self.told for line in told]


@pytest.fixture(params=list(ENGINES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def engine(name: str, tmp_path: Path) -> AsyncIterator[Any]:
    opened = await engine_at(name, tmp_path / "jobs").open()
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def writers(name: str, tmp_path: Path) -> AsyncIterator[Writers]:
    writers = Writers(name, tmp_path / "jobs")
    yield writers
    for process in writers.running:
        process.kill()
        await process.communicate()


class Follower:
    """Reads the feed while it grows, up to its last entry."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.read: dict[int, str] = {}

    async def run(self) -> None:
        after = 0
        while LAST not in self.read.values():
            page = (await self._engine.follow({FEED: after}, wait=600))[FEED]
            assert not page.gap
            assert all(entry.number > after for entry in page.entries)
            self.read |= {entry.number: entry.value.decode() for entry in page.entries}
            after = page.after


async def test_processes_that_are_killed_leave_no_swap_half_done_and_overtake_no_number(
    engine: Any, writers: Writers
) -> None:
    """R1, I3, and what feeds promise."""
    follower = Follower(engine)
    following = asyncio.create_task(follower.run())
    for _ in range(AT_ONCE):
        await writers.start()
    for _ in range(KILLS):
        await writers.kill_oldest()
        await writers.start()
    while writers.running:
        await writers.kill_oldest()
    while await engine.publish(FEED, [LAST.encode()], keep=100_000) is None:
        pass
    await following

    swaps, killed = writers.swaps(), KILLS + AT_ONCE
    records = {record.name: record for record in (await engine.records(KIND)).records}
    counted = int(records[LEFT].value)
    assert records[RIGHT].value == records[LEFT].value
    assert records[RIGHT].version == records[LEFT].version
    assert (OFTEN_GONE in records) == (counted % 2 == 1)
    assert (await engine.queues())[QUEUE].put == counted
    assert len(swaps) <= counted <= len(swaps) + killed  # each may have died before it told its last
    assert all(earlier < later for earlier, later in pairwise(swaps.values()))  # none came back
    assert swaps.get(counted, records[LEFT].version) == records[LEFT].version

    entries = await every_entry(engine)
    told = writers.entries()
    assert told.items() <= entries.items()
    untold = [entry for number, entry in entries.items() if number not in told]
    assert len(set(untold) - {LAST} - writers.dropped()) <= killed
    assert follower.read == entries


async def every_entry(engine: Any) -> dict[int, str]:
    """In the order of their numbers."""
    found: list[tuple[int, str]] = []
    while page := (await engine.follow({FEED: found[-1][0] if found else 0}))[FEED].entries:
        found += [(entry.number, entry.value.decode()) for entry in page]
    assert all(earlier < later for (earlier, _), (later, _) in pairwise(found))
    return dict(found)

"""Random faults for a while, then recount: nothing that was acknowledged is lost, and the books are right."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from propolis import App
from propolis.core.protocols import Repairs
from propolis.errors import PropolisError
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, State

from .fleet import Fleet
from .places import Place, Where, postgres, redis, sqlite

WORKERS = 3
REASONS = {"crashed", "lost", "released"}  # why a job may have run again


@dataclass
class Soak:
    app: App  # the way of producers and operators
    place: Place
    pids: Callable[[], list[int]]
    chance: random.Random
    acknowledged: list[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)
    stopped: set[int] = field(default_factory=set)

    async def put_for(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            jobs = [a_job(self.chance.random() / 50, task="count") for _ in range(self.chance.randint(1, 20))]
            with suppress(PropolisError):  # then nobody was told that they are put
                await self.app.client.aput_many(jobs)
                self.acknowledged += [job.id for job in jobs]
            await asyncio.sleep(0.02)

    async def harm_for(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        faults: list[Callable[[], Awaitable[None]]] = [self.kill, self.freeze, self.pause, self.cancel]
        if self.place.proxy is not None:
            faults += [self.lose_an_answer, self.cut, self.restart]
        while asyncio.get_running_loop().time() < end:
            fault = self.chance.choice(faults)
            self.struck[fault.__name__] += 1
            with suppress(PropolisError, ProcessLookupError):
                await fault()
            await asyncio.sleep(self.chance.random() / 2)

    async def kill(self) -> None:
        os.kill(self.chance.choice(self.pids()), signal.SIGKILL)

    async def freeze(self) -> None:
        """For less or more than a lease."""
        pid = self.chance.choice(self.pids())
        self.stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self.chance.random() * 2)
        os.kill(pid, signal.SIGCONT)
        self.stopped.discard(pid)

    async def pause(self) -> None:
        await self.app.queues.apause("default")
        await asyncio.sleep(self.chance.random() / 2)
        await self.resume()

    async def cancel(self) -> None:
        for job_id in self.acknowledged[-3:]:
            await self.app.jobs.acancel(job_id)

    async def lose_an_answer(self) -> None:
        assert self.place.proxy is not None
        self.place.proxy.swallow_an_answer()

    async def cut(self) -> None:
        assert self.place.proxy is not None
        self.place.proxy.reset()

    async def restart(self) -> None:
        assert self.place.server is not None
        await asyncio.to_thread(self.place.server.kill)
        await asyncio.to_thread(self.place.server.start)

    async def resume(self) -> None:
        """Again and again, until it is so."""
        while True:
            with suppress(PropolisError):
                await self.app.queues.aresume("default")
                return
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.place.proxy is not None:
            self.place.proxy.restore()
        await self.resume()


@pytest.mark.parametrize("where", [sqlite, postgres, redis])
async def test_after_random_faults_the_books_are_right(where: Where, request: pytest.FixtureRequest) -> None:
    """F01, F02, F11, F14, F15, I8, L3: kill -9, SIGSTOP, restarts, lost answers, pauses and cancels."""
    # An hour for the three of them, or two minutes.
    seconds = 1200.0 if request.config.getoption("--full") else 40.0
    seed = int(os.environ.get("PROPOLIS_SOAK_SEED", 0)) or random.SystemRandom().randrange(2**32)
    print(f"PROPOLIS_SOAK_SEED={seed}")  # shown where it fails
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place = await stack.enter_async_context(where(folder))
        fleet = Fleet(folder, url=place.url)
        stack.callback(fleet.close)
        app = App(place.through_proxy)
        stack.push_async_callback(app.aclose)
        await app.ready()
        soak = Soak(app, place, fleet.start_nursery(WORKERS), random.Random(seed))
        async with asyncio.timeout(120):
            while not soak.pids():
                await asyncio.sleep(0.01)
        await asyncio.gather(soak.put_for(seconds), soak.harm_for(seconds))
        await soak.end()
        print(dict(soak.struck), len(soak.acknowledged))
        await check_books(app, fleet, soak.acknowledged)


async def check_books(app: App, fleet: Fleet, acknowledged: list[str]) -> None:
    async with asyncio.timeout(240):
        while (counts := (await app.queues.acounts())["default"]).waiting or counts.running:
            await asyncio.sleep(0.05)
    infos = {info.id: info async for info in app.jobs.aeach(Filter())}
    assert {job_id for job_id in acknowledged if job_id not in infos} == set()
    assert {info.state for info in infos.values()} <= {State.DONE, State.DEAD, State.CANCELLED}
    assert counts.put - counts.deleted == len(infos)
    assert counts.more or counts.total == len(infos)  # a look counts a bite, and says that there is more
    starts = Counter(line.job_id for line in fleet.lines() if line.what == "start")
    again = [infos[job_id] for job_id, runs in starts.items() if runs > 1]
    assert [info.id for info in again if not REASONS & {event.kind for event in info.history}] == []
    engine = await app.ready()
    if isinstance(engine, Repairs):
        assert await engine.repair(mend=False) == []

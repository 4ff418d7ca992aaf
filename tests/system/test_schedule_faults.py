"""Schedules fired by real processes that are killed, frozen and cut off, on engines that are started anew."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from propolis import App
from propolis.core import wire
from propolis.values import Filter

from .fleet import Fleet, wait_for
from .moved_clock import clock_of_the_test
from .places import Place, Where, postgres, redis, sqlite

WORKERS = 3
A_SECOND = timedelta(seconds=1)


class Ticks:
    """Workers with a schedule of every second, and what it has put."""

    def __init__(self, folder: Path, url: str, app: App) -> None:
        self._app = app
        self._fleet = Fleet(folder, url=url, app="scheduled_tasks:app")

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Since the first; at the end, each second since then has had its job, exactly one."""
        try:
            for _ in range(WORKERS):
                self._fleet.start("--lease", "1s", quiet=True)
            wait_for(partial(self.are_there, 1))
            yield
            seen = self.instants()
            record = self._app.schedules.get("tick")
            seen_later = self.instants()
        finally:
            self._fleet.close()
        assert seen == [seen[0] + n * A_SECOND for n in range(len(seen))]
        assert record is not None
        assert record.last_at is not None
        assert seen[-1] <= record.last_at <= seen_later[-1]  # an instant and its job are one step

    def instants(self) -> list[datetime]:
        found = [
            wire.decode(info.body).headers for info in self._app.jobs.find(Filter(task="tick"), limit=100_000)
        ]
        return sorted(datetime.fromisoformat(headers["propolis-instant"]) for headers in found)

    def are_there(self, count: int) -> bool:
        return len(self.instants()) >= count

    def wait_for_more(self, count: int = 1) -> None:
        wait_for(partial(self.are_there, len(self.instants()) + count))

    def kill_one(self) -> None:
        self._fleet.workers[-WORKERS].kill()
        self._fleet.start("--lease", "1s", quiet=True)

    def freeze_one(self) -> None:
        """Until the others went on without it, unless it holds what they need, or for longer than a lease."""
        pid, ahead = self._fleet.workers[-1].pid, len(self.instants()) + 2
        os.kill(pid, signal.SIGSTOP)
        with suppress(AssertionError):
            wait_for(partial(self.are_there, ahead), seconds=3)
        os.kill(pid, signal.SIGCONT)


def strike(folder: Path, place: Place, in_loop: Callable[[Callable[[], object]], object]) -> None:
    """One fault after another; each second has its job all the same."""
    with closing(App(place.url)) as app:
        ticks = Ticks(folder, place.through_proxy, app)
        faults: list[Callable[[], object]] = [ticks.kill_one, ticks.freeze_one]
        if (server := place.server) is not None and (proxy := place.proxy) is not None:

            def restart() -> None:
                server.kill()
                server.start()

            faults += [restart, lambda: in_loop(proxy.reset), restart]
            faults += [lambda: in_loop(proxy.swallow_an_answer)] * 3
        with ticks.going_on():
            for fault in [*faults, ticks.kill_one, ticks.kill_one]:
                fault()
                ticks.wait_for_more()


@pytest.mark.parametrize("where", [sqlite, postgres, redis])
async def test_a_schedule_of_every_second_goes_on_whatever_is_killed_frozen_or_cut_off(
    where: Where,
) -> None:
    """S2.26, S2.27, F11, F15, F39: each second has its job, exactly one."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as name:
        async with where(Path(name)) as place:
            await asyncio.to_thread(strike, Path(name), place, loop.call_soon_threadsafe)


def test_a_schedule_of_every_second_has_each_of_them_once_over_steps_of_the_clock(
    engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F38, F39: what came to pass when the clock was ahead does not come again."""
    moved = tmp_path / "moved"

    def move(seconds: int) -> None:
        new = moved.with_suffix(".new")
        new.write_text(str(seconds * 1_000_000), encoding="ascii")
        new.replace(moved)

    move(0)
    monkeypatch.setenv("PROPOLIS_TEST_CLOCK", str(moved))
    with closing(App(engine_url, clock=clock_of_the_test())) as app:
        ticks = Ticks(tmp_path, engine_url, app)
        with ticks.going_on():
            move(60)
            ticks.wait_for_more(60)
            move(0)
            ticks.kill_one()  # the next one knows nothing of that time
            move(-60)
            ticks.freeze_one()
            ahead = len(ticks.instants())
            move(70)
            wait_for(partial(ticks.are_there, ahead + 3))

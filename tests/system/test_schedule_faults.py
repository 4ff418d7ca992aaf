"""Schedules fired by real processes that are killed."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from propolis import App
from propolis.core import wire
from propolis.values import Filter

from .fleet import Fleet, wait_for


@pytest.fixture
def fleet(tmp_path: Path, engine_url: str) -> Fleet:
    return Fleet(tmp_path, url=engine_url, app="scheduled_tasks:app")


def test_a_schedule_of_every_second_goes_on_while_workers_are_killed(fleet: Fleet) -> None:
    """S2.26, S2.27, F39: each second has its job, exactly one, whoever was killed meanwhile."""
    app = App(fleet.url)

    def instants() -> list[datetime]:
        found = [wire.decode(record.body).headers for record in app.jobs.find(Filter(task="tick"))]
        return sorted(datetime.fromisoformat(headers["propolis-instant"]) for headers in found)

    def are_there(count: int) -> bool:
        return len(instants()) >= count

    try:
        for _ in range(3):
            fleet.start("--lease", "1s")
        wait_for(partial(are_there, 1))
        for victim in range(3):
            before = len(instants())
            fleet.workers[victim].send_signal(signal.SIGKILL)
            fleet.start("--lease", "1s")
            wait_for(partial(are_there, before + 2))
        seen = instants()
        record = app.schedules.get("tick")
        seen_later = instants()
    finally:
        fleet.close()
        app.close()
    assert seen == [seen[0] + timedelta(seconds=n) for n in range(len(seen))]
    assert record is not None
    assert record.last_at is not None
    assert seen[-1] <= record.last_at <= seen_later[-1]  # an instant and its job are one step

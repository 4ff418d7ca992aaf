"""What a worker meets at the worst moment: it goes on, or ends and says why; and no job pays for it."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from tests.unit.worker.working import working

from propolis import App
from propolis.core.records import Change, Swap
from propolis.engines.memory import MemoryEngine
from propolis.testing.engines.samples import a_job
from propolis.values import Filter
from propolis.worker.sweeping.unknown_tasks import KIND, record_name

SOON = timedelta(milliseconds=50)


@pytest.mark.parametrize(
    "value",
    [b"{", b"\xff", b'{"queue": "default", "task": "nobody", "since": "2020-01-01T00:00:00"}'],
    ids=["cut off", "no text", "of no time zone"],
)
async def test_an_odd_record_of_an_unknown_task_is_written_anew(
    app: App, monkeypatch: pytest.MonkeyPatch, value: bytes
) -> None:
    """L7, T12b: one that cannot be read ended all sweeping."""
    monkeypatch.setattr("propolis.worker.sweeping.sweeper.SWEEP_EVERY", 0.01)
    engine = await app.client.ready()
    assert isinstance(engine, MemoryEngine)
    odd = Change(kind=KIND, name=record_name(("default", "nobody")), value=value)
    await engine.swap([Swap(changes=(odd,))])
    await engine.put([a_job(task="nobody")])
    async with working(app, unknown_for=SOON), asyncio.timeout(20):
        while not await app.jobs.afind(Filter(reason="broken")):
            await asyncio.sleep(0.001)  # no event shows this state

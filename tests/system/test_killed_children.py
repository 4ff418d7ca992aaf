"""What is left of child processes that were killed: nothing."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from propolis.app.loading import load_app
from propolis.worker import Lane, Mode, Settings, Worker

HERE = Path(__file__).parent
SETTINGS = Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, 4)])


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_killed_children_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """F09, S0.22: no process, thread or descriptor."""
    children = 100 if request.config.getoption("--full") else 30
    monkeypatch.delenv("WORKER_JOBS_URL", raising=False)
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("worker_jobs", None)  # so that it takes this test's engine
    app = load_app("worker_jobs:app")
    await app.tasks["loop"].aenqueue()
    await Worker(app, SETTINGS).run()
    before = resources()

    await app.tasks["loop"].many([()] * children).aenqueue()
    await Worker(app, SETTINGS).run()

    counts = await app.client.engine.queues()
    assert counts["default"].dead == 1 + children
    async with asyncio.timeout(120):
        while any(now > then for now, then in zip(resources(), before, strict=True)):
            await asyncio.sleep(0.02)  # what an earlier test has left may go meanwhile
    await app.aclose()


def resources() -> tuple[int, int, int]:
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that ends while we look has none
            children += (task / "children").read_text().split()
    return len(children), threading.active_count(), len(os.listdir("/proc/self/fd"))

"""The app of test_schedule_faults.py: something to do every second."""

from __future__ import annotations

import os

from tests.system.moved_clock import clock_of_the_test

from propolis import App
from propolis.strategies import archive

app = App(os.environ["PROPOLIS_TEST_URL"], clock=clock_of_the_test())


@app.every("1s", name="tick", misfire="all", misfire_limit=1000)
@app.task(name="tick", on_success=archive)
async def tick() -> None: ...

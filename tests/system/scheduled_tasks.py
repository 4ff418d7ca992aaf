"""The app of test_schedule_faults.py: something to do every second."""

from __future__ import annotations

import os

from propolis import App
from propolis.strategies import archive

app = App(os.environ["PROPOLIS_TEST_URL"])


@app.every("1s", name="tick", misfire="all")
@app.task(name="tick", on_success=archive)
async def tick() -> None: ...

"""A job that runs in a process of its own is traced there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.worker.working import work

from propolis.app.loading import load_app

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")


async def test_the_run_in_a_child_belongs_to_the_trace_of_its_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans"
    monkeypatch.setenv("SPANS", str(file))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    app: Any = load_app("traced_jobs:app")

    await app.tasks["traced_jobs.alone"].aenqueue()
    await work(app)
    await app.aclose()

    spans = {span["name"]: span for span in map(json.loads, file.read_text().splitlines())}
    put, run, own = spans["send default"], spans["process default"], spans["own"]
    assert put["pid"] == os.getpid() != run["pid"] == own["pid"]
    assert (run["parent_id"], own["parent_id"]) == (put["context"]["span_id"], run["context"]["span_id"])

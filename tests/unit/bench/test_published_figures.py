"""The page of benchmarks shows what the harness makes of the raw results beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.document import between_markers, drain_chart, has_latencies, latency_chart, section
from harness.results import read

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarks.md"
FOLDER = PAGE.with_suffix("")
RUNS = sorted(FOLDER.glob("*-run.json"))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_tables_and_charts_are_those_of_the_raw_results(run: Path) -> None:
    results = read(run)
    page = PAGE.read_text("utf-8")
    assert between_markers(page, results.name, section(results, FOLDER.name)) == page
    assert (FOLDER / f"{results.name}-drain.svg").read_text("utf-8") == drain_chart(results)
    if has_latencies(results):
        assert (FOLDER / f"{results.name}-latency.svg").read_text("utf-8") == latency_chart(results)

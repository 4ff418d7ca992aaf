"""docs/tasks.md lists what a job has."""

from __future__ import annotations

import re
from pathlib import Path

from propolis import Job

PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")

# What only the worker and other parts of propolis use.
OURS = {
    "emissions",
    "emits",
    "emitted",
    "emitted_bytes",
    "envelope",
    "gathered",
    "given",
    "goes_on",
    "last_words",
    "lease",
    "take_over",
    "transaction",
}


def test_the_page_lists_what_a_job_has_and_nothing_else() -> None:
    table = PAGE.partition("## What a job knows and says\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [re.findall(r"(\w+)(?:\(|$)", each)[0] for row in rows for each in re.findall(r"`([^`]+)`", row)]
    assert len(set(listed)) == len(listed)
    assert set(listed) == {name for name in dir(Job) if not name.startswith("_")} - OURS
    assert set(dir(Job)) >= OURS

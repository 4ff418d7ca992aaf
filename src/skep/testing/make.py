"""Short ways to make the values that tests need."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from skep.job import Job, new_id

SPAN = timedelta(seconds=15)
HOLDER = "worker-1"


def a_job(*args: object, **facts: Any) -> Job:
    """A job of the task "tests.echo" with these arguments; any field of `Job` may be given by name."""
    facts.setdefault("id", new_id())
    facts.setdefault("task", "tests.echo")
    return Job(args=msgspec.Raw(msgspec.json.encode(args)), **facts)

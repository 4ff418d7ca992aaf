"""Short ways to make the values that tests need."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from propolis.core.envelope import Envelope
from propolis.core.ids import new_id

SPAN = timedelta(seconds=15)
HOLDER = "worker-1"


def a_job(*args: object, **fields: Any) -> Envelope:
    """A job of the task "tests.echo" with these arguments; any field of `Job` may be given by name."""
    fields.setdefault("id", new_id())
    fields.setdefault("task", "tests.echo")
    return Envelope(args=msgspec.Raw(msgspec.json.encode(args)), **fields)

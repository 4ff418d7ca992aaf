"""Values as a difference shows them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from msgspec import Raw, Struct
from msgspec.structs import fields

from propolis.core.job import Lease
from propolis.testing.clock import START


def text_of(value: object) -> str:
    """Short enough to read: only what is set, and times from the start of the test."""
    match value:
        case Lease(id=job_id, fence=fence):
            return f"Lease({job_id!r}, {fence})"
        case Struct():
            shown = [f"{name}={text_of(item)}" for name, item in _set_fields(value)]
            return f"{type(value).__name__}({', '.join(shown)})"
        case datetime():
            return f"START + {text_of(value - START)}"
        case timedelta():
            return f"{value.total_seconds():.15g}s"
        case Raw():
            return repr(bytes(value))
        case list() | tuple():
            return f"[{', '.join(map(text_of, value))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {text_of(item)}' for key, item in value.items())}}}"
        case _:
            return repr(value)


def _set_fields(value: Struct) -> Iterable[tuple[str, object]]:
    for field in fields(value):
        item = getattr(value, field.name)
        if field.required or (item != field.default and item != {}):
            yield field.name, item

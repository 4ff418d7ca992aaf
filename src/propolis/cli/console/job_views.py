"""What is shown of a job.  Arguments and results may hold secrets: without being asked, only their shape."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from propolis.app.registry import Registry
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.job import JobInfo, State
from propolis.engines.address import masked_text
from propolis.errors import BrokenPayload

HIDDEN = "***"
RAW_SHOWN = 4096
SECRET = re.compile(
    r"pass(wor|phras|wd)|secret|token|api_?key|credential|private|cookie|authori", re.IGNORECASE
)

SHORT = (
    "id",
    "task",
    "queue",
    "state",
    "reason",
    "attempts",
    "holder",
    "put_at",
    "due_at",
    "started_at",
    "ended_at",
)


class ShownCall(Struct, frozen=True):
    """The arguments of a job, as values or as shapes; `undecodable` says why there are none."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    undecodable: str | None = None

    def __str__(self) -> str:
        shown = [shown_value(value) for value in self.args]
        shown += [f"{name}={shown_value(value)}" for name, value in self.kwargs.items()]
        return f"({', '.join(shown)})"


class Shape(str):
    """Stands for a value that is not shown."""

    __slots__ = ()


def shown_value(value: Any) -> str:
    return value if isinstance(value, Shape) else msgspec.json.encode(value).decode()


def state_of(info: JobInfo, now: datetime) -> str:
    """As `propolis queues` counts it."""
    return "scheduled" if info.state is State.READY and info.due_at > now else info.state.value


def short_fields(info: JobInfo, now: datetime) -> dict[str, Any]:
    """The fields of one line of a list: nothing that a task was given, returned or raised."""
    fields = {name: getattr(info, name) for name in SHORT} | {"state": state_of(info, now)}
    return fields | {"error": info.error.type if info.error else None, "progress": progress_of(info)}


def all_fields(info: JobInfo, app: Registry, now: datetime, *, values: bool) -> dict[str, Any]:
    """All fields but the body, which is shown as arguments."""
    fields = {
        name: value for name, value in asdict(info).items() if name not in ("body", "result", "checkpoint")
    }
    call = call_of(info, app, values=values)
    fields["state"] = state_of(info, now)
    fields["error"] = _masked(info.error)
    fields["progress"] = _masked(info.progress)
    fields["history"] = [_masked(event) for event in info.history]
    fields["log"] = [masked_text(line) for line in info.log]
    fields |= {"args": call.args, "kwargs": call.kwargs}
    fields |= {name: value_of(getattr(info, name), values=values) for name in ("result", "checkpoint")}
    if call.undecodable is not None:
        fields |= {"undecodable": call.undecodable, "raw": raw_of(info)}
    return fields


def _masked(value: Struct | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        name: masked_text(part) if isinstance(part, str) else part for name, part in asdict(value).items()
    }


def progress_of(info: JobInfo) -> str | None:
    if info.progress is None:
        return None
    done, total, note = info.progress.done, info.progress.total, info.progress.note
    share = f"{done:g}" if total is None else f"{done:g}/{total:g}"
    return masked_text(f"{share} {note}".rstrip())


# --- arguments ---------------------------------------------------------------------------


def call_of(info: JobInfo, app: Registry, *, values: bool) -> ShownCall:
    """The arguments of a job.  With `values`, what has the name of a secret is still hidden."""
    try:
        return call_of_job(wire.decode(info.body), app, values=values)
    except BrokenPayload as error:
        return ShownCall(undecodable=str(error))


def call_of_job(job: Envelope, app: Registry, *, values: bool) -> ShownCall:
    args, kwargs = wire.decode_args(job.args), wire.decode_args(job.kwargs)
    if not values:
        return ShownCall([shape(each) for each in args], {name: shape(each) for name, each in kwargs.items()})
    names = app.tasks[job.task].signature.positions if job.task in app.tasks else []
    by_position = [redacted(each, name) for each, name in zip(args, names, strict=False)]
    return ShownCall([*by_position, *(redacted(each) for each in args[len(names) :])], redacted(kwargs))


def value_of(stored: bytes | None, *, values: bool) -> Any:
    """What a run has returned or saved."""
    if stored is None:
        return None
    try:
        value = wire.decode_args(stored)
    except BrokenPayload:
        return Shape(f"{len(stored)} bytes")
    return redacted(value) if values else shape(value)


def shape(value: Any) -> Shape:
    match value:
        case None:
            return Shape("null")
        case str() | list():
            return Shape(f"{type(value).__name__}({len(value)})")
        case dict():
            return Shape(f"object({len(value)})")
        case _:
            return Shape(type(value).__name__)


def redacted(value: Any, name: str = "") -> Any:
    if SECRET.search(name):
        return HIDDEN
    match value:
        case dict():
            return {key: redacted(each, key) for key, each in value.items()}
        case list():
            return [redacted(each) for each in value]
        case str():
            return masked_text(value)
        case _:
            return value


def raw_of(info: JobInfo) -> str:
    """The first bytes of what could not be decoded, as text that any terminal can show."""
    shown = "".join(chr(b) if 32 <= b < 127 and b != 92 else f"\\x{b:02x}" for b in info.body[:RAW_SHOWN])
    left = len(info.body) - RAW_SHOWN
    return shown + (f" … and {left:,} bytes more" if left > 0 else "")

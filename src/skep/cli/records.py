"""What is shown of a job.  Arguments and results may hold secrets: without being asked, only their shape."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from skep import wire
from skep.cli.output import masked_text
from skep.errors import BrokenPayload
from skep.job import Job, Record
from skep.registry import Registry

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


class Call(Struct, frozen=True):
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


def short_facts(record: Record) -> dict[str, Any]:
    """One line of a list: nothing that a task was given, returned or raised."""
    facts = {name: getattr(record, name) for name in SHORT}
    return facts | {"error": record.error.type if record.error else None, "progress": progress_of(record)}


def all_facts(record: Record, app: Registry, *, values: bool) -> dict[str, Any]:
    """Everything but the body, which is there as arguments."""
    facts = {name: value for name, value in asdict(record).items() if name not in ("body", "result")}
    call = call_of(record, app, values=values)
    facts["error"] = _masked(record.error)
    facts["progress"] = _masked(record.progress)
    facts["history"] = [_masked(event) for event in record.history]
    facts["log"] = [masked_text(line) for line in record.log]
    facts |= {"args": call.args, "kwargs": call.kwargs, "result": result_of(record, values=values)}
    if call.undecodable is not None:
        facts |= {"undecodable": call.undecodable, "raw": raw_of(record)}
    return facts


def _masked(value: Struct | None) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        name: masked_text(fact) if isinstance(fact, str) else fact for name, fact in asdict(value).items()
    }


def progress_of(record: Record) -> str | None:
    if record.progress is None:
        return None
    done, total, note = record.progress.done, record.progress.total, record.progress.note
    share = f"{done:g}" if total is None else f"{done:g}/{total:g}"
    return masked_text(f"{share} {note}".rstrip())


# --- arguments ---------------------------------------------------------------------------


def call_of(record: Record, app: Registry, *, values: bool) -> Call:
    """With `values`, what looks like a secret by its name is still hidden."""
    try:
        return call_of_job(wire.decode(record.body), app, values=values)
    except BrokenPayload as error:
        return Call(undecodable=str(error))


def call_of_job(job: Job, app: Registry, *, values: bool) -> Call:
    args, kwargs = wire.decode_args(job.args), wire.decode_args(job.kwargs)
    if not values:
        return Call([shape(each) for each in args], {name: shape(each) for name, each in kwargs.items()})
    names = app.tasks[job.task].signature.positions if job.task in app.tasks else []
    by_position = [redacted(each, name) for each, name in zip(args, names, strict=False)]
    return Call([*by_position, *(redacted(each) for each in args[len(names) :])], redacted(kwargs))


def result_of(record: Record, *, values: bool) -> Any:
    if record.result is None:
        return None
    try:
        result = wire.decode_args(record.result)
    except BrokenPayload:
        return Shape(f"{len(record.result)} bytes")
    return redacted(result) if values else shape(result)


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


def raw_of(record: Record) -> str:
    """The first bytes of what could not be decoded, as text that any terminal can show."""
    shown = "".join(chr(b) if 32 <= b < 127 and b != 92 else f"\\x{b:02x}" for b in record.body[:RAW_SHOWN])
    left = len(record.body) - RAW_SHOWN
    return shown + (f" … and {left:,} bytes more" if left > 0 else "")

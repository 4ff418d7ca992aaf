"""The envelope: one call of a task, as it travels and is stored."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from propolis.core.duration import Milliseconds
from propolis.core.strategy import Strategy
from propolis.errors import BadCall

MAX_CRASHES = 3
NO_ARGS, NO_KWARGS = Raw(b"[]"), Raw(b"{}")  # one of each for all jobs: what is not this very one is written
TRACE_HEADERS = ("traceparent", "tracestate", "sentry-trace", "baggage")  # of which trace a job is a part
Moment = Annotated[datetime, Meta(tz=True)]


class UniqueUntil(StrEnum):
    """How long a unique key is held: until the job has ended, or only until it starts."""

    ENDED = "ended"
    STARTED = "started"


class Envelope(
    Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
    tag=1,
    tag_field="v",
    gc=False,
):
    """One call of a task, as its producer describes it; on the wire, one JSON object.

    Times relative to "now" (`delay_ms`, `expires_in_ms`) are measured by the engine's clock from the
    moment of the put, so a producer whose clock is wrong changes nothing.  `chosen` means that the
    caller made up the id, so that the engine remembers it for a day after the job has gone.
    """

    id: str
    task: str
    queue: str = "default"
    args: Raw = NO_ARGS
    kwargs: Raw = NO_KWARGS
    priority: int = 0
    delay_ms: Milliseconds = 0
    due_at: Moment | None = None
    expires_in_ms: Milliseconds | None = None
    expires_at: Moment | None = None
    timeout_ms: Milliseconds | None = None
    chosen: bool = False
    unique: str | None = None
    unique_until: UniqueUntil = UniqueUntil.ENDED
    key: str | None = None
    batch: str | None = None
    member: int = 0
    max_crashes: int = MAX_CRASHES
    result_ttl_ms: Milliseconds | None = None
    on_success: Strategy | None = None
    on_error: Strategy | None = None
    on_timeout: Strategy | None = None
    headers: dict[str, str] = {}
    # A field called "unknown" on the wire is a stranger too, also when it is empty: hence the length.
    unknown: Annotated[dict[str, Raw], Meta(min_length=1)] = {}


def is_plain(job: Envelope) -> bool:
    """Is it due now, remembered by nobody, and alone?  Then an engine can put it with few arguments."""
    return job.batch is None and is_simple(job)


def is_simple(job: Envelope) -> bool:
    """Is it plain, except that it may be a member of a batch?"""
    return not (
        job.delay_ms
        or job.chosen
        or job.due_at is not None
        or job.unique is not None
        or job.key is not None
        or job.expires_at is not None
        or job.expires_in_ms is not None
    )


def check_options(where: str, kind: type[Any], given: Mapping[str, object]) -> None:
    """`BadCall` for an option of an envelope that `kind`, a `TypedDict` of optional keys, does not have."""
    known: frozenset[str] = kind.__optional_keys__
    if not given.keys() <= known:
        unknown = ", ".join(sorted(given.keys() - known))
        raise BadCall(f"{where} has no option {unknown}: it has {', '.join(sorted(known))}")

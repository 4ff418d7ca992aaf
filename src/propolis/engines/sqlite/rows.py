"""Rows of the tables as values, and values as they are stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from propolis.core.batch import Batch, BatchState, batch_state
from propolis.core.clock import EARLIEST_US, EPOCH, LATEST_US, moment
from propolis.core.job import Error, Event, JobInfo, Progress, State
from propolis.core.protocols import HISTORY_EVENTS, Rule, RuleKind, Scope
from propolis.core.transitions import Running
from propolis.engines.shared.damaged import batch_as_opened, decoded
from propolis.engines.shared.statements import load_statements

SQL = load_statements("sqlite")

EVENTS = msgspec.json.Decoder(list[Event])
LINES = msgspec.json.Decoder(list[str])
_ERROR = msgspec.json.Decoder(Error)
_PROGRESS = msgspec.json.Decoder(Progress)
_json = msgspec.json.Encoder()


class LiveJob(Struct):
    """A live job, as the rarer transitions need it."""

    seq: int
    id: str
    task: str
    queue: str
    priority: int
    pos: int
    due_us: int
    expires_us: int | None
    max_crashes: int
    chosen: int
    unique_key: str | None
    limit_key: str | None
    batch: str | None
    member: int
    stepped: int
    attempts: int
    failures: int
    losses: int
    crashes: int
    fence: int
    started_us: int | None
    history: str | None
    lease_fence: int = 0
    attempt: int = 0
    lease_started_us: int | None = None
    holder: str = ""
    cancel: int = 0
    began: int = 0

    def running(self) -> Running:
        return Running(
            fence=self.lease_fence,
            attempt=self.attempt,
            failures=self.failures,
            losses=self.losses,
            crashes=self.crashes,
            max_crashes=self.max_crashes,
            cancel_requested=bool(self.cancel),
            began=bool(self.began),
            holder=self.holder,
        )

    @property
    def is_sound(self) -> bool:
        """Can one calculate with its numbers?"""
        return are_sound(_NUMBERS(self)) and are_sound([us for us in _MOMENTS(self) if us is not None])

    def history_with(self, event: Event | None) -> str | None:
        """The history with one more event, as it is stored."""
        return self.history if event is None else history_with(self.history, event)


_NUMBERS = attrgetter(
    *("priority", "pos", "due_us", "max_crashes", "chosen", "member", "stepped"),
    *("attempts", "failures", "losses", "crashes", "fence", "lease_fence", "attempt"),
)
_MOMENTS = attrgetter("expires_us", "started_us", "lease_started_us")
_INTEGERS = {int}
BOUNDS = {"least": EARLIEST_US, "most": LATEST_US}


def are_sound(numbers: Sequence[Any]) -> bool:
    """Are they integers, and none beyond what a time can be: so that one can calculate with them?"""
    return not numbers or (
        {*map(type, numbers)} == _INTEGERS and min(numbers) >= EARLIEST_US and max(numbers) <= LATEST_US
    )


def history_with(history: str | None, event: Event) -> str:
    return text_of([*(decoded(EVENTS, history) or ()), event][-HISTORY_EVENTS:])


def one(db: sqlite3.Connection, statement: str, **values: Any) -> Any:
    return db.execute(SQL[statement], values).fetchone()[0]


def one_or_none(db: sqlite3.Connection, statement: str, **values: Any) -> Any:
    row = db.execute(SQL[statement], values).fetchone()
    return None if row is None else row[0]


def rules_in(db: sqlite3.Connection, now_us: int, limit: int, after: Rule | None) -> list[Rule]:
    kind, scope, name = ("", "", "") if after is None else (after.kind, after.scope, after.name)
    place = {"kind": kind, "scope": scope, "name": name}
    return [
        Rule(
            *(RuleKind(kind), Scope(scope), name, n, by, why, moment(set_us), moment(until_us)),
            every=None if every_us is None else timedelta(microseconds=every_us),
            burst=burst,
        )
        for kind, scope, name, n, by, why, set_us, until_us, every_us, burst in db.execute(
            SQL["rules"], {**place, "now_us": now_us, "most": limit}
        )
    ]


def batch_state_of(row: Any) -> BatchState:
    total = row["live"] + row["done"] + row["dead"] + row["cancelled"]
    return batch_state(
        sealed=bool(row["sealed"]),
        total=total,
        done=row["done"],
        dead=row["dead"],
        cancelled=row["cancelled"],
    )


def text_of(value: Any) -> str:
    return _json.encode(value).decode()


def batch_of(row: Any) -> Batch:
    return batch_as_opened(row["body"], row["id"], row["parent"])


def _common(row: Any) -> dict[str, Any]:
    """What live and archived jobs have in common."""
    lines, events = decoded(LINES, row["log"]), decoded(EVENTS, row["history"])
    return {
        "id": row["id"],
        "task": row["task"],
        "queue": row["queue"],
        "body": row["body"],
        "priority": row["priority"],
        "put_at": moment(row["put_us"]) or EPOCH,
        "due_at": moment(row["due_us"]) or EPOCH,
        "expires_at": moment(row["expires_us"]),
        "failures": row["failures"],
        "losses": row["losses"],
        "crashes": row["crashes"],
        "cancel_requested": bool(row["cancel"]),
        "error": decoded(_ERROR, row["error"]),
        "unique": row["unique_key"],
        "key": row["limit_key"],
        "batch": row["batch"],
        "member": row["member"],
        "progress": decoded(_PROGRESS, row["progress"]),
        "checkpoint": row["checkpoint"],
        "log": tuple(lines or ()),
        "history": tuple(events or ()),
    }


def live_info(row: Any) -> JobInfo:
    running = row["lease_fence"] is not None
    return JobInfo(
        **_common(row),
        state=State.RUNNING if running else State.READY,
        attempts=row["attempt"] if running else row["attempts"],
        fence=row["lease_fence"] if running else row["fence"],
        holder=row["holder"],
        started_at=moment(row["lease_started_us"] if running else row["started_us"]),
        lease_until=moment(row["until_us"]),
        began=bool(row["began"]),
        parked=bool(row["parked"]),
    )


def archived_info(row: Any) -> JobInfo:
    return JobInfo(
        **_common(row),
        state=State(row["state"]),
        attempts=row["attempts"],
        fence=row["fence"],
        started_at=moment(row["started_us"]),
        ended_at=moment(row["ended_us"]),
        keep_until=moment(row["keep_us"]),
        reason=row["reason"],
        result=row["result"],
    )

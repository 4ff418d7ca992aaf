"""What the schema answers: rows as values, refusals as errors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import count, repeat
from typing import Any

import msgspec
from msgspec import Struct

from propolis.core.batch import BatchStatus, batch_state
from propolis.core.clock import EPOCH, from_us, moment, to_us
from propolis.core.job import Error, Event, JobInfo, Lease, Progress, State
from propolis.core.protocols import Counts, Durability, Page, Renewal, Rule, RuleKind, Scope
from propolis.engines.postgres.client import Row, SchemaRefused, session_of
from propolis.engines.shared.damaged import batch_as_opened, decoded
from propolis.errors import BadSetting, BatchSealed, EngineUnavailable, PropolisError, QueueFull, UnknownBatch

log = logging.getLogger("propolis.postgres")
_error = msgspec.json.Decoder(Error)
_progress = msgspec.json.Decoder(Progress)
_history = msgspec.json.Decoder(list[tuple[int, str, int, int, str, Any]])
_PLACES = 1 << 64  # cursors from here on are places: all others are numbers of puts


class Place(Struct, array_like=True, frozen=True):
    """From where a look goes on, as looking.sql has it."""

    part: int
    queue: str | None
    after: int
    base: int
    since_us: int | None


_place: msgspec.msgpack.Decoder[Place] = msgspec.msgpack.Decoder(Place)


def leases_of(row: Mapping[str, Any], until: datetime, holder: str) -> list[Lease]:
    """Those of one row of an answer, which are of one queue; what is no time in it raises."""
    queue, number, fences = row["queue"], row["number"], row["fences"]
    moments = {us: from_us(us) for us in set(row["puts_us"])}  # jobs that were put together share one
    if number is not None:
        its_own = (row["ids"], repeat(fences[0]), row["tasks"], repeat(queue), row["bodies"])
        counters = (repeat(1), repeat(0), repeat(0), repeat(until))
        put_at = map(moments.__getitem__, row["puts_us"])
        of = (put_at, repeat(holder), repeat(0), repeat(row["batches"][0] if row["batches"] else None))
        # The most common way, without a call in Python for each.
        return list(map(Lease, *its_own, *counters, *of, repeat(None), count(number + 1)))
    columns = (
        *("ids", "fences", "tasks", "bodies", "attempts", "failures", "crashes", "puts_us", "losses"),
        *("batches", "numbers"),
    )
    saved = row["checkpoints"] or repeat(None, len(row["ids"]))
    return [
        Lease(
            *(job_id, fence, task, queue, body, attempt, failures, crashes, until, moments[put_us], holder),
            *(losses, of, last, place),
        )
        for job_id, fence, task, body, attempt, failures, crashes, put_us, losses, of, place, last in zip(
            *(row[name] for name in columns), saved, strict=True
        )
    ]


def claimed(rows: Sequence[Row], until: datetime, holder: str) -> tuple[list[Lease], list[str]]:
    """The leases of an answer, and the ids of jobs to be shelved: when they were put cannot be read (L7)."""
    claims = [row for row in rows if row["ids"] is not None]
    try:
        return [lease for row in claims for lease in leases_of(row, until, holder)], []
    except (OverflowError, TypeError):
        pass
    leases, unreadable = [], []
    for row in claims:
        puts = [moment(us) for us in row["puts_us"]]
        mended = {**row, "puts_us": [to_us(at or EPOCH) for at in puts]}
        for lease, at in zip(leases_of(mended, until, holder), puts, strict=True):
            if at is None:
                unreadable.append(lease.id)
            else:
                leases.append(lease)
    return leases, unreadable


def holders_of(leases: Sequence[Lease]) -> list[str]:
    """One for all of them if that is true, as for the leases of one worker."""
    holders = [lease.holder for lease in leases]
    return holders[:1] if len(set(holders)) == 1 else holders


def named(leases: Sequence[Lease]) -> tuple[list[int] | None, list[str], list[int], list[str]]:
    """Leases as every function of the schema takes them."""
    return (
        [lease.place for lease in leases] or None,
        [lease.id for lease in leases],
        [lease.fence for lease in leases],
        holders_of(leases),
    )


def identity_of(lease: Lease) -> tuple[str, int, str]:
    return lease.id, lease.fence, lease.holder


def renewal_of(until_us: int | None, asked: bool) -> Renewal:
    return Renewal(None, later=True) if until_us is None else Renewal(from_us(until_us), asked)


def flags_of(asked: Sequence[str], rows: Sequence[Row]) -> list[bool]:
    numbers = {row[0] for row in rows}
    return [n in numbers for n in range(1, len(asked) + 1)]


def job_info(row: Row) -> JobInfo:
    parked = row["state"] == "parked"
    state = State.READY if parked else State(row["state"])
    history = decoded(_history, row["history"]) or ()
    return JobInfo(
        id=row["id"],
        task=row["task"],
        queue=row["queue"],
        state=state,
        body=row["body"],
        priority=-(row["rank"] or 0),
        put_at=moment(row["put_us"]) or EPOCH,
        due_at=moment(row["due_us"]) or EPOCH,
        expires_at=moment(row["expires_us"]),
        attempts=row["attempts"],
        failures=row["failures"],
        losses=row["losses"] or 0,
        crashes=row["crashes"],
        parked=parked,
        fence=row["fence"] or 0,
        holder=row["holder"],
        started_at=moment(row["started_us"]),
        lease_until=moment(row["until_us"]),
        cancel_requested=bool(row["cancel"]),
        ended_at=moment(row["ended_us"]),
        keep_until=moment(row["keep_us"]),
        reason=row["reason"],
        error=decoded(_error, row["error"]),
        result=row["result"],
        unique=row["unique_key"],
        key=row["limit_key"],
        batch=row["batch"],
        member=row["member"],
        checkpoint=row["checkpoint"],
        began=bool(row["began"]),
        progress=decoded(_progress, row["progress"]),
        log=tuple(row["log"] or ()),
        history=tuple(Event(moment(us) or EPOCH, *rest) for us, *rest in history),
    )


def place_of(cursor: int | None) -> Place:
    if cursor is None or cursor < _PLACES:
        return Place(1, None, cursor or 0, 0, None)
    packed = cursor - _PLACES
    return _place.decode(packed.to_bytes((packed.bit_length() + 7) // 8)[1:])


def page_of(rows: Sequence[Row]) -> Page:
    """Cursors are whole numbers, which may have any length."""
    jobs = [job_info(row) for row in rows if row["id"] is not None]
    if rows[0]["after"] is None:
        return Page(jobs, None)
    place = Place(*(rows[0][name] for name in ("part", "from_queue", "after", "base", "since_us")))
    if place == Place(1, None, place.after, 0, None):
        return Page(jobs, place.after)
    return Page(jobs, _PLACES + int.from_bytes(b"\1" + msgspec.msgpack.encode(place)))


def batch_status(row: Row) -> BatchStatus:
    total = row["live"] + row["done"] + row["dead"] + row["cancelled"]
    counts = {"done": row["done"], "dead": row["dead"], "cancelled": row["cancelled"]}
    return BatchStatus(
        id=row["id"],
        state=batch_state(sealed=row["sealed"], total=total, **counts),
        sealed=row["sealed"],
        total=total,
        enqueued=row["enqueued"],
        retrying=row["retrying"],
        running=row["running"],
        **counts,
        created_at=moment(row["created_us"]) or EPOCH,
        finished_at=moment(row["finished_us"]),
        keep_until=moment(row["keep_us"]),
        parent=row["parent"],
        note=batch_as_opened(row["body"], row["id"]).note,
    )


def counts_of(row: Row) -> Counts:
    return Counts(**{name: row[name] for name in Counts.__struct_fields__})


def sound_rules(rows: Sequence[Row]) -> list[Rule]:
    """Without those that cannot be: the log names them (L7)."""
    rules = []
    for row in rows:
        try:
            rules.append(_rule_of(row))
        except (BadSetting, ValueError, TypeError, OverflowError) as error:
            place = (row["kind"], row["scope"], row["name"])
            log.error("the rule %r is damaged, and left out of what is shown: %s", place, error)
    return rules


def _rule_of(row: Row) -> Rule:
    every_us = row["every_us"]
    return Rule(
        RuleKind(row["kind"]),
        Scope(row["scope"]),
        row["name"],
        row["n"],
        row["set_by"],
        row["why"],
        moment(row["set_us"]),
        moment(row["until_us"]),
        every=None if every_us is None else timedelta(microseconds=every_us),
        burst=1 if every_us is None else row["burst"],
    )


def complaint_of(what: str, name: str, seconds: float, application: str, state: str) -> str:
    ending = f"ROLLBACK PREPARED '{name}'" if state == "prepared" else f"SELECT pg_terminate_backend({name})"
    return (
        f"a {what} is {seconds:.0f} s old ({application or 'no name'}, {state}) and keeps what is gone "
        f"from being removed, so that everything slows down: end it ({ending}), or set "
        f"idle_in_transaction_session_timeout"
    )


def holding_of(
    pid: int, application: str, state: str, since: datetime, asked: datetime | None, tables: Sequence[str]
) -> str:
    session = session_of(pid, application, state, since, asked)
    return (
        f"{session} holds rows of {', '.join(tables)}: whoever wants the "
        f"same key, id or batch has to wait for it; end it (SELECT pg_terminate_backend({pid})), or set "
        f"idle_in_transaction_session_timeout"
    )


def durability_of(settings: Mapping[str, str]) -> Durability:
    commit = settings["synchronous_commit"]
    if settings["fsync"] != "on" or commit == "off":
        return Durability.PROCESS
    copied = settings["synchronous_standby_names"] and commit != "local"
    return Durability.NODE if copied else Durability.POWER


def refusal_of(refused: SchemaRefused) -> PropolisError:
    match refused.code:
        case "PP001":
            return UnknownBatch(refused.detail)
        case "PP002":
            return BatchSealed(refused.detail)
        case "PP003":
            detail = msgspec.json.decode(refused.detail)
            return QueueFull(detail["queue"], detail["limit"], detail["would_hold"])
        case "PP004":
            return BadSetting(
                f"this connection leads to another installation of propolis, in database {refused.detail!r}: "
                f"give one to the database that the app was made with"
            )
        case code:
            return EngineUnavailable(f"the database refused with {code}: {refused.detail}")

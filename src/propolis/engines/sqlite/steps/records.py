"""Records, and the swaps that change them together with puts."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec

from propolis.core import wire
from propolis.core.clock import from_us
from propolis.core.records import KEEP, Change, Read, Reading, Record, Refusal, Swap, Swapped
from propolis.engines.shared.feeds_on_records import Appending
from propolis.engines.shared.record_rows import moment_us, record_of
from propolis.engines.sqlite.rows import SQL
from propolis.engines.sqlite.steps.arrivals import add, receipts_for
from propolis.engines.sqlite.steps.batches import check_open, open_batch
from propolis.engines.sqlite.steps.puts import check_room
from propolis.engines.sqlite.steps.work import KNOWN_US, Work
from propolis.errors import BatchSealed, QueueFull, UnknownBatch

_ANSWERS = msgspec.json.Decoder(list[Swapped])
_json = msgspec.json.Encoder()


def swap(
    work: Work, swaps: Sequence[Swap], bodies: Sequence[list[bytes]], token: str | None
) -> list[Swapped]:
    if token is not None:
        known = work.run("answered_swap", token=token, now_us=work.now_us).fetchone()
        if known is not None:
            return _ANSWERS.decode(known[0])
    answers = [_swap(work, swap, body) for swap, body in zip(swaps, bodies, strict=True)]
    if token is not None:
        until_us = work.now_us + KNOWN_US
        work.run("keep_swap", token=token, answers=_json.encode(answers), until_us=until_us)
    return answers


def _swap(work: Work, swap: Swap, bodies: list[bytes]) -> Swapped:
    """What is refused has changed nothing, and its neighbours go on."""
    values: list[bytes | None] = []
    for change in swap.changes:
        row = work.run("record", kind=change.kind, name=change.name, now_us=work.now_us).fetchone()
        version = 0 if row is None else row[1]
        if (change.value is KEEP and row is None) or change.expected not in (None, version):
            return Swapped(None, Refusal.VERSION, change.name)
        values.append(row[0] if change.value is KEEP else change.value)
    try:
        with work.undone_on_error() if _may_be_refused(swap) else nullcontext():
            _put(work, swap, bodies)
    except QueueFull as error:
        return Swapped(None, Refusal.QUEUE_FULL, error.queue)
    except (UnknownBatch, BatchSealed) as error:
        return Swapped(None, Refusal.NO_BATCH, error.batch)
    [version] = work.run("next_version", now_us=work.now_us).fetchone()
    for change, value in zip(swap.changes, values, strict=True):
        _change(work, change, value, version)
    return Swapped(version)


def _may_be_refused(swap: Swap) -> bool:
    """Once its versions are right."""
    joined = [*(job.batch for job in swap.puts), *(batch.parent for batch in swap.opens)]
    return bool(swap.bounded and swap.puts) or any(batch is not None for batch in joined)


def _put(work: Work, swap: Swap, bodies: list[bytes]) -> None:
    for batch in swap.opens:
        open_batch(work, batch)
    if not swap.puts:
        return
    fresh = [n for n, receipt in enumerate(receipts_for(work, swap.puts)) if receipt.created]
    check_open(work, {swap.puts[n].batch for n in fresh})
    add(work, [swap.puts[n] for n in fresh], [bodies[n] for n in fresh])
    if swap.bounded:
        check_room(work, {swap.puts[n].queue for n in fresh})


def _change(work: Work, change: Change, value: bytes | None, version: int) -> None:
    if value is None:
        work.run("remove_record", kind=change.kind, name=change.name)
        return
    work.run(
        "keep_record",
        kind=change.kind,
        name=change.name,
        value=value,
        version=version,
        at_us=moment_us(change.at, work.now_us),
        expires_us=moment_us(change.expires_in, work.now_us),
    )


def encoded(swaps: Sequence[Swap]) -> list[list[bytes]]:
    return [wire.encode_all(swap.puts) for swap in swaps]


def read(db: sqlite3.Connection, now_us: int, kind: str, reading: Reading) -> Read:
    statement, values = _statement(reading)
    names, _, due, _, limit = reading
    most = -1 if names is not None else limit + 1
    rows = db.execute(SQL[statement], {"kind": kind, "now_us": now_us, "most": most, **values}).fetchall()
    page = rows if names is not None else rows[:limit]
    more = len(rows) > len(page) and not due
    return Read([_record(kind, *row) for row in page], page[-1][0] if more else None, from_us(now_us))


def _statement(reading: Reading) -> tuple[str, dict[str, Any]]:
    names, after, due, newest, _ = reading
    if names is not None:
        return "records_named", {"names": _json.encode(list(names)).decode()}
    if due:
        return "records_due", {}
    if newest:
        return ("records_backwards", {}) if after is None else ("records_before", {"after": after})
    return "records_after", {"after": after or ""}


def _record(kind: str, name: str, value: object, version: object, at_us: Any, expires_us: Any) -> Record:
    if not isinstance(value, bytes):  # a foreign hand: whoever reads it says that it is broken
        value = str(value).encode()
    return record_of(kind, name, value, version if isinstance(version, int) else 0, at_us, expires_us)


def follow_steps(work: Work, steps: Appending) -> int:
    """Append to a feed, all in this one transaction; gives the last number."""
    asked = next(steps)
    try:
        while True:
            names = None if asked.name is None else [asked.name]
            reading = Reading(names, limit=asked.limit)
            asked = steps.send(read(work.db, work.now_us, asked.kind, reading))
    except StopIteration as end:
        number, wanted = end.value
    swap(work, [wanted], [[]], None)
    return int(number)


def versions(db: sqlite3.Connection, kind: str, names: Sequence[str]) -> list[int]:
    """Of those that are stored, whether or not they have expired."""
    values = {"kind": kind, "names": _json.encode(names).decode(), "now_us": 0}
    return [row[2] for row in db.execute(SQL["records_named"], values)]


def kinds_due(db: sqlite3.Connection, now_us: int) -> tuple[str, ...]:
    return tuple(kind for (kind,) in db.execute(SQL["kinds_due"], {"now_us": now_us}))


def forget(work: Work, limit: int) -> int:
    """What has expired, a bite of it."""
    work.run("forget_swaps", now_us=work.now_us, most=limit)
    return work.run("forget_records", now_us=work.now_us, most=limit).rowcount

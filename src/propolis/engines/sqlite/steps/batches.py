"""Batches: opened, sealed, stepped by each member that ends, finished."""

from __future__ import annotations

import sqlite3
from typing import Any

from propolis.core.batch import Batch, BatchState, callbacks
from propolis.core.job import Member, State
from propolis.core.protocols import BITE
from propolis.engines.sqlite.rows import batch_of, batch_state_of, text_of
from propolis.engines.sqlite.steps import removals
from propolis.engines.sqlite.steps.arrivals import emit
from propolis.engines.sqlite.steps.work import Work
from propolis.errors import BatchSealed, UnknownBatch


def batch_row(work: Work, batch: str) -> Any:
    cursor = work.run("batch_row", id=batch)
    cursor.row_factory = sqlite3.Row
    return cursor.fetchone()


def check_open(work: Work, batches: set[str | None]) -> None:
    for batch in batches - {None}:
        assert batch is not None
        row = batch_row(work, batch)
        if row is None:
            raise UnknownBatch(batch)
        if row["sealed"]:
            raise BatchSealed(batch)


def open_batch(work: Work, batch: Batch, *, emitted: bool = False) -> None:
    """Unless it is there.  What is `emitted` may join a sealed parent; where that is over it stands alone."""
    if batch_row(work, batch.id) is not None:
        return
    if batch.parent is not None and not emitted:
        check_open(work, {batch.parent})
    joins = batch.parent is not None and work.run("grow_batch", id=batch.parent, n=1).rowcount
    work.run(
        "add_batch",
        id=batch.id,
        body=text_of(batch),
        created_us=work.now_us,
        open_us=work.now_us + batch.open_for_ms * 1000,
        parent=batch.parent if joins else None,
        member=batch.member,
    )


def seal_batch(work: Work, batch: str) -> bool:
    row = batch_row(work, batch)
    if row is None:
        raise UnknownBatch(batch)
    if row["sealed"]:
        return False
    work.run("seal_batch", id=batch)
    if not row["live"]:
        _finish(work, batch)
    return True


def step_batch(work: Work, batch: str, member: Member, seq: int) -> None:
    """One member has ended (B1); what was put before its batch was removed steps none that came after."""
    before = batch_row(work, batch)
    if before is None or removals.was_removed(work, f"batch:{batch}", seq):
        return
    work.run("step_batch", id=batch, state=member.state)
    work.run(
        "add_member",
        batch=batch,
        member=member.member,
        id=member.id,
        seq=seq,
        state=member.state,
        result=member.result,
        reason=member.reason,
    )
    if member.state is not State.DONE and not before["dead"] + before["cancelled"]:
        held = batch_of(before)
        emit(work, callbacks(held, BatchState.IN_PROGRESS, first_failure=True, finished=False))
    if before["sealed"] and batch_row(work, batch)["live"] == 0:
        _finish(work, batch)


def _finish(work: Work, batch: str) -> None:
    row = batch_row(work, batch)
    held = batch_of(row)
    state = batch_state_of(row)
    keep_us = work.now_us + held.keep_for_ms * 1000
    work.run("finish_batch", id=batch, finished_us=work.now_us, keep_us=keep_us)
    emit(work, callbacks(held, state, first_failure=False, finished=True))
    if row["parent"] is not None:
        ended = State.DONE if state is BatchState.SUCCESS else State.DEAD
        step_batch(work, row["parent"], Member(held.member, held.id, ended), work.back(0))
    if held.keep_for_ms == 0:
        remove_batch(work, batch)


def remove_batch(work: Work, batch: str, *, limit: int = BITE) -> None:
    """The batch goes, with a bite of its members; those that live step nothing any more."""
    row = batch_row(work, batch)
    work.run("remove_batch", id=batch)
    if row["finished_us"] is None and row["parent"] is not None:
        step_batch(work, row["parent"], Member(row["member"], batch, State.CANCELLED), work.back(0))
    removal = removals.begin(work, f"batch:{batch}", cancels=False)
    gone, more = removals.forget_members(work, batch, removal.upto, limit)
    removals.go_on(work, removal, gone, more=more)

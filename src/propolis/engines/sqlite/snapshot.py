"""What is read from the file without changing it."""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Callable
from itertools import islice
from operator import itemgetter
from typing import Any

from propolis.core.batch import BatchStatus
from propolis.core.clock import EPOCH, moment
from propolis.core.job import JobInfo, Member, State
from propolis.core.limits import rate_in
from propolis.core.protocols import COUNTED, Counts, Filter, Page, Rule, Scope, Tokens
from propolis.engines.sqlite.rows import (
    SQL,
    archived_info,
    are_sound,
    batch_of,
    batch_state_of,
    live_info,
    one,
    one_or_none,
)
from propolis.engines.sqlite.steps.work import TALLIES

_ALL = (1 << 63) - 1
# What tells how far a search goes, the search, its values, and what it finds
Source = tuple[str, str, dict[str, Any], Callable[[Any], JobInfo]]


class Snapshot:
    """The file as it is at one moment, for those who only read."""

    def __init__(self, db: sqlite3.Connection, now_us: int) -> None:
        self.db = db
        self.now_us = now_us

    def rows(self, statement: str, **values: Any) -> list[Any]:
        cursor = self.db.execute(SQL[statement], values)
        cursor.row_factory = sqlite3.Row
        return cursor.fetchall()

    def queues(self, limit: int, after: str | None) -> dict[str, Counts]:
        found = {}
        for row in self.rows("tally_page", after=after or "", most=limit):
            queue, *numbers = row
            counts = dict(zip(TALLIES, numbers, strict=True))
            due = one(self.db, "count_due", queue=queue, now_us=self.now_us, most=COUNTED)
            counts["scheduled"] -= due
            counts["ready"] += due
            found[queue] = Counts(**counts, more=due == COUNTED)
        return found

    def get(self, job_id: str) -> JobInfo | None:
        for row in self.rows("get_live", id=job_id):
            return live_info(row)
        for row in self.rows("archived_job", id=job_id):
            return archived_info(row)
        return None

    def find(self, where: Filter, limit: int, after: int) -> Page:
        """Of each table it reads a bite at most: then the page may be short, and it goes on after it."""
        wanted = {"queue": where.queue, "task": where.task, "batch": where.batch, "after": after}
        sources = self._sources(where, wanted)
        bites = [one_or_none(self.db, bite, after=after, most=COUNTED) for bite, _, _, _ in sources]
        upto = min((bite for bite in bites if bite is not None), default=None)
        found: list[tuple[int, JobInfo]] = []
        for _, statement, values, info in sources:
            rows = self.rows(statement, **values, upto=_ALL if upto is None else upto, most=limit + 1)
            found += [(row["seq"], info(row)) for row in rows]
        found.sort(key=lambda pair: pair[0])
        page = found[:limit]
        if len(found) > limit:
            upto = page[-1][0]
        return Page([record for _, record in page], upto)

    def _sources(self, where: Filter, wanted: dict[str, Any]) -> list[Source]:
        sources: list[Source] = []
        if where.reason is None and where.state is State.RUNNING and not where.scheduled:
            sources.append(("bite_of_running", "find_running", wanted, live_info))
        if where.reason is None and where.state in (None, State.READY):
            more: dict[str, Any] = {
                "waiting": where.state,
                "scheduled": where.scheduled,
                "now_us": self.now_us,
            }
            sources.append(("bite_of_jobs", "find_live", {**wanted, **more}, live_info))
        if where.scheduled is not True and (where.state is None or where.state.terminal):
            more = {"state": where.state, "reason": where.reason}
            sources.append(("bite_of_archived", "find_archived", {**wanted, **more}, archived_info))
        return sources

    def position(self, job_id: str) -> int | None:
        """At most `COUNTED`."""
        for row in self.rows("place_of", id=job_id):
            if row["apart"] or row["due_us"] > self.now_us:
                return None
            return int(one(self.db, "before_in_line", **dict(row), now_us=self.now_us, most=COUNTED))
        return None

    def tokens(self, rule: Rule, name: str) -> Tokens:
        rate = rate_in(rule)
        scope = Scope.KEY if rule.scope is Scope.TASK_KEY else rule.scope
        full_us = 0
        for row in self.rows("busy_with", scope=scope, name=name):
            full_us = row["full_us"] if are_sound((row["full_us"],)) else 0
        return rate.tokens(full_us, self.now_us)

    def batch(self, batch: str) -> BatchStatus | None:
        for row in self.rows("batch_row", id=batch):
            return self._status(row)
        return None

    def batches(self, limit: int, after: str | None) -> list[BatchStatus]:
        return [self._status(row) for row in self.rows("batch_page", after=after, most=limit)]

    def _status(self, row: Any) -> BatchStatus:
        """Only among `COUNTED` live members are those that run, or have run before, told from the rest."""
        [(retrying, running)] = self.rows("live_members_by_kind", batch=row["id"], most=COUNTED)
        running = (running or 0) + one(self.db, "live_children", batch=row["id"], most=COUNTED)
        opened = batch_of(row)
        return BatchStatus(
            id=row["id"],
            state=batch_state_of(row),
            sealed=bool(row["sealed"]),
            total=row["live"] + row["done"] + row["dead"] + row["cancelled"],
            enqueued=max(0, row["live"] - (retrying or 0) - running),
            retrying=retrying or 0,
            running=running,
            done=row["done"],
            dead=row["dead"],
            cancelled=row["cancelled"],
            created_at=moment(row["created_us"]) or EPOCH,
            finished_at=moment(row["finished_us"]),
            keep_until=moment(row["keep_us"]),
            parent=opened.parent,
            note=opened.note,
        )

    def members(self, batch: str, limit: int, after: int | None) -> list[Member]:
        if not self.rows("batch_row", id=batch):
            return []
        wanted = {"batch": batch, "after": -1 if after is None else after, "most": limit}
        kinds = ("ended_members", "live_members", "live_nested")
        rows = heapq.merge(*(map(tuple, self.rows(kind, **wanted)) for kind in kinds), key=itemgetter(0, 1))
        return [
            Member(number, job_id, State(state), result, reason)
            for number, job_id, state, result, reason in islice(rows, limit)
        ]

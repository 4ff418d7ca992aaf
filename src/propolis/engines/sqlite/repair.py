"""What is not as it should be in the tables, and how it is mended.

All of it is read in one snapshot, which nobody waits for.  Then each part is mended in transactions of a few
rows, which see for themselves that it is still so.  By how much a counter is wrong does not change meanwhile.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from propolis.engines.sqlite.rows import text_of
from propolis.engines.sqlite.steps.batches import seal_batch
from propolis.engines.sqlite.steps.work import Work

BITE = 1000  # rows that are mended in one transaction
PLACES = ("ready", "scheduled", "held", "parked", "running")
ENDS = ("done", "dead", "cancelled")


Values = dict[str, Any]
Fault = tuple[str, Values]  # the sentence, and what mends it
Find = Callable[[sqlite3.Connection], list[Fault]]
Mend = Callable[[list[Values], Work], None]
Read = Callable[[Find], Awaitable[list[Fault]]]
Write = Callable[[Callable[[Work], None]], Awaitable[None]]


async def repair(read: Read, write: Write, *, mend: bool) -> list[str]:
    """A sentence for each fault; `mend`: none of them is left."""
    sentences: list[str] = []
    for find, act in _PARTS:
        faults = await read(find)
        sentences += [sentence for sentence, _ in faults]
        for first in range(0, len(faults) if mend else 0, BITE):
            await write(partial(act, [values for _, values in faults[first : first + BITE]]))
    return sentences


def _places(db: sqlite3.Connection, places: Iterable[str] = PLACES) -> list[str]:
    """Those of these tables that this file has."""
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return [place for place in places if f"propolis_{place}" in names]


# --- jobs without a place, and places without a job --------------------------------------------


def _nowhere(db: sqlite3.Connection, seqs: str | None = None) -> list[Fault]:
    placed = " UNION ALL ".join(f"SELECT seq FROM propolis_{place}" for place in _places(db))
    rows = db.execute(
        f"SELECT seq, id, queue FROM propolis_job WHERE seq NOT IN ({placed}) "
        f"AND (:seqs IS NULL OR seq IN (SELECT value FROM json_each(:seqs))) ORDER BY seq",
        {"seqs": seqs},
    )
    return [(f"job {id} of queue {queue} stood nowhere", {"seq": seq}) for seq, id, queue in rows]


def _place(bite: list[Values], work: Work) -> None:
    """To the backs of their lines, or to wait for their times."""
    for _, values in _nowhere(work.db, text_of([values["seq"] for values in bite])):
        values = {**values, "pos": work.back(), "now_us": work.now_us}
        work.db.execute("UPDATE propolis_job SET pos = :pos WHERE seq = :seq", values)
        work.db.execute(
            "INSERT INTO propolis_ready (queue, priority, pos, seq) "
            "SELECT queue, priority, pos, seq FROM propolis_job WHERE seq = :seq AND due_us <= :now_us",
            values,
        )
        work.db.execute(
            "INSERT INTO propolis_scheduled (queue, due_us, seq) "
            "SELECT queue, due_us, seq FROM propolis_job WHERE seq = :seq AND due_us > :now_us",
            values,
        )
        for table in _places(work.db, ["expiring"]):
            work.db.execute(
                f"INSERT OR IGNORE INTO propolis_{table} (expires_us, seq) "
                f"SELECT expires_us, seq FROM propolis_job WHERE seq = :seq AND expires_us IS NOT NULL",
                values,
            )
    work.woken.add(None)


def _empty_places(db: sqlite3.Connection) -> list[Fault]:
    found: list[Fault] = []
    for place in _places(db):
        rows = db.execute(f"SELECT seq FROM propolis_{place} WHERE seq NOT IN (SELECT seq FROM propolis_job)")
        found += [
            (f"a place among the {place} jobs was that of no job", {"place": place, "seq": seq})
            for (seq,) in rows
        ]
    return found


def _clear_places(bite: list[Values], work: Work) -> None:
    for place in {values["place"] for values in bite}:
        seqs = text_of([values["seq"] for values in bite if values["place"] == place])
        work.db.execute(
            f"DELETE FROM propolis_{place} WHERE seq IN (SELECT value FROM json_each(?)) "
            f"AND seq NOT IN (SELECT seq FROM propolis_job)",
            [seqs],
        )


# --- unique keys, batches and counters ---------------------------------------------------------


def _orphaned_keys(db: sqlite3.Connection) -> list[Fault]:
    rows = db.execute("SELECT key, id FROM propolis_unique_key WHERE id NOT IN (SELECT id FROM propolis_job)")
    return [(f"the unique key {key!r} was held by job {id}, which is gone", {"key": key}) for key, id in rows]


def _free_keys(bite: list[Values], work: Work) -> None:
    work.db.executemany(
        "DELETE FROM propolis_unique_key WHERE key = :key "
        "AND NOT EXISTS (SELECT 1 FROM propolis_job AS j WHERE j.id = propolis_unique_key.id)",
        bite,
    )


_LIVE = """
SELECT b.id, b.live, b.sealed,
       (SELECT count(*) FROM propolis_job AS j WHERE j.batch = b.id AND NOT j.stepped)
     + (SELECT count(*) FROM propolis_batch AS c WHERE c.parent = b.id AND c.finished_us IS NULL)
  FROM propolis_batch AS b WHERE b.finished_us IS NULL
"""


def _wrong_batches(db: sqlite3.Connection) -> list[Fault]:
    return [
        (f"batch {id} counted {live} members to come, and {there} are there", {"batch": id})
        for id, live, _, there in db.execute(_LIVE)
        if live != there
    ]


def _recount_batches(bite: list[Values], work: Work) -> None:
    """Where nobody is left, a batch ends and calls back."""
    for values in bite:
        for id, live, sealed, there in work.db.execute(f"{_LIVE} AND b.id = :batch", values).fetchall():
            if live != there:
                work.db.execute("UPDATE propolis_batch SET live = ?, sealed = 0 WHERE id = ?", [there, id])
                if sealed:
                    seal_batch(work, id)


def _wrong_counters(db: sqlite3.Connection) -> list[Fault]:
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(propolis_tally)")]
    counted = {column: _counted(db, column) for column in columns if column in (*PLACES, *ENDS)}
    counted["put - deleted"] = _sums(db, ["job", "archive"])
    found: list[Fault] = []
    for what, there in counted.items():
        counters = dict(db.execute(f"SELECT queue, {what} FROM propolis_tally"))
        for queue in sorted({*counters, *there}):
            wrong = counters.get(queue, 0) - there.get(queue, 0)
            if wrong:
                found.append(
                    (
                        f"queue {queue} counted {counters.get(queue, 0)} jobs ({what}), and "
                        f"{there.get(queue, 0)} are there",
                        {"queue": queue, "what": what, "wrong": wrong},
                    )
                )
    return found


def _counted(db: sqlite3.Connection, column: str) -> dict[str, int]:
    if column in ENDS:
        ended = "SELECT queue, count(*) FROM propolis_archive WHERE state = ? GROUP BY queue"
        return dict(db.execute(ended, [column]))
    return dict(
        db.execute(
            f"SELECT j.queue, count(*) FROM propolis_{column} AS p JOIN propolis_job AS j USING (seq) "
            f"GROUP BY j.queue"
        )
    )


def _sums(db: sqlite3.Connection, tables: Iterable[str]) -> dict[str, int]:
    every = " UNION ALL ".join(f"SELECT queue FROM propolis_{table}" for table in tables)
    return dict(db.execute(f"SELECT queue, count(*) FROM ({every}) GROUP BY queue"))


def _correct_counters(bite: list[Values], work: Work) -> None:
    columns = [name for _, name, *_ in work.db.execute("PRAGMA table_info(propolis_tally)")]
    zeros = ", ".join("0" for _ in columns[1:])  # the first is the queue
    for values in bite:
        column = "put" if values["what"] == "put - deleted" else values["what"]
        work.db.execute(f"INSERT OR IGNORE INTO propolis_tally VALUES (:queue, {zeros})", values)
        work.db.execute(
            f"UPDATE propolis_tally SET {column} = {column} - :wrong WHERE queue = :queue", values
        )


_PARTS: tuple[tuple[Find, Mend], ...] = (
    (_nowhere, _place),
    (_empty_places, _clear_places),
    (_orphaned_keys, _free_keys),
    (_wrong_batches, _recount_batches),
    (_wrong_counters, _correct_counters),
)

"""The same sum of squares by message passing alone: the answer to a question that haskell-bee leaves open.

    propolis worker star_map_messages:app &
    python star_map_messages.py 50

Its authors ask whether "reduce" can be done by passing messages only.  It can.  There is no batch here, no
table, and nobody waits for all the others: there are only jobs that emit jobs.

A *partial* is what is known of some of the members: {member: value}.  Two partials make a larger one, their
union; the partial that has all members reports the result.  A union is the same in any order and any number
of times, so it does no harm if a partial is there twice.  That no member is lost follows from two rules:

1. Two partials that meet both emit their union, under one id that follows from its members.  Each emission
   is put in the step that ends its job, so a partial goes only when a larger one is there; and the second
   emission of the two is left out.
2. A partial that meets another one which has all of its members, and more, ends and emits nothing.

So at any time each member is in some partial that is there.  (An id that is taken belongs to a partial with
the same members, which is there, or has gone by one of the two rules.)  A partial that was killed while its
partner was settled comes back as an orphan; it ends when it meets a larger partial, or sees the report.

To meet, two partials must run at the same time in one process: a worker needs at least two slots.  The
payload grows with the number of members, so this is for hundreds of them; a flow is the better way, and for
any number.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys

from propolis import App, Job, Snooze
from propolis.contract import derive_id, new_id

app = App(os.environ.get("PROPOLIS_URL", "sqlite:///star_map.db"))

Partial = dict[int, int]

WAIT = 0.05  # seconds for a partner to come along
NOT_GIVEN_UP = 1000  # crashes: a partial may be all that there is of its members


def report_id(run: str) -> str:
    return derive_id("star_map", run, "report")


def partial_id(run: str, members: Partial) -> str:
    return derive_id("star_map", run, *sorted(members))


class Meeting:
    """Where two partials of this process meet: one waits, the next one finds it, and each gets the other."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Partial, asyncio.Future[Partial]]] = {}

    async def partner(self, run: str, mine: Partial) -> Partial | None:
        found = self._waiting.pop(run, None)
        if found is not None and not found[1].done():
            found[1].set_result(mine)
            return found[0]
        arrival: asyncio.Future[Partial] = asyncio.get_running_loop().create_future()
        place = self._waiting[run] = (mine, arrival)
        try:
            async with asyncio.timeout(WAIT):
                return await arrival
        except TimeoutError:
            return None
        finally:
            if self._waiting.get(run) is place:
                del self._waiting[run]


meeting = Meeting()


@app.task(name="messages.star_map", max_crashes=NOT_GIVEN_UP)
async def star_map(job: Job, run: str, count: int) -> None:
    for x in range(1, count + 1):
        job.emit(square_map, run, count, x)


@app.task(name="messages.square_map", max_crashes=NOT_GIVEN_UP)
async def square_map(job: Job, run: str, count: int, x: int) -> None:
    partial = {x: x * x}
    job.emit(merge.using(job_id=partial_id(run, partial)), run, count, partial)


@app.task(name="messages.merge", max_crashes=NOT_GIVEN_UP)
async def merge(job: Job, run: str, count: int, partial: Partial) -> Snooze | None:
    if len(partial) == count:
        job.emit(report.using(job_id=report_id(run)), sum(partial.values()))
        return None
    if await app.jobs.aget(report_id(run)) is not None:
        return None
    if job.lease.crashes:
        # Under suspicion it would run alone, where nobody comes along: a fresh copy goes on.
        job.emit(merge, run, count, partial)
        return None
    other = await meeting.partner(run, partial)
    if other is None or other.keys() <= partial.keys():
        return Snooze(random.uniform(0, WAIT))
    if partial.keys() < other.keys():
        return None
    union = partial | other
    job.emit(merge.using(job_id=partial_id(run, union)), run, count, union)
    return None


@app.task(name="messages.report", result_ttl="1d", max_crashes=NOT_GIVEN_UP)
async def report(total: int) -> int:
    return total


def sum_of_squares(count: int) -> str:
    """Start it; returns the id of the job that will have the result."""
    run = new_id()
    star_map.enqueue(run, count)
    return report_id(run)


async def result_of(job_id: str) -> int:
    while (record := await app.jobs.aget(job_id)) is None or record.result is None:
        await asyncio.sleep(WAIT)
    return int(record.result)


if __name__ == "__main__":
    print(app.client.wait(result_of(sum_of_squares(int(sys.argv[1]) if len(sys.argv) > 1 else 50))))
    app.close()

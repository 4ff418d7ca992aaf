"""The steps that most tests take, so that a test shows only what it is about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from skep.batch import Batch, BatchStatus, callback_id
from skep.broker import Counts, Engine, Filter
from skep.job import Dead, Done, Job, Lease, Outcome, Record, new_id
from skep.testing.clock import FakeClock
from skep.testing.make import HOLDER, SPAN, a_job

OpenEngine = Callable[[], Engine]
Another = Callable[[], Awaitable[Engine]]

A_MOMENT = timedelta(milliseconds=1)
HOUR = timedelta(hours=1)
ALL = 1000
DEAD = Dead()


async def put_one(engine: Engine, *args: object, **facts: Any) -> Job:
    job = a_job(*args, **facts)
    [receipt] = await engine.put([job])
    assert receipt.created
    return job


async def put_some(engine: Engine, count: int, **facts: Any) -> list[str]:
    """Put jobs in one call and give their ids."""
    jobs = [a_job(number, **facts) for number in range(count)]
    await engine.put(jobs)
    return [job.id for job in jobs]


async def take(
    engine: Engine,
    queue: str = "default",
    *,
    limit: int = ALL,
    span: timedelta = SPAN,
    holder: str = HOLDER,
) -> list[Lease]:
    return await engine.lease({queue: limit}, span=span, holder=holder)


async def take_one(
    engine: Engine, queue: str = "default", *, span: timedelta = SPAN, holder: str = HOLDER
) -> Lease:
    [lease] = await take(engine, queue, limit=1, span=span, holder=holder)
    return lease


async def order(engine: Engine, queue: str = "default") -> list[str]:
    """Lease everything and give the ids, first to last."""
    return [lease.id for lease in await take(engine, queue)]


async def settle_one(engine: Engine, lease: Lease, outcome: Outcome) -> None:
    assert await engine.settle([(lease, outcome)]) == []


async def lose_leases(engine: Engine, clock: FakeClock, span: timedelta = SPAN) -> None:
    """Nobody renews anything, and somebody sweeps."""
    clock.advance(span)
    await engine.sweep()


async def look(engine: Engine, job_id: str) -> Record:
    record = await engine.get(job_id)
    assert record is not None
    return record


async def counts(engine: Engine, queue: str = "default") -> Counts:
    return (await engine.queues()).get(queue, Counts())


async def found(engine: Engine, **where: Any) -> list[str]:
    """The ids of the jobs that match."""
    return [record.id for record in (await engine.find(Filter(**where), limit=ALL)).records]


async def a_done_job(engine: Engine, *, keep: timedelta | None = HOUR, **facts: Any) -> Job:
    job = await put_one(engine, **facts)
    await settle_one(engine, await take_one(engine, job.queue), Done(keep=keep))
    return job


async def a_dead_job(engine: Engine, outcome: Outcome = DEAD, **facts: Any) -> Job:
    job = await put_one(engine, **facts)
    await settle_one(engine, await take_one(engine, job.queue), outcome)
    return job


async def a_cancelled_job(engine: Engine, **facts: Any) -> Job:
    job = await put_one(engine, **facts)
    assert await engine.cancel([job.id]) == [True]
    return job


CALLBACKS = "callbacks"  # the queue in which they are looked for


def a_batch(**facts: Any) -> Batch:
    """A batch with all three callbacks; any field of `Batch` may be given by name."""
    facts.setdefault("id", new_id())
    for when in ("on_finished", "on_succeeded", "on_failed"):
        facts.setdefault(when, a_callback(facts["id"], when))
    return Batch(**facts)


def a_callback(batch: str, when: str) -> Job:
    return a_job(id=callback_id(batch, when), task=f"tests.{when}", queue=CALLBACKS, chosen=True)


def members_of(batch: Batch, count: int, **facts: Any) -> list[Job]:
    return [a_job(number, batch=batch.id, member=number, **facts) for number in range(count)]


async def called_back(engine: Engine) -> list[str]:
    """The tasks of all callbacks that were ever put and not forgotten, in their order."""
    page = await engine.find(Filter(queue=CALLBACKS), limit=ALL)
    return [record.task.removeprefix("tests.") for record in page.records]


async def status(engine: Engine, batch: str) -> BatchStatus:
    found = await engine.batch(batch)
    assert found is not None
    return found

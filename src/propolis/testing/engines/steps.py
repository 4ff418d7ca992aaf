"""The steps that most tests take, so that a test shows only what it is about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus, callback_id
from propolis.core.envelope import Envelope
from propolis.core.ids import new_id
from propolis.core.job import Dead, Done, JobInfo, Lease, Outcome
from propolis.core.protocols import Counts, Engine, Filter, Note, Rule
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

OpenEngine = Callable[[], Engine]
Another = Callable[[], Awaitable[Engine]]


A_MOMENT = timedelta(milliseconds=1)
HOUR = timedelta(hours=1)
ALL = 1000
DEAD = Dead()


async def put_one(engine: Engine, *args: object, **fields: Any) -> Envelope:
    job = a_job(*args, **fields)
    [receipt] = await engine.put([job])
    assert receipt.created
    return job


async def put_some(engine: Engine, count: int, **fields: Any) -> list[str]:
    """Put jobs in one call and give their ids."""
    jobs = [a_job(number, **fields) for number in range(count)]
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


def bare(rules: Sequence[Rule]) -> list[Rule]:
    """Without who set them, when, why and until."""
    return [replace(rule, by="", why="", at=None, until=None) for rule in rules]


async def lose_leases(engine: Engine, clock: FakeClock, span: timedelta = SPAN) -> None:
    """Nobody renews anything, and somebody sweeps."""
    clock.advance(span)
    await engine.sweep()


async def lose_a_run(engine: Engine, clock: FakeClock, span: timedelta = SPAN) -> Lease:
    """The next job of the default queue begins, and its worker is never heard of again."""
    lease = await take_one(engine, span=span)
    assert await engine.note([Note(lease, began=True)]) == []
    await lose_leases(engine, clock, span)
    return lease


async def info_of(engine: Engine, job_id: str) -> JobInfo:
    info = await engine.get(job_id)
    assert info is not None
    return info


async def counts(engine: Engine, queue: str = "default") -> Counts:
    return (await engine.queues()).get(queue, Counts())


async def found(engine: Engine, **where: Any) -> list[str]:
    """The ids of the jobs that match."""
    return [info.id for info in (await engine.find(Filter(**where), limit=ALL)).jobs]


async def a_done_job(engine: Engine, *, keep: timedelta | None = HOUR, **fields: Any) -> Envelope:
    job = await put_one(engine, **fields)
    await settle_one(engine, await take_one(engine, job.queue), Done(keep=keep))
    return job


async def a_dead_job(engine: Engine, outcome: Outcome = DEAD, **fields: Any) -> Envelope:
    job = await put_one(engine, **fields)
    await settle_one(engine, await take_one(engine, job.queue), outcome)
    return job


async def a_cancelled_job(engine: Engine, **fields: Any) -> Envelope:
    job = await put_one(engine, **fields)
    assert await engine.cancel([job.id]) == [True]
    return job


CALLBACKS = "callbacks"  # the queue in which they are looked for


def a_batch(**fields: Any) -> Batch:
    """A batch with all three callbacks; any field of `Batch` may be given by name."""
    fields.setdefault("id", new_id())
    for when in ("on_finished", "on_succeeded", "on_failed"):
        fields.setdefault(when, a_callback(fields["id"], when))
    return Batch(**fields)


def a_callback(batch: str, when: str) -> Envelope:
    return a_job(id=callback_id(batch, when), task=f"tests.{when}", queue=CALLBACKS, chosen=True)


def members_of(batch: Batch, count: int, **fields: Any) -> list[Envelope]:
    return [a_job(number, batch=batch.id, member=number, **fields) for number in range(count)]


async def called_back(engine: Engine) -> list[str]:
    """The tasks of all callbacks that were ever put and not forgotten, in their order."""
    page = await engine.find(Filter(queue=CALLBACKS), limit=ALL)
    return [info.task.removeprefix("tests.") for info in page.jobs]


async def status(engine: Engine, batch: str) -> BatchStatus:
    found = await engine.batch(batch)
    assert found is not None
    return found


async def a_batch_of(engine: Engine, count: int, *, seal: bool = True) -> Batch:
    """A batch with all callbacks and this many members, put on the default queue."""
    batch = a_batch()
    await engine.put_batch(batch, members_of(batch, count), seal=seal)
    return batch


async def end_next(engine: Engine, *outcomes: Outcome) -> None:
    for outcome in outcomes:
        await settle_one(engine, await take_one(engine), outcome)

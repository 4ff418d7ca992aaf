"""The calls whose cost is measured.  Each prepares what it needs, gives the call, and clears up afterwards.

A verb takes ten of what it takes, so that what it costs per job is seen beside what it costs per call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

from propolis.core.batch import Batch
from propolis.core.job import (
    Broken,
    Crashed,
    Dead,
    Done,
    Error,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import Feeds, Filter, Note, Records, Rule, RuleKind, Scope
from propolis.core.records import Change, Swap
from propolis.testing.engines.costs.stages import BATCH, CROWD, HOLDER, KIND, LONG, OTHER_BATCH, Stage
from propolis.testing.engines.samples import a_job

Call = Callable[[], Awaitable[object]]
Verb = Callable[[Stage], AsyncIterator[Call]]
TEN = 10
EARLIER = timedelta(hours=-1)


async def put(stage: Stage) -> AsyncIterator[Call]:
    jobs = stage.jobs(TEN)
    yield lambda: stage.engine.put(jobs)


async def put_unique(stage: Stage) -> AsyncIterator[Call]:
    """With a token, chosen ids and a key that is taken."""
    number = next(stage.numbers)
    jobs = [a_job(queue=CROWD, unique="known", chosen=True), a_job(queue=CROWD, unique=f"new-{number}")]
    yield lambda: stage.engine.put(jobs, token=f"new-{number}")


async def put_batch(stage: Stage) -> AsyncIterator[Call]:
    batch = Batch(id=f"new-{next(stage.numbers)}")
    jobs = [a_job(queue=CROWD, batch=batch.id, member=number) for number in range(TEN)]
    yield lambda: stage.engine.put_batch(batch, jobs)


async def lease(stage: Stage) -> AsyncIterator[Call]:
    await stage.put(stage.jobs(TEN))
    yield lambda: stage.engine.lease({CROWD: TEN}, span=LONG, holder=HOLDER)


async def lease_of_many(stage: Stage) -> AsyncIterator[Call]:
    """Where most of what is wanted is not there."""
    await stage.put(stage.jobs(TEN))
    wants = {CROWD: 1, "due": 100, "expired": 100, "lost": 100, "empty": 100}
    yield lambda: stage.engine.lease(wants, span=LONG, holder=HOLDER, limit=100)


async def lease_nothing(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.lease({"empty": TEN}, span=LONG, holder=HOLDER)


async def exchange(stage: Stage) -> AsyncIterator[Call]:
    done = [(each, Done()) for each in stage.running[-TEN:]]
    del stage.running[-TEN:]
    await stage.put(stage.jobs(TEN))
    yield lambda: stage.engine.exchange(done, {CROWD: TEN}, span=LONG, holder=HOLDER)


def settling(outcome: Outcome) -> Verb:
    async def settle(stage: Stage) -> AsyncIterator[Call]:
        await stage.put(stage.jobs(TEN, queue="settling"))
        ended = [(each, outcome) for each in await stage.take("settling", TEN)]
        yield lambda: stage.engine.settle(ended)
        await stage.engine.cancel([each.id for each, _ in ended])

    return settle


async def settle_member(stage: Stage) -> AsyncIterator[Call]:
    jobs = [a_job(queue="settling", batch=BATCH, member=next(stage.members)) for _ in range(TEN)]
    await stage.put(jobs)
    ended = [(each, Done(result=b"1")) for each in await stage.take("settling", TEN)]
    yield lambda: stage.engine.settle(ended)


async def renew(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.renew(stage.running[:TEN], span=LONG)


async def note(stage: Stage) -> AsyncIterator[Call]:
    notes = [Note(each, lines=("a line",), began=True) for each in stage.running[:TEN]]
    yield lambda: stage.engine.note(notes)


async def sweep(stage: Stage) -> AsyncIterator[Call]:
    """At least as much as is lost, due or expired at the small size."""
    yield lambda: stage.engine.sweep(limit=100)


async def cancel(stage: Stage) -> AsyncIterator[Call]:
    jobs = stage.jobs(TEN)
    await stage.put(jobs)
    yield lambda: stage.engine.cancel([job.id for job in jobs])


async def cancel_running(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.cancel([each.id for each in stage.running[:TEN]])


async def reschedule(stage: Stage) -> AsyncIterator[Call]:
    [job] = jobs = stage.jobs(1)
    await stage.put(jobs)
    yield lambda: stage.engine.reschedule(job.id, stage.clock.now + LONG)


async def replay(stage: Stage) -> AsyncIterator[Call]:
    ids = [stage.dead.pop()]
    yield lambda: stage.engine.replay(ids)


async def delete(stage: Stage) -> AsyncIterator[Call]:
    ids = [stage.dead.pop()]
    yield lambda: stage.engine.delete(ids)


async def get(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.get(stage.known.id)


def finding(where: Filter) -> Verb:
    async def find(stage: Stage) -> AsyncIterator[Call]:
        yield lambda: stage.engine.find(where, limit=TEN)

    return find


async def queues(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.queues()


async def position(stage: Stage) -> AsyncIterator[Call]:
    [job] = jobs = stage.jobs(1, priority=-1)
    await stage.put(jobs)
    yield lambda: stage.engine.position(job.id)


async def rules(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.rules(limit=TEN)


async def pause_and_lease(stage: Stage) -> AsyncIterator[Call]:
    """L5.1: a paused queue is skipped."""
    rule = Rule(RuleKind.PAUSE, Scope.QUEUE, CROWD)

    async def call() -> None:
        await stage.engine.add_rule(rule)
        await stage.engine.lease({CROWD: TEN}, span=LONG, holder=HOLDER)
        await stage.engine.remove_rule(rule.kind, rule.scope, rule.name)

    yield call


async def pause_task_and_lease(stage: Stage) -> AsyncIterator[Call]:
    """L5.2: what a paused task keeps back is set aside in bites."""
    rule = Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo")

    async def call() -> None:
        await stage.engine.add_rule(rule)
        await stage.engine.lease({CROWD: TEN}, span=LONG, holder=HOLDER)

    yield call
    await stage.engine.remove_rule(rule.kind, rule.scope, rule.name)


async def limit_task(stage: Stage) -> AsyncIterator[Call]:
    """What runs already counts from the first moment on."""
    rule = Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 10**9)

    async def call() -> None:
        await stage.engine.add_rule(rule)
        await stage.engine.remove_rule(rule.kind, rule.scope, rule.name)

    yield call


async def batch(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.batch(BATCH)


async def seal(stage: Stage) -> AsyncIterator[Call]:
    batch = Batch(id=f"sealed-{next(stage.numbers)}")
    await stage.engine.put_batch(batch, seal=False)
    yield lambda: stage.engine.seal(batch.id)


async def batches(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.batches(limit=TEN)


def paging(after: int | None) -> Verb:
    async def members(stage: Stage) -> AsyncIterator[Call]:
        """L5.12."""
        yield lambda: stage.engine.members(OTHER_BATCH, limit=TEN, after=after)

    return members


async def swap(stage: Stage) -> AsyncIterator[Call]:
    assert isinstance(stage.engine, Records)
    engine = stage.engine
    number = next(stage.numbers)
    change = Change(kind=KIND, name=f"new-{number}", value=b"{}", at=stage.clock.now + EARLIER)
    yield lambda: engine.swap([Swap(changes=(change,), puts=tuple(stage.jobs(1)))], token=f"swap-{number}")


async def records(stage: Stage) -> AsyncIterator[Call]:
    assert isinstance(stage.engine, Records)
    engine = stage.engine
    yield lambda: engine.records(KIND, after="000000000", limit=TEN)


async def records_due(stage: Stage) -> AsyncIterator[Call]:
    assert isinstance(stage.engine, Records)
    engine = stage.engine
    yield lambda: engine.records(KIND, due=True, limit=TEN)


async def publish(stage: Stage) -> AsyncIterator[Call]:
    assert isinstance(stage.engine, Feeds)
    engine = stage.engine
    yield lambda: engine.publish("feed", [b"one"])


async def follow(stage: Stage) -> AsyncIterator[Call]:
    assert isinstance(stage.engine, Feeds)
    engine = stage.engine
    yield lambda: engine.follow({"feed": 0}, limit=TEN)


async def drop(stage: Stage) -> AsyncIterator[Call]:
    """L5.3, a bite of it; at the end, since it takes away what the others need."""
    yield lambda: stage.engine.drop(CROWD)


async def delete_batch(stage: Stage) -> AsyncIterator[Call]:
    yield lambda: stage.engine.delete_batch(OTHER_BATCH)


VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (
        *[put, put_unique, put_batch, lease_nothing, lease, lease_of_many, exchange, renew, note],
        *[settle_member, cancel, cancel_running, reschedule, replay, delete, get, rules],
        *[batch, seal, swap, records, records_due, publish, follow, pause_and_lease, limit_task, sweep],
    )
} | {
    "settle_done": settling(Done()),
    "settle_kept": settling(Done(result=b"1", keep=LONG)),
    "settle_dead": settling(Dead()),
    "settle_retried": settling(Retried()),
    "settle_snoozed": settling(Snoozed(LONG)),
    "settle_released": settling(Released()),
    "settle_crashed": settling(Crashed(Error("ProcessDied", "so"))),
    "settle_unknown": settling(Unknown()),
    "settle_broken": settling(Broken(Error("BrokenPayload", "so"))),
    "members": paging(None),
    "members_after": paging(300),
}
# They take away what the others need: so they come last, once each.
LAST: dict[str, Verb] = {verb.__name__: verb for verb in (pause_task_and_lease, delete_batch, drop)}
# They count or filter up to COUNTED (10,000): they stop growing there.
COUNTING: dict[str, Verb] = {
    "queues": queues,
    "batches": batches,
    "position": position,
    "find": finding(Filter(queue=CROWD)),
    "find_running": finding(Filter(state=State.RUNNING)),
    "find_dead": finding(Filter(queue=CROWD, state=State.DEAD)),
    "find_nothing": finding(Filter(task="tests.nothing")),
}

"""Storage that is full of one thing: each stage is filled once, and all verbs are measured on it.

Every stage has a little of everything, in the queue `CROWD`; what there is much of is there as well.  What
calls take bite by bite is there a bite more often than the size says: so the small stage has a whole one too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import TypeVar

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Lease, Outcome
from propolis.core.protocols import Engine, Records, Rule, RuleKind, Scope, task_key
from propolis.core.records import Change, Swap
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import a_job

CROWD = "crowd"
HELD = "tests.held"
BATCH, OTHER_BATCH = "batch", "other-batch"
KIND = "tests"
LONG = timedelta(days=1)
HOLDER = "costs"
BUNDLE = 1000
BITES = 5000  # what verbs that do a bite of it take away meanwhile
T = TypeVar("T")


class Stage:
    """An engine with what was put into it; the verbs take ids from here."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        self.engine = engine
        self.clock = clock
        self.numbers = count()
        self.members = count()
        self.known = a_job(queue=CROWD, unique="known")
        self.dead: list[str] = []
        self.running: list[Lease] = []

    def jobs(self, n: int, **fields: object) -> list[Envelope]:
        return [a_job(**{"queue": CROWD, **fields}) for _ in range(n)]

    async def put(self, jobs: Sequence[Envelope]) -> None:
        for bundle in bundles(jobs):
            await self.engine.put(bundle)

    async def take(self, queue: str, n: int) -> list[Lease]:
        found: list[Lease] = []
        while len(found) < n:
            wants = {queue: min(BUNDLE, n - len(found))}
            leases = await self.engine.lease(wants, span=LONG, holder=HOLDER)
            assert leases, f"only {len(found)} of {n} were there"
            found += leases
        return found

    async def end(self, n: int, outcome: Outcome, queue: str = "ending", **fields: object) -> list[str]:
        """Put jobs and end them, before all others."""
        await self.put(self.jobs(n, queue=queue, priority=9, **fields))
        leases = await self.take(queue, n)
        for bundle in bundles(leases):
            assert await self.engine.settle([(lease, outcome) for lease in bundle]) == []
        return [lease.id for lease in leases]

    async def add_members(self, batch: str, n: int) -> None:
        await self.put([a_job(queue=CROWD, batch=batch, member=next(self.members)) for _ in range(n)])


def bundles(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), BUNDLE):
        yield items[start : start + BUNDLE]


async def furnish(stage: Stage) -> None:
    """A little of everything, of which the verbs take what they need."""
    engine = stage.engine
    await stage.put([stage.known])
    stage.dead = await stage.end(40, Dead(keep=LONG))
    await stage.end(5, Done(keep=LONG))
    await stage.put(stage.jobs(60, queue="running"))
    stage.running = await stage.take("running", 60)
    await engine.put_batch(Batch(id=BATCH), seal=False)
    await stage.add_members(BATCH, 5)
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "elsewhere", 3))
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, CROWD, 10_000_000))


async def waiting(stage: Stage, n: int) -> None:
    await stage.put(stage.jobs(n + BUNDLE))


async def held(stage: Stage, n: int) -> None:
    """They stand before all others, and were already set aside."""
    await stage.engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, HELD))
    await stage.put(stage.jobs(n + BUNDLE, task=HELD, priority=9))
    for _ in range(n + BUNDLE):
        if await stage.engine.lease({CROWD: 100}, span=LONG, holder=HOLDER):
            return


async def limited(stage: Stage, n: int) -> None:
    """Of a hundred keys, each of which lets one run."""
    for number in range(100):
        await stage.engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"limited-{number}", 1))
    await stage.put([a_job(queue=CROWD, key=f"limited-{number % 100}") for number in range(n + BUNDLE)])


async def limited_keys(stage: Stage, n: int) -> None:
    """Each has used its rate, by a limit for all of them, and has one more job that was set aside."""
    await stage.put([a_job(queue=CROWD, key=f"each-{number % n}", priority=9) for number in range(2 * n)])
    if not hasattr(stage.engine, "tokens"):
        return
    limit = Rule(RuleKind.LIMIT, Scope.KEY, "each-*", 3, every=timedelta(hours=1))
    await stage.engine.add_rule(limit)
    await stage.take(CROWD, n)
    for _ in range(n):
        if await stage.engine.lease({CROWD: 100}, span=LONG, holder=HOLDER):
            return


async def scheduled(stage: Stage, n: int) -> None:
    await stage.put(stage.jobs(n + BUNDLE, delay_ms=10**9))


async def due(stage: Stage, n: int) -> None:
    """Their time has come, and nobody has swept yet."""
    await stage.put(stage.jobs(n + BITES, queue="due", delay_ms=1000))
    stage.clock.advance("1s")


async def expired(stage: Stage, n: int) -> None:
    await stage.put(stage.jobs(n + BITES, queue="expired", expires_in_ms=1000))
    stage.clock.advance("1s")


async def kept(stage: Stage, n: int) -> None:
    await stage.end(n // 2 + BUNDLE, Done(keep=LONG), CROWD)
    await stage.end(n // 2 + BUNDLE, Dead(keep=LONG), CROWD)


async def running(stage: Stage, n: int) -> None:
    await stage.put(stage.jobs(n, priority=9))
    await stage.take(CROWD, n)


async def lost(stage: Stage, n: int) -> None:
    """Leases that have ended, and nobody has swept yet."""
    await stage.put(stage.jobs(n + BITES, queue="lost"))
    for _ in range(0, n + BITES, BUNDLE):
        await stage.engine.lease({"lost": BUNDLE}, span=timedelta(seconds=1), holder=HOLDER)
    stage.clock.advance("1s")


async def queues(stage: Stage, n: int) -> None:
    await stage.put([a_job(queue=f"queue-{number}") for number in range(n)])


async def keys(stage: Stage, n: int) -> None:
    await stage.put(
        [a_job(queue=CROWD, key=f"key-{number}", unique=f"key-{number}") for number in range(n + BUNDLE)]
    )


async def rules(stage: Stage, n: int) -> None:
    """A tenth of the others: each is a call of its own."""
    for number in range(n // 40):
        await stage.engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, f"paused-{number}"))
        await stage.engine.add_rule(Rule(RuleKind.BLOCK, Scope.KEY, f"blocked-{number}"))
        await stage.engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, f"limited-{number}", 3))
        await stage.engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, f"capped-{number}", 3))
        of_both = task_key("tests.echo", f"paused-{number}")
        await stage.engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK_KEY, of_both, lasts=LONG))


async def records(stage: Stage, n: int) -> None:
    assert isinstance(stage.engine, Records)
    for numbers in bundles(range(n)):
        changes = tuple(
            Change(kind=KIND, name=f"{number:09}", value=b"{}", at=timedelta(days=1)) for number in numbers
        )
        await stage.engine.swap([Swap(changes=changes)])


async def members(stage: Stage, n: int) -> None:
    """Of twice as many, half have ended."""
    engine, n = stage.engine, 2 * (n + BUNDLE)
    await engine.put_batch(Batch(id=OTHER_BATCH), seal=False)
    await stage.put([a_job(queue="members", batch=OTHER_BATCH, member=number) for number in range(n // 2)])
    for bundle in bundles(await stage.take("members", n // 2)):
        await engine.settle([(lease, Done()) for lease in bundle])
    await stage.put([a_job(queue=CROWD, batch=OTHER_BATCH, member=number) for number in range(n // 2, n)])


async def tokens(stage: Stage, n: int) -> None:
    """Ids that are known for a day, and a hundredth of tokens."""
    await stage.end(n, Done(), chosen=True)
    for number in range(n // 100):
        await stage.engine.put([], token=f"token-{number}")


Fill = Callable[[Stage, int], Awaitable[None]]
DIMENSIONS: dict[str, Fill] = {
    fill.__name__: fill
    for fill in (
        *[waiting, held, limited, limited_keys, scheduled, due, expired, kept, running, lost],
        *[queues, keys, rules, records, members, tokens],
    )
}

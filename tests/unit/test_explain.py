"""Every sentence that answers "why is my job not running?"."""

from __future__ import annotations

import pytest

from skep.broker import Rule, RuleKind, Scope
from skep.brokers.memory import MemoryBroker
from skep.explain import explain
from skep.job import Dead, Job
from skep.testing.clock import FakeClock
from skep.testing.make import HOLDER, SPAN, a_job


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def engine(clock: FakeClock) -> MemoryBroker:
    return MemoryBroker(clock=clock)


async def why(engine: MemoryBroker, job: Job) -> str:
    return "; ".join(await explain(engine, job.id))


async def test_an_unknown_job(engine: MemoryBroker) -> None:
    assert "no job" in await why(engine, a_job())


async def test_a_ready_job_tells_how_many_are_ahead(engine: MemoryBroker) -> None:
    first, second = a_job(), a_job()
    await engine.put([first, second])
    assert "behind 1 others" in await why(engine, second)


async def test_a_scheduled_job_tells_its_time(engine: MemoryBroker) -> None:
    job = a_job(delay_ms=60_000)
    await engine.put([job])
    assert "not due before 2026-01-01 00:01:00" in await why(engine, job)


async def test_an_expired_job_tells_so(engine: MemoryBroker, clock: FakeClock) -> None:
    job = a_job(expires_in_ms=1000)
    await engine.put([job])
    clock.advance("2s")
    assert "expired" in await why(engine, job)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Rule(RuleKind.PAUSE, Scope.QUEUE, "mail"), "queue 'mail' is paused"),
        (Rule(RuleKind.BLOCK, Scope.TASK, "send"), "task 'send' is blocked"),
        (Rule(RuleKind.LIMIT, Scope.KEY, "bob", 2), "at most 2 jobs of key 'bob'"),
    ],
)
async def test_rules_are_named(engine: MemoryBroker, rule: Rule, said: str) -> None:
    job = a_job(queue="mail", task="send", key="bob")
    await engine.put([job])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "another"))
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "mail", 10))
    await engine.add_rule(rule)
    assert await why(engine, job) == said + (" may run at once" if rule.n else "")


async def test_a_running_job_tells_its_holder_and_the_wish_to_stop(
    engine: MemoryBroker, clock: FakeClock
) -> None:
    job = a_job()
    await engine.put([job])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    assert await why(engine, job) == f"it is running: attempt 1, held by {HOLDER}"
    await engine.cancel([job.id])
    assert "asked to stop" in await why(engine, job)
    clock.advance(SPAN)
    assert "lost its lease" in await why(engine, job)


async def test_an_ended_job_tells_how(engine: MemoryBroker) -> None:
    job = a_job()
    await engine.put([job])
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    await engine.settle([(lease, Dead(reason="failed"))])
    assert await why(engine, job) == "it has ended as dead: failed"

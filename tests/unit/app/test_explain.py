"""Every sentence that answers "why is my job not running?"."""

from __future__ import annotations

from datetime import timedelta

import pytest

from propolis.app.operate.explain import explain
from propolis.app.operate.workers import Presence, WorkerCard, WorkerState
from propolis.core.envelope import Envelope
from propolis.core.job import Dead
from propolis.core.protocols import Rule, RuleKind, Scope, task_key
from propolis.engines.memory import MemoryEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def engine(clock: FakeClock) -> MemoryEngine:
    """With a live worker for all; what is said where there is none is in tests/worker/test_presence.py."""
    engine = MemoryEngine(clock=clock)
    card = WorkerCard(queues=("default", "mail"), tasks=("send", a_job().task), state=WorkerState.WORKING)
    await Presence(engine, "worker-1", lambda: card, clock=lambda: 0.0).beat()
    return engine


async def why(engine: MemoryEngine, job: Envelope) -> str:
    return "; ".join(await explain(engine, job.id))


async def test_an_unknown_job(engine: MemoryEngine) -> None:
    assert "no job" in await why(engine, a_job())


async def test_a_ready_job_tells_how_many_are_ahead(engine: MemoryEngine) -> None:
    first, second = a_job(), a_job()
    await engine.put([first, second])
    assert "behind 1 others" in await why(engine, second)


async def test_a_scheduled_job_tells_its_time(engine: MemoryEngine) -> None:
    job = a_job(delay_ms=60_000)
    await engine.put([job])
    assert "not due before 2026-01-01 00:01:00" in await why(engine, job)


async def test_an_expired_job_tells_so(engine: MemoryEngine, clock: FakeClock) -> None:
    job = a_job(expires_in_ms=1000)
    await engine.put([job])
    clock.advance("2s")
    assert "expired" in await why(engine, job)


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Rule(RuleKind.PAUSE, Scope.QUEUE, "mail"), "queue 'mail' is paused since 00:00Z"),
        (
            Rule(RuleKind.PAUSE, Scope.QUEUE, "mail", by="anna@host", why="deploy", lasts=timedelta(hours=1)),
            "queue 'mail' is paused by anna@host since 00:00Z until 01:00Z: deploy",
        ),
        (
            Rule(RuleKind.BLOCK, Scope.TASK, "send", by="ben", lasts=timedelta(days=1)),
            "task 'send' is blocked by ben since 00:00Z until 2026-01-02 00:00Z",
        ),
        (
            Rule(RuleKind.BLOCK, Scope.TASK_KEY, task_key("send", "bob"), by="ben"),
            "task 'send' of key 'bob' is blocked by ben since 00:00Z",
        ),
        (
            Rule(RuleKind.LIMIT, Scope.KEY, "bob", 0, by="ben", why="as agreed"),
            "key 'bob' runs 0 of 0; limited by ben since 00:00Z: as agreed",
        ),
    ],
)
async def test_rules_are_named(engine: MemoryEngine, rule: Rule, sentence: str) -> None:
    """What limits do is told in tests/contract/limits/."""
    job = a_job(queue="mail", task="send", key="bob")
    await engine.put([job])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "another"))
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "mail", 10))
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK_KEY, task_key("send", "ann")))
    await engine.add_rule(rule)
    assert await why(engine, job) == sentence


async def test_the_strongest_rule_is_named_first_and_one_that_is_over_not_at_all(
    engine: MemoryEngine, clock: FakeClock
) -> None:
    """S2.13: blocked before paused before limited."""
    job = a_job(queue="mail", task="send", key="bob")
    await engine.put([job])
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "bob", 2))
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "mail"))
    await engine.add_rule(Rule(RuleKind.BLOCK, Scope.TASK, "send", lasts=timedelta(hours=1)))

    said = [sentence.partition(" since")[0] for sentence in await explain(engine, job.id)]
    clock.advance("1h")
    later = [sentence.partition(" since")[0] for sentence in await explain(engine, job.id)]

    paused_and_limited = ["queue 'mail' is paused", "key 'bob' runs 0 of 2; limited"]
    assert said == ["task 'send' is blocked", *paused_and_limited]
    assert later[:2] == paused_and_limited


async def test_a_task_that_this_app_does_not_declare_is_named_where_no_worker_knows_it(
    engine: MemoryEngine,
) -> None:
    renamed, known = a_job(task="old"), a_job(task="send")
    await engine.put([renamed, known])
    assert await explain(engine, renamed.id, ["new"]) == [
        "no live worker knows task 'old'",
        "this app declares no task 'old': was it renamed, or its module not imported?",
        "it is ready, behind 0 others of queue 'default'",
    ]
    assert "declares" not in "".join(await explain(engine, renamed.id, ["old"]))
    assert "declares" not in "".join(await explain(engine, renamed.id))  # a producer, or a URL alone
    assert "declares" not in "".join(
        await explain(engine, known.id, ["new"])
    )  # a worker of another app runs it


async def test_a_running_job_tells_its_holder_and_the_wish_to_stop(
    engine: MemoryEngine, clock: FakeClock
) -> None:
    job = a_job()
    await engine.put([job])
    await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    assert await why(engine, job) == f"it is running: attempt 1, held by {HOLDER}"
    await engine.cancel([job.id])
    assert "asked to stop" in await why(engine, job)
    clock.advance(SPAN)
    assert "lost its lease" in await why(engine, job)


async def test_an_ended_job_tells_how(engine: MemoryEngine) -> None:
    job = a_job()
    await engine.put([job])
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
    await engine.settle([(lease, Dead(reason="failed"))])
    assert await why(engine, job) == "it has ended as dead: failed"

"""Rows of the designs before us that a database with notifications has to keep, on PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import asyncpg
import pytest
import pytest_asyncio

from propolis import App
from propolis.app.operate.explain import explain
from propolis.core.batch import Batch
from propolis.core.envelope import Envelope
from propolis.core.job import Crashed, Dead, Done, Error, JobInfo, Lease, Retried, Snoozed
from propolis.core.protocols import Engine, Filter, Rule, RuleKind, Scope
from propolis.engines.memory.engine import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker
from propolis.worker.sweeping import sweeper

YEAR = timedelta(days=365)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest_asyncio.fixture
async def timeless(postgres_url: str, schema: str, clock: FakeClock) -> AsyncIterator[PostgresEngine]:
    """The same with a clock that the test moves."""
    handle = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    yield handle
    await handle.close()


@pytest_asyncio.fixture
async def app(postgres_url: str, schema: str) -> AsyncIterator[App]:
    app = App(f"{postgres_url}?schema={schema}")
    yield app
    await app.aclose()


async def take(engine: PostgresEngine, limit: int = 10) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def info_of(engine: PostgresEngine, job_id: str) -> JobInfo:
    info = await engine.get(job_id)
    assert info is not None
    return info


# --- notifications -----------------------------------------------------------------------


async def test_notifications_that_lie_in_every_way_change_nothing(
    app: App, engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """S2.1, S2.2, S2.4: dropped, doubled, for nothing and for nobody: each job runs exactly once."""
    dice = random.Random(7)
    runs: Counter[int] = Counter()

    @app.task(name="count")
    async def count(number: int) -> None:
        runs[number] += 1

    async def lie() -> None:
        for _ in range(dice.randrange(4)):
            queue = dice.choice(["default", "default", "nowhere", "", "x" * 100])
            await connection.execute("SELECT pg_notify($1, $2)", f"propolis:{schema}", queue)

    workers = [Worker(app, Settings(poll=timedelta(milliseconds=200))) for _ in range(2)]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    for number in range(60):
        await lie()
        if dice.random() < 0.5:  # with a notification, or without any
            await engine.put([a_job(number, task="count")])
        else:
            async with connection.transaction():
                await engine.put_in(connection, [a_job(number, task="count")])
    async with asyncio.timeout(30):
        while len(runs) < 60:
            await lie()
            await asyncio.sleep(0.01)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*running)

    assert runs == Counter(range(60))
    assert (await engine.queues())["default"].total == 0


async def test_a_job_of_which_nobody_was_told_runs_at_the_next_look(
    app: App, postgres_url: str, schema: str, connection: asyncpg.Connection
) -> None:
    """S2.3: its producer is gone between the commit and the notification; the table is the truth."""
    ran = asyncio.Event()

    @app.task(name="ring")
    async def ring() -> None:
        ran.set()

    await app.ready()
    worker = Worker(app, Settings(poll=timedelta(milliseconds=300)))
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    await connection.execute(f"""SELECT "{schema}".enqueue('ring', '[]')""")
    async with asyncio.timeout(10):
        await ran.wait()

    worker.stop()
    await running


async def test_a_notification_starts_a_job_long_before_the_next_look(
    app: App, engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S0.13: one after another, with hours between two looks and two sweeps.

    Whoever puts has another handle than the worker, whose own news would need no notification, and does so
    while the worker waits: or else it would find the next job when it settles the last.
    """
    monkeypatch.setattr(sweeper, "SWEEP_EVERY", 7200.0)
    done: asyncio.Queue[int] = asyncio.Queue()
    idle = asyncio.Event()
    its_own = await app.ready()
    wait = its_own.wait

    async def watched(queues: Sequence[str], timeout: float) -> bool:
        idle.set()
        try:
            return await wait(queues, timeout)
        finally:
            idle.clear()

    monkeypatch.setattr(its_own, "wait", watched)

    @app.task(name="ring")
    async def ring(number: int) -> None:
        done.put_nowait(number)

    worker = Worker(app, Settings(poll=timedelta(hours=1)))
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    async with asyncio.timeout(60):
        for number in range(20):
            await idle.wait()
            await engine.put([a_job(number, task="ring")])
            assert await done.get() == number

    worker.stop()
    await running


# --- claims and endings ------------------------------------------------------------------


async def test_of_thirty_two_claimers_one_wins_and_the_others_go_on(
    engine: PostgresEngine, postgres_url: str, schema: str
) -> None:
    """S2.7: nobody waits for five minutes because it has lost a race."""
    others = [await PostgresEngine(postgres_url, schema=schema).open() for _ in range(7)]
    claimers = [engine, *others] * 4
    for _ in range(5):
        await engine.put([a_job()])
        claims = await asyncio.gather(*(take(claimer, 1) for claimer in claimers))
        [lease] = [lease for leases in claims for lease in leases]
        assert await engine.settle([(lease, Done())]) == []
    await engine.put([a_job() for _ in claimers])
    claims = await asyncio.gather(*(take(claimer, 1) for claimer in claimers))
    assert all(len(leases) == 1 for leases in claims)
    for other in others:
        await other.close()


async def test_every_way_out_has_a_reason_that_a_machine_can_read(
    timeless: PostgresEngine, clock: FakeClock
) -> None:
    """S2.8, S2.9: missing, locked, paused, blocked, too many deliveries, claim lost, retried, done."""
    engine = timeless
    for name in ("run", "retried", "snoozed", "failed", "crashed", "lost"):
        await engine.put([a_job(id=name, max_crashes=1)])
    leases = {lease.id: lease for lease in await take(engine)}

    assert "no job missing" in (await explain(engine, "missing"))[0]
    assert "running" in (await explain(engine, "run"))[0]
    await engine.settle(
        [
            (leases["retried"], Retried(error=Error("ValueError", "oh"))),
            (leases["snoozed"], Snoozed(timedelta(hours=1))),
            (leases["failed"], Dead(error=Error("ValueError", "oh"))),
            (leases["run"], Done(keep=YEAR)),
            (leases["crashed"], Crashed()),
        ]
    )
    clock.advance(SPAN)
    await engine.sweep()
    assert await engine.settle([(leases["lost"], Done())]) == [leases["lost"]]  # the claim is lost

    infos = {name: await info_of(engine, name) for name in leases}
    assert [event.kind for event in infos["retried"].history] == ["retried"]
    assert [event.kind for event in infos["snoozed"].history] == ["snoozed"]
    assert (infos["failed"].state, infos["failed"].reason) == (State.DEAD, "failed")
    assert (infos["crashed"].state, infos["crashed"].reason) == (State.DEAD, "crashed")
    assert [event.kind for event in infos["lost"].history] == ["lost"]
    assert (infos["run"].state, infos["run"].reason) == (State.DONE, None)
    assert "not due" in (await explain(engine, "snoozed"))[0]
    for kind, word in ((RuleKind.PAUSE, "paused"), (RuleKind.BLOCK, "blocked")):
        await engine.add_rule(Rule(kind, Scope.QUEUE, "default"))
        assert await take(engine) == []
        assert word in " ".join(await explain(engine, "retried"))
        await engine.remove_rule(kind, Scope.QUEUE, "default")


async def test_a_job_whose_task_nobody_knows_waits_for_somebody_who_does(
    app: App, engine: PostgresEngine
) -> None:
    """S2.9, T12b: the missing handler; a worker that knows it runs the job."""
    await engine.put([a_job(id="stranger", task="nobody.knows")])
    settings = Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, 1)])

    await Worker(app, settings).run()

    info = await info_of(engine, "stranger")
    assert (info.state, info.parked, info.attempts) == (State.READY, True, 0)

    @app.task(name="nobody.knows")
    async def known() -> None: ...

    await Worker(app, settings).run()
    assert await engine.get("stranger") is None


async def test_a_settle_that_is_repeated_because_its_answer_was_lost_is_harmless(
    engine: PostgresEngine,
) -> None:
    """S2.20: the job is gone with the first, and nothing more goes with the second."""
    await engine.put([a_job(), a_job()])
    first, second = await take(engine)
    outcomes = [(first, Done()), (second, Done(emit=(a_job(id="next", chosen=True),)))]

    assert await engine.settle(outcomes) == []
    assert await engine.settle(outcomes) == [first, second]

    counts = (await engine.queues())["default"]
    assert (counts.put, counts.deleted, counts.ready) == (3, 2, 1)


# --- time --------------------------------------------------------------------------------


async def test_what_is_far_away_or_paused_for_long_survives(
    timeless: PostgresEngine, clock: FakeClock
) -> None:
    """S2.18, S2.29: a delay of years, and a queue that is paused for as long."""
    await timeless.put([a_job(id="far", delay_ms=int(3 * YEAR.total_seconds() * 1000))])
    await timeless.put([a_job(id="paused", queue="slow")])
    await timeless.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "slow"))
    wants = {"default": 5, "slow": 5}
    for _ in range(3):
        assert await timeless.lease(wants, span=SPAN, holder=HOLDER) == []
        clock.advance(YEAR)
        await timeless.sweep()
    await timeless.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "slow")

    leases = await timeless.lease(wants, span=SPAN, holder=HOLDER)
    assert {lease.id for lease in leases} == {"far", "paused"}


@pytest.mark.parametrize("skew", [timedelta(hours=10), timedelta(hours=-10)])
async def test_the_clock_of_a_worker_may_be_wrong_by_hours(
    engine: PostgresEngine, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, skew: timedelta
) -> None:
    """S2.31: leases, delays and expiries are measured by the database alone."""
    right, right_ns, seconds = time.time, time.time_ns, int(skew.total_seconds())
    monkeypatch.setattr(time, "time", lambda: right() + seconds)
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + seconds * 10**9)

    await engine.put([a_job(id="now", expires_in_ms=60_000), a_job(id="later", delay_ms=3_600_000)])
    before = await connection.fetchval("SELECT clock_timestamp()")
    [lease] = await take(engine)
    assert lease.id == "now"
    assert before <= lease.until - SPAN <= before + timedelta(seconds=30)
    swept = await engine.sweep()
    assert (swept.reaped, swept.promoted, swept.expired) == (0, 0, 0)
    [renewal] = await engine.renew([lease], span=SPAN)
    assert renewal.until is not None
    assert await engine.settle([(lease, Done())]) == []


# --- counts ------------------------------------------------------------------------------


async def test_counts_are_those_of_the_rows(engine: PostgresEngine) -> None:
    """S2.22: five enqueued are five, also per task."""
    await engine.put([a_job(task="mail") for _ in range(5)])
    await engine.put([a_job(task="other"), a_job(task="other", delay_ms=60_000)])
    [_] = await take(engine, 1)

    counts = (await engine.queues())["default"]
    assert (counts.ready, counts.scheduled, counts.running, counts.put) == (5, 1, 1, 7)
    assert len((await engine.find(Filter(task="mail"))).jobs) == 5


@pytest.mark.parametrize("seed", range(8))
async def test_what_goes_as_a_set_ends_as_if_it_came_one_by_one(
    timeless: PostgresEngine, clock: FakeClock, seed: int
) -> None:
    """I16: whichever of them want the same ids and keys, and whoever has these already."""
    dice = random.Random(seed)

    def some(many: int, **more: str) -> list[Envelope]:
        return [
            a_job(
                id=f"{dice.randrange(30)}",
                chosen=dice.random() < 0.3,
                delay_ms=dice.choice([0, 0, 5000]),
                unique=dice.choice([None, *(f"key {n}" for n in range(8))]),
                batch=dice.choice([None, "open", "sealed", "over", "none"]) if more else None,
                member=number,
                **more,
            )
            for number in range(many)
        ]

    there, emitted = some(8), [some(size, queue="next") for size in (2, 12, 40)]

    async def seen(engine: Engine) -> list[object]:
        for name, member in (("open", "x"), ("sealed", "y")):
            await engine.put_batch(Batch(id=name), [a_job(id=member, batch=name)], seal=name == "sealed")
        await engine.put_batch(Batch(id="over"), seal=True)
        await engine.put([*there, *(a_job(id=f"from-{n}", queue="first") for n in range(3))])
        leases = await engine.lease({"first": 3}, span=SPAN, holder=HOLDER)
        ends = [(lease, Done(emit=tuple(jobs))) for lease, jobs in zip(leases, emitted, strict=True)]
        assert await engine.settle(ends) == []
        clock.advance("10s")
        await engine.sweep()
        pending = [(it.id, it.pending) for it in await engine.batches()]
        first = await engine.lease({"next": 100}, span=SPAN, holder=HOLDER)
        first += await engine.lease({"next": 100}, span=SPAN, holder=HOLDER)
        return [pending, [lease.body for lease in first]]

    assert await seen(timeless) == await seen(MemoryEngine(clock=clock))

"""Schedules on real workers, on every engine: each instant exactly once, whoever comes or dies."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo

import msgspec
import pytest

from propolis import Job, cron, every
from propolis.app.operate.schedule_records import all_schedules, store
from propolis.core.job import Dead, Done, Outcome, Retried, State
from propolis.core.protocols import Engine, Filter, pop
from propolis.core.records import Read, Swap, Swapped
from propolis.core.schedule import Cron, MisfireName, OverlapName, Schedule
from propolis.testing.clock import START, FakeClock
from propolis.testing.engines.samples import a_job
from propolis.testing.kit.driven import DrivenWorker
from propolis.worker import Settings
from propolis.worker.sweeping.schedule_firing import Firer

from .acting import Around, Make, app_on, instant_of, instants, keep, look, put, the_only

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)

EVERYTHING = Filter()


# --- the bar: many workers ---------------------------------------------------------------


async def test_twenty_workers_fire_one_schedule_per_second_sixty_times_in_a_minute(
    make: Make, clock: FakeClock
) -> None:
    """S2.27, S2.28, C1: sixty instants, sixty runs, whatever the clocks of the workers say."""
    ran: Counter[datetime] = Counter()
    firings: Counter[datetime] = Counter()
    async with AsyncExitStack() as stack:
        workers = [await a_worker(stack, make, clock, ran, firings, number) for number in range(20)]
        for _ in range(60):
            clock.advance(SECOND)
            for worker in workers:
                worker.resume()
            await asyncio.gather(*(worker.check() for worker in workers))
        while ran.total() < firings.total() or any(worker.busy for worker in workers):
            await asyncio.gather(
                *(worker.check() for worker in workers)
            )  # the last may be fired after all looked
    expected = [START + n * SECOND for n in range(1, 61)]
    assert sorted(ran.elements()) == expected
    assert sorted(firings.elements()) == expected


async def a_worker(
    stack: AsyncExitStack,
    make: Make,
    clock: FakeClock,
    ran: Counter[datetime],
    firings: Counter[datetime],
    number: int,
) -> DrivenWorker:
    engine = await make().open()
    stack.push_async_callback(engine.close)
    app = app_on(Counting(engine, firings))

    @app.every("1s", name="tick")
    @app.task(name="tick")
    async def tick(job: Job) -> None:
        assert job.instant is not None
        ran[job.instant] += 1

    # Each worker's clock runs at its own pace, from hours in the past to hours in the future.
    def skewed() -> float:
        return (clock.now - START).total_seconds() * (0.9 + number / 40) + (number - 10) * 3600

    worker = DrivenWorker(app, Settings(holder=f"worker-{number}"), clock=skewed, driven=True)
    await worker.start()
    stack.push_async_callback(worker.end)
    return worker


class Counting(Around):
    """The engine, and a count of the instants that it let us fire."""

    def __init__(self, engine: Engine, firings: Counter[datetime]) -> None:
        super().__init__(engine)
        self._firings = firings

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        answers = await super().swap(swaps, token=token)
        for swap, answer in zip(swaps, answers, strict=True):
            for job in swap.puts if answer.refusal is None else ():
                self._firings[datetime.fromisoformat(job.headers["propolis-instant"])] += 1
        return answers


# --- killed between any two steps --------------------------------------------------------


class Killed(BaseException):
    """As kill -9: nothing of the worker goes on."""


class Mortal(Around):
    """The engine of a worker that dies before or after its nth word with it."""

    def __init__(self, engine: Engine, words: int, *, after: bool) -> None:
        super().__init__(engine)
        self._left = words
        self._after = after

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        self._speak(before=True)
        answers = await super().swap(swaps, token=token)
        self._speak(before=False)
        return answers

    async def records(self, kind: str, **asked: Any) -> Read:
        self._speak(before=True)
        read = await super().records(kind, **asked)
        self._speak(before=False)
        return read

    def _speak(self, *, before: bool) -> None:
        self._left -= before
        if self._left == 0 and self._after is not before:
            raise Killed


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_worker_killed_at_any_word_neither_loses_nor_doubles_aninstant_of(
    engine: Engine, clock: FakeClock, after: Literal[False, True]
) -> None:
    """S2.26, F39: enqueue and record are one step, so there is nothing between them."""
    await put(engine, plan=every("1h", misfire="all"))
    fired: list[datetime] = []
    for words in range(1, 12):
        clock.advance(3 * HOUR)
        mortal: Any = Mortal(engine, words, after=after)
        with suppress(Killed):
            await Firer(mortal, ()).fire_due()
        await look(engine)
        fired += await instants(engine)
    assert fired == [START + n * HOUR for n in range(1, 34)]


async def test_many_who_come_back_at_once_catch_up_once(make: Make, engine: Engine, clock: FakeClock) -> None:
    """C1, I1."""
    await put(engine, plan=every("1m", misfire="all", misfire_limit=30))
    clock.advance("1d")
    async with AsyncExitStack() as stack:
        others = []
        for _ in range(4):
            others.append(await make().open())
            stack.push_async_callback(others[-1].close)
        await asyncio.gather(*(Firer(one, ()).fire_due() for one in others * 3))
        await look(engine)
        assert await instants(engine) == [clock.now - n * MINUTE for n in reversed(range(30))]


EDGES = [
    ("Europe/Paris", "2026-03-29T01:00Z"),
    ("Europe/Paris", "2026-10-25T01:00Z"),
    *(
        pytest.param(*others, marks=pytest.mark.full)
        for others in (
            ("America/New_York", "2026-03-08T07:00Z"),
            ("America/New_York", "2026-11-01T06:00Z"),
            ("Australia/Lord_Howe", "2026-10-03T15:30Z"),
            ("Australia/Lord_Howe", "2026-04-04T15:00Z"),
        )
    ),
]


@pytest.mark.parametrize(("zone", "edge"), EDGES)
async def test_three_workers_and_one_killed_at_every_step_go_over_a_change_of_clocks(
    make: Make, engine: Engine, clock: FakeClock, zone: str, edge: str
) -> None:
    """F39, S2.27: once a day for a time of day, and every half hour for what runs all the time."""
    change, half = datetime.fromisoformat(edge), 30 * MINUTE
    clock.advance(change - 36 * HOUR - clock.now)
    for name, at in [("nightly", "30 2 * * *"), ("morning", "0 9 * * *"), ("always", "*/30 * * * *")]:
        await put(engine, name, plan=cron(at, tz=zone))
    dice = random.Random(edge)
    fired: dict[str, list[datetime]] = {"nightly": [], "morning": [], "always": []}
    async with AsyncExitStack() as stack:
        others = [await make().open() for _ in range(2)]
        for other in others:
            stack.push_async_callback(other.close)
        for _ in range(144):
            clock.advance(half)
            mortal: Any = Mortal(engine, dice.randint(1, 6), after=dice.random() < 0.5)
            firers = [Firer(one, ()).fire_due() for one in (mortal, *others)]
            answers = await asyncio.gather(*firers, return_exceptions=True)
            assert all(not isinstance(answer, Exception) for answer in answers)
            for lease in await pop(engine, "default", limit=99):
                headers = msgspec.json.decode(lease.body)["headers"]
                fired[headers["propolis-schedule"]].append(
                    datetime.fromisoformat(headers["propolis-instant"])
                )
    assert fired["always"] == [change - 36 * HOUR + n * half for n in range(1, 145)]
    for name in ("nightly", "morning"):
        days = [instant.astimezone(ZoneInfo(zone)).date() for instant in fired[name]]
        assert len(days) == len(set(days)) == 3
        assert change.astimezone(ZoneInfo(zone)).date() in days


# --- the tables --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misfire", "limit", "away", "expected"),
    [
        ("skip", 100, HOUR, [1]),
        ("skip", 100, HOUR + MINUTE, [1]),
        ("skip", 100, HOUR + 2 * MINUTE, []),
        ("skip", 100, 5 * HOUR + 2 * MINUTE, []),
        ("once", 100, HOUR, [1]),
        ("once", 100, HOUR + 2 * MINUTE, [1]),
        ("once", 100, 5 * HOUR + 2 * MINUTE, [5]),
        ("all", 100, 5 * HOUR + 2 * MINUTE, [1, 2, 3, 4, 5]),
        ("all", 3, 5 * HOUR + 2 * MINUTE, [3, 4, 5]),
        ("all", 5, 5 * HOUR + 2 * MINUTE, [1, 2, 3, 4, 5]),
    ],
)
async def test_after_downtime_the_misfire_policy_decides(
    engine: Engine, clock: FakeClock, misfire: MisfireName, limit: int, away: timedelta, expected: list[int]
) -> None:
    """S3.30, S2.27: and afterwards it goes on with the next instant, as if nothing had been."""
    await put(engine, misfire=misfire, misfire_limit=limit)
    clock.advance(away)
    await look(engine)
    assert await instants(engine) == [START + n * HOUR for n in expected]
    clock.advance(HOUR - timedelta(seconds=away.total_seconds() % 3600))
    await look(engine)
    assert await instants(engine) == [clock.now]


@pytest.mark.parametrize(
    ("overlap", "state", "puts"),
    [
        ("allow", "waiting", True),
        ("allow", "running", True),
        ("allow", "retrying", True),
        ("allow", "ended", True),
        ("skip", "waiting", False),
        ("skip", "running", False),
        ("skip", "retrying", False),
        ("skip", "dead", True),
        ("skip", "cancelled", True),
        ("skip", "ended", True),
        ("queue-one", "waiting", False),
        ("queue-one", "running", True),
        ("queue-one", "retrying", True),
        ("queue-one", "dead", True),
        ("queue-one", "ended", True),
    ],
)
async def test_what_the_last_job_does_decides_with_the_overlap_policy_whether_there_is_another(
    engine: Engine, clock: FakeClock, overlap: OverlapName, state: str, puts: bool
) -> None:
    await put(engine, overlap=overlap)
    clock.advance(HOUR)
    await look(engine)
    await bring_to(engine, state)
    before = await put_so_far(engine)

    clock.advance(HOUR)
    await look(engine)

    assert await put_so_far(engine) - before == puts
    assert (await the_only(engine)).last_at == clock.now  # the instant is settled either way


async def bring_to(engine: Engine, state: str) -> None:
    if state == "waiting":
        return
    if state == "cancelled":
        [waiting] = (await engine.find(EVERYTHING)).jobs
        assert await engine.cancel([waiting.id]) == [True]
        return
    [lease] = await engine.lease({"default": 9}, span=24 * HOUR, holder="test")
    outcomes: dict[str, Outcome] = {"retrying": Retried(24 * HOUR), "dead": Dead(), "ended": Done()}
    if state in outcomes:
        assert await engine.settle([(lease, outcomes[state])]) == []


async def put_so_far(engine: Engine) -> int:
    return (await engine.queues())["default"].put


async def test_a_skipped_instant_does_not_let_the_next_one_overlap(engine: Engine, clock: FakeClock) -> None:
    """The job that still runs may be that of an instant long before the last one."""
    await put(engine, overlap="skip")
    clock.advance(HOUR)
    await look(engine)
    [lease] = await engine.lease({"default": 9}, span=24 * HOUR, holder="test")
    for _ in range(5):
        clock.advance(HOUR)
        await look(engine)
        assert await engine.lease({"default": 9}, span=HOUR, holder="test") == []
    await engine.settle([(lease, Done())])
    clock.advance(HOUR)
    await look(engine)
    assert await instants(engine) == [clock.now]


async def test_one_that_is_queued_starts_when_the_one_that_runs_has_ended(
    engine: Engine, clock: FakeClock
) -> None:
    await put(engine, overlap="queue-one")
    clock.advance(HOUR)
    await look(engine)
    [running] = await engine.lease({"default": 9}, span=24 * HOUR, holder="test")
    for _ in range(3):
        clock.advance(HOUR)
        await look(engine)
        assert await engine.lease({"default": 9}, span=HOUR, holder="test") == []
    assert await put_so_far(engine) == 2

    await engine.settle([(running, Done())])

    assert await instants(engine) == [START + 2 * HOUR]


async def test_a_policy_that_changes_takes_its_rule_along(engine: Engine) -> None:
    await put(engine, overlap="queue-one")
    assert [(rule.name, rule.n) for rule in await engine.rules()] == [("schedule:report", 1)]
    await put(engine, overlap="skip")
    assert await engine.rules() == []
    await put(engine, overlap="queue-one")
    [rule] = await engine.rules()
    await engine.remove_rule(rule.kind, rule.scope, rule.name)  # as another version may do meanwhile
    await put(engine, overlap="queue-one")
    assert await engine.rules() == [rule]
    assert await app_on(engine).schedules.aremove("report")
    assert await engine.rules() == []


# --- who fires what ----------------------------------------------------------------------


async def test_a_declared_schedule_is_fired_only_by_workers_that_declare_it(
    engine: Engine, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """So it stops with the last worker that knows it, and no start of other code takes it away."""
    caplog.set_level(logging.INFO)
    declared = every("1h").schedule("theirs", a_job(task="tests.echo"), declared=True)
    await store(engine, [declared])
    await put(engine, "anyones")
    clock.advance(HOUR)

    await look(engine, declared=("something else",))
    assert await put_so_far(engine) == 1
    assert "schedule theirs is stored, but not declared here: this worker does not fire it" in caplog.messages
    await look(engine, declared=("theirs",))
    assert await put_so_far(engine) == 2
    assert len(await all_schedules(engine)) == 2


async def test_a_schedule_that_cannot_fire_here_does_not_stop_the_others(
    engine: Engine, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that lacks a time zone."""
    lost = Schedule(name="lost", timing=Cron("@hourly", "Mars/Olympus"), job=a_job(task="tests.echo"))
    await keep(engine, lost, START + HOUR)
    await put(engine, "zebra")
    clock.advance(HOUR)
    firer = Firer(engine, ())
    for _ in range(3):
        await firer.fire_due()
    assert await put_so_far(engine) == 1
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "schedule lost cannot be fired here"
    ]


async def test_a_long_way_to_catch_up_is_gone_in_pieces(engine: Engine, clock: FakeClock) -> None:
    await put(engine, plan=every("1m", misfire="all", misfire_limit=1000))
    clock.advance("1d")
    firer = Firer(engine, ())
    assert await firer.fire_due() == timedelta(0)  # there is more to do
    assert await put_so_far(engine) < 1000
    assert await firer.fire_due() == MINUTE
    assert await put_so_far(engine) == 1000


async def test_whoever_fires_knows_when_to_come_back(engine: Engine, clock: FakeClock) -> None:
    await put(engine, "often", plan=every("1m"))
    await put(engine, "seldom", plan=cron("@hourly"))
    firer = Firer(engine, ())
    assert await firer.fire_due() is None
    clock.advance(HOUR + 15 * SECOND)
    assert await firer.fire_due() == 45 * SECOND


# --- by hand -----------------------------------------------------------------------------


async def test_a_schedule_can_be_listed_paused_resumed_run_and_removed(
    engine: Engine, clock: FakeClock
) -> None:
    schedules = app_on(engine).schedules
    await put(engine)
    [record] = await schedules.alist()
    assert await schedules.aget("report") == record
    assert (record.next_at, record.last_at) == (START + HOUR, None)
    assert [await schedules.apause("report"), await schedules.apause("report")] == [True, False]
    clock.advance(5 * HOUR)
    await look(engine)
    assert await engine.queues() == {}
    assert [await schedules.aresume("report"), await schedules.aresume("report")] == [True, False]
    await look(engine)
    assert await instants(engine) == [START + 5 * HOUR]  # once, as for any other absence

    receipt = await schedules.arun("report")
    assert receipt is not None
    assert receipt.created
    [lease] = await engine.lease({"default": 9}, span=HOUR, holder="test")
    assert (lease.id, instant_of(lease.body)) == (receipt.id, clock.now)

    assert [await schedules.aremove("report"), await schedules.aremove("report")] == [True, False]
    assert await schedules.aget("report") is None
    assert await schedules.arun("report") is None


async def test_running_one_by_hand_respects_its_overlap_policy(engine: Engine, clock: FakeClock) -> None:
    await put(engine, overlap="skip")
    clock.advance(HOUR)
    await look(engine)
    [waiting] = (await engine.find(EVERYTHING)).jobs
    receipt = await app_on(engine).schedules.arun("report")
    assert receipt is not None
    assert (receipt.created, receipt.id) == (False, waiting.id)


async def test_a_removed_schedule_leaves_its_jobs(engine: Engine, clock: FakeClock) -> None:
    await put(engine)
    clock.advance(HOUR)
    await look(engine)
    await app_on(engine).schedules.aremove("report")
    [info] = (await engine.find(EVERYTHING)).jobs
    assert info.state is State.READY

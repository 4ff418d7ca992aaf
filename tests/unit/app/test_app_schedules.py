"""Schedules as code declares them, and jobs that run again: on the real worker, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from propolis import App, Discard, Job, Retry, cron, every
from propolis.app.operate.schedules import sync
from propolis.core.job import Dead
from propolis.errors import BadSetting, PayloadTooLarge, RecordTooLarge
from propolis.strategies import dead, delete, fixed, repeat
from propolis.testing.clock import START
from propolis.values import State
from propolis.worker import Mode, Settings, Worker

HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


@pytest.fixture
def app() -> App:
    return App("memory://")


# --- declaring ---------------------------------------------------------------------------


async def test_a_task_runs_at_the_times_of_its_schedule(app: App) -> None:
    seen: list[datetime | None] = []

    @app.cron("0 9 * * mon-fri", tz="Europe/Paris")
    @app.task(queue="mail")
    async def digest(job: Job) -> None:
        seen.append(job.instant)

    async with app.test() as t:  # on a Thursday
        await t.advance("7d")
        t.assert_enqueued(digest, queue="mail", count=5)
    assert seen == [datetime(2026, 1, day, 8, tzinfo=UTC) for day in (1, 2, 5, 6, 7)]


async def test_a_plain_function_becomes_a_task(app: App) -> None:
    seen = []

    class Local(Enum):
        FIVE = 5

    @app.every("15m")
    def tidy(job: Job) -> None:
        seen.append(job.instant)

    @app.cron("@hourly", args=(Local.FIVE,))
    async def count(n: Local) -> None:  # an annotation that only this function knows
        seen.append(None)

    async with app.test() as t:
        await t.advance("1h")
        t.assert_enqueued(tidy, count=4)
        t.assert_enqueued(count, Local.FIVE, count=1)


async def test_a_task_may_have_several_schedules_with_arguments_of_their_own(app: App) -> None:
    seen: Counter[str] = Counter()

    @app.every("1h", name="hourly", args=("a",))
    @app.every("30m", name="half-hourly", kwargs={"what": "b"})
    @app.task
    async def tell(what: str) -> None:
        seen[what] += 1

    async with app.test() as t:
        await t.advance("2h")
    assert seen == {"a": 2, "b": 4}


async def test_a_schedule_may_say_how_its_jobs_are_called(app: App) -> None:
    @app.task
    async def slow() -> None: ...

    app.every("1h", name="nightly")(slow.using(queue="slow", priority=7, expires="10m"))

    async with app.test() as t:
        await t.advance("1h")
        [record] = t.jobs(task=slow)
    assert (record.queue, record.priority) == ("slow", 7)
    assert record.expires_at == START + HOUR + 10 * MINUTE


async def test_a_job_that_no_schedule_has_put_has_no_instant(app: App) -> None:
    seen = []

    @app.task
    async def plain(job: Job) -> None:
        seen.append(job.instant)

    async with app.test() as t:
        await plain.aenqueue()
        await t.drain()
    assert seen == [None]


def test_two_schedules_of_one_name_are_refused(app: App) -> None:
    @app.every("1h")
    @app.task(name="tidy")
    async def tidy() -> None: ...

    app.every("1h")(tidy)  # the same again, as when a module is imported twice
    with pytest.raises(BadSetting, match="another name="):
        app.every("2h")(tidy)


async def test_arguments_that_do_not_fit_stop_the_worker_at_its_start(app: App) -> None:
    @app.every("1h", name="wrong")
    @app.task
    async def greet(name: str) -> None: ...

    with pytest.raises(BadSetting, match="schedule 'wrong'"):
        await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()


async def test_a_schedule_of_the_code_is_not_changed_at_run_time(app: App) -> None:
    @app.every("1h")
    @app.task(name="tidy")
    async def tidy() -> None: ...

    with pytest.raises(BadSetting, match="declared in the code"):
        await app.schedules.aput("tidy", every("2h"), tidy)


async def test_a_job_too_large_is_refused_when_its_schedule_is_put(app: App) -> None:
    @app.task
    async def swallow(text: str) -> None: ...

    with pytest.raises(PayloadTooLarge):
        await app.schedules.aput("big", every("2h"), swallow, "x" * 2**20)
    with pytest.raises(RecordTooLarge, match="schedule 'big', with the arguments of its job"):
        await app.schedules.aput("big", every("2h"), swallow, "x" * 2**16)
    assert await app.schedules.alist() == []


def test_what_does_not_say_when_is_told_in_words(app: App) -> None:
    @app.task
    async def tidy() -> None: ...

    no_text: Any = None
    with pytest.raises(BadSetting, match="does not say when: write cron"):
        app.schedules.put("tidy", no_text, tidy)
    for expression, zone in ((no_text, "UTC"), ("@daily", no_text)):
        with pytest.raises(BadSetting, match="write text, as in cron"):
            cron(expression, tz=zone)
    with pytest.raises(BadSetting, match="use one of @yearly, @annually"):
        cron("@Daily")
    app.close()


# --- syncing -----------------------------------------------------------------------------


def an_app(url: str, period: str | None, name: str = "tidy") -> App:
    """One version of some code, of several that work on the same file."""
    app = App(url)

    @app.task(name="tidy")
    async def tidy() -> None: ...

    if period is not None:
        app.every(period, name=name)(tidy)
    return app


async def start(app: App) -> None:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()


async def test_a_worker_stores_what_the_code_declares_and_leaves_the_rest(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    old, new, other = an_app(url, "1h"), an_app(url, "2h"), an_app(url, "1d", "other")
    await start(old)
    await old.schedules.aput("by-hand", every("1d"), old.tasks["tidy"])
    await old.schedules.apause("tidy")
    await start(new)  # another timing
    await start(other)  # other code on the same engine, or a later version that has renamed it

    stored = {record.schedule.name: record for record in await old.schedules.alist()}
    assert sorted(stored) == ["by-hand", "other", "tidy"]
    assert stored["tidy"].schedule.timing == every("2h").timing
    assert stored["tidy"].paused  # what an operator did stands
    assert [record.schedule.declared for record in stored.values()] == [False, True, True]
    for app in (old, new, other):
        await app.aclose()


async def test_a_worker_that_starts_writes_nothing_if_nothing_has_changed(app: App) -> None:
    @app.cron("@daily", tz="Europe/Paris", overlap="queue-one", args=("é", [1, {"a": None}]))
    @app.task
    async def report(name: str, rest: list[Any]) -> None: ...

    engine = await app.ready()
    await sync(engine, app.declared_schedules)
    before = await app.schedules.alist()
    asked: Counter[str] = Counter()
    for name in ("records", "swap", "add_rule", "remove_rule"):
        _count(engine, name, asked)
    await sync(engine, app.declared_schedules)
    assert asked == {"records": 1}
    assert await app.schedules.alist() == before


async def test_an_engine_without_records_is_named_by_an_app_that_declares_a_schedule(app: App) -> None:
    class Bare:
        """It has nothing, and is asked for nothing while no schedule is declared."""

    bare: Any = Bare()
    await sync(bare, {})

    @app.every("1h")
    async def tidy() -> None: ...

    with pytest.raises(BadSetting, match="Bare lacks the piece Records"):
        await sync(bare, app.declared_schedules)


async def test_a_restart_neither_skips_nor_repeats_an_instant(app: App) -> None:
    seen = []

    @app.every("1h")
    @app.task
    async def tick(job: Job) -> None:
        seen.append(job.instant)

    async with app.test() as t:
        for _ in range(12):
            await t.advance("25m")
            await t.kill_worker()
        await t.advance("0s")
    assert seen == [START + n * HOUR for n in range(1, 6)]


async def test_the_synchronous_verbs_do_the_same(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task(name="tidy")
    def tidy(depth: int) -> None: ...

    def use() -> None:
        assert app.schedules.put("tidy", cron("@daily"), tidy, 3).job.task == "tidy"
        assert [record.schedule.name for record in app.schedules.list()] == ["tidy"]
        assert app.schedules.pause("tidy")
        assert app.schedules.resume("tidy")
        receipt = app.schedules.run("tidy")
        assert receipt is not None
        assert receipt.created
        assert app.schedules.get("tidy") is not None
        assert app.schedules.remove("tidy")
        assert app.schedules.get("tidy") is None

    await asyncio.to_thread(use)
    await app.aclose()


# --- looking only when there is something to see -----------------------------------------


async def test_no_worker_asks_for_schedules_while_none_is_due(app: App) -> None:
    """S2.28: one look at the start, and one look and one firing per instant."""
    asked: Counter[str] = Counter()

    @app.every("1h")
    @app.task
    async def tick() -> None: ...

    async with app.test() as t:
        engine: Any = t.engine
        for name in ("records", "swap"):
            _count(engine, name, asked)
        await t.advance("59m")
        await t.drain()
        assert asked.total() == 0
        await t.advance("3h")
    assert asked == {"records": 3, "swap": 3}


def _count(engine: Any, name: str, asked: Counter[str]) -> None:
    """But for what a worker writes of itself, which is a record too."""
    verb = getattr(engine, name)

    async def counted(*args: Any, **kwargs: Any) -> Any:
        of_itself = name == "swap" and all(
            change.kind == "worker" for swap in args[0] for change in swap.changes
        )
        asked[name] += not of_itself
        return await verb(*args, **kwargs)

    setattr(engine, name, counted)


# --- again -------------------------------------------------------------------------------


async def test_a_job_runs_again_and_again(app: App) -> None:
    """S0.37."""
    turns: list[datetime] = []

    @app.task(queue="polls")
    async def poll(job: Job, url: str, depth: int = 1) -> None:
        job.again(after="10m")
        turns.append(t.now)

    async with app.test() as t:
        await poll.using(priority=3).aenqueue("x", depth=2)
        await t.advance("1h")
        [waiting] = t.jobs(task=poll, state=State.READY)
        t.assert_enqueued(poll, "x", depth=2, queue="polls", count=8)
    assert turns == [START + n * 10 * MINUTE for n in range(7)]
    assert waiting.priority == 3


async def test_a_retry_is_still_the_same_turn(app: App) -> None:
    """S0.37: a turn that fails and is repeated makes no second chain."""
    runs: Counter[int] = Counter()

    @app.task(on_error=repeat(3, fixed("1m")).then(dead))
    async def poll(job: Job) -> None:
        try:
            runs[job.attempt] += 1
            if job.attempt < 3:
                raise ValueError
        finally:
            job.again(after="10m")

    async with app.test() as t:
        await poll.aenqueue()
        await t.advance("23m")
        assert runs == {1: 2, 2: 2, 3: 2}  # at 0, 1 and 2 minutes, and at 12, 13 and 14
        assert len(t.jobs(task=poll)) == 3


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("how", ["raises", "fails", "returns", "runs out of time", "is deleted"])
async def test_a_chain_survives_the_failure_of_a_turn_if_it_says_so(app: App, how: str, always: bool) -> None:
    """S0.37."""
    ending = delete if how == "is deleted" else dead

    @app.task(timeout="1m", on_error=repeat(1, fixed(0)).then(ending), on_timeout=dead)
    async def poll(job: Job) -> object:
        job.again(after="10m", always=always)
        if how == "fails":
            raise Discard("for good")
        if how == "returns":
            return Discard("for good")
        if how == "runs out of time":
            await asyncio.Event().wait()
        raise ValueError

    async with app.test() as t:
        await poll.aenqueue()
        await t.advance("25m")
        turns = t.jobs(task=poll)
    assert len(turns) == (4 if always else 1)  # the last of them waits


async def test_a_stuck_turn_goes_on_as_well(app: App) -> None:
    """F10."""
    release = asyncio.Event()

    @app.task(timeout="1m", on_timeout=dead)
    async def deaf(job: Job) -> None:
        job.again(after="10m", always=True)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with app.test(patience="10ms") as t:
        first = await deaf.aenqueue()
        await t.advance("2m")
        outcome = t.outcome(first)
        assert isinstance(outcome, Dead)
        assert len(outcome.emit) == 1
        release.set()


async def test_a_turn_that_runs_twice_is_followed_once(app: App) -> None:
    """S0.37, I5: its worker dies, or it loses its lease, just before the end is recorded."""
    turns = []

    @app.task
    async def poll(job: Job) -> None:
        job.again(after="10m")
        turns.append(job.id)

    async with app.test() as t:
        first = await poll.aenqueue()
        await t.kill_worker(during=poll)
        await t.advance("1m")
        [second] = t.jobs(task=poll, state=State.READY)
        await t.advance("10m")
        [third] = t.jobs(task=poll, state=State.READY)
        await t.advance("5m")
        await t.lose_lease(await _due_now(t, third.id))
        await t.drain()
        assert len(t.jobs(task=poll)) == 4
    assert turns == [first.id, first.id, second.id, third.id, third.id]


async def _due_now(t: Any, job_id: str) -> str:
    await t.engine.reschedule(job_id, t.now)
    return job_id


async def test_a_replayed_turn_starts_no_second_chain(app: App) -> None:
    """Not even long after its next turn has been forgotten."""

    @app.task(on_error=dead)
    async def poll(job: Job) -> None:
        job.again(after="1d", always=True)
        if broken:
            raise ValueError

    async with app.test() as t:
        broken = True
        first = await poll.aenqueue()
        await t.drain()
        broken = False
        await t.advance("5d")
        assert await app.jobs.areplay(first.id) == [True]
        await t.advance("5d")
        assert len(t.jobs(task=poll, state=State.READY)) == 1
        assert len(t.jobs(task=poll)) == 12


async def test_a_chain_begun_with_a_key_is_begun_once(app: App) -> None:
    """So every process may enqueue it at its start."""
    turns = []

    @app.task
    async def poll(job: Job) -> None:
        job.again(after="10m")
        turns.append(job.id)

    async with app.test() as t:
        for _ in range(6):
            await poll.using(unique="poll").aenqueue()
            await t.advance("10m")
        assert len(t.jobs(task=poll, state=State.READY)) == 1
    assert len(turns) == 7


async def test_the_last_word_about_the_next_turn_counts(app: App) -> None:
    @app.task
    async def poll(job: Job) -> None:
        job.again(after="10m", always=True)
        job.again(after="1h")

    async with app.test() as t:
        await poll.aenqueue()
        await t.advance("59m")
        assert len(t.jobs(task=poll)) == 2
        await t.advance("1m")
        assert len(t.jobs(task=poll)) == 3


async def test_the_next_turn_is_given_as_much_time_as_this_one_was(app: App) -> None:
    @app.task
    async def poll(job: Job) -> None:
        job.again(after="1h")

    async with app.test() as t:
        await poll.using(delay="1m", expires="11m").aenqueue()
        await t.advance("1m")
        [waiting] = t.jobs(task=poll, state=State.READY)
        assert waiting.expires_at == t.now + HOUR + 10 * MINUTE
        await t.advance("3h")
        assert len(t.jobs(task=poll)) == 5


async def test_the_next_turn_has_the_headers_of_this_one_but_for_those_of_propolis(app: App) -> None:
    """What follows in a flow follows one turn: it must not be put once more by every later one."""
    seen = []

    @app.task
    async def poll(job: Job) -> None:
        seen.append(job.headers)
        job.again(after="1h")

    async with app.test() as t:
        await poll.using(headers={"trace": "1", "propolis-other": "2"}).aenqueue()
        await t.advance("1h")
    assert seen == [{"trace": "1", "propolis-other": "2"}, {"trace": "1"}]


async def test_a_scheduled_job_that_runs_again_keeps_its_instant_and_its_place(app: App) -> None:
    """With overlap="skip" its schedule waits until the chain has ended: so long work can go in pieces."""
    seen: list[datetime | None] = []

    @app.every("1h", overlap="skip")
    @app.task
    async def work(job: Job) -> None:
        seen.append(job.instant)
        if len(seen) < 4:
            job.again(after="40m")

    async with app.test() as t:
        await t.advance("5h")
    assert seen == [START + HOUR] * 4 + [START + 4 * HOUR, START + 5 * HOUR]


async def test_a_cancelled_chain_ends(app: App) -> None:
    @app.task
    async def poll(job: Job) -> None:
        job.again(after="10m", always=True)

    async with app.test() as t:
        await poll.aenqueue()
        await t.drain()
        [waiting] = t.jobs(task=poll, state=State.READY)
        assert await app.jobs.acancel(waiting.id) == [True]
        assert await t.advance("1h") == 0


async def test_snoozing_and_asking_for_a_retry_put_no_next_turn(app: App) -> None:
    runs = []

    @app.task(on_error=repeat(2, fixed("1m")))
    async def poll(job: Job) -> object:
        runs.append(job.attempt)
        job.again(after="1h", always=True)
        return Retry("not yet") if job.attempt < 3 else None

    async with app.test() as t:
        await poll.aenqueue()
        await t.advance("10m")
        assert len(t.jobs(task=poll)) == 2
    assert runs == [1, 2, 3]

"""Declaring tasks and enqueuing them."""

from __future__ import annotations

import asyncio
import enum
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest

from propolis import App, Discard, Job
from propolis.core.envelope import Envelope
from propolis.core.policy import Policy
from propolis.core.protocols import Durability, Receipt
from propolis.core.wire import decode
from propolis.engines.memory import MemoryEngine
from propolis.engines.sqlite import snapshot
from propolis.errors import (
    BadName,
    BadSetting,
    DurabilityTooLow,
    EngineUnavailable,
    JobFailed,
    QueueFull,
    ResultNotKept,
    UnknownEngine,
)
from propolis.strategies import dead, delete, exponential, repeat
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, State
from propolis.worker import Mode, Settings, Worker


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("memory://")
    yield app
    await app.aclose()


async def work(app: App) -> None:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()


async def envelope_of(app: App, job_id: str) -> Envelope:
    record = await app.jobs.aget(job_id)
    assert record is not None
    return decode(record.body)


# --- declaring ---------------------------------------------------------------------------


async def test_a_task_stays_a_plain_callable(app: App) -> None:
    @app.task
    def double(n: int) -> int:
        """Twice as much."""
        return n * 2

    @app.task(queue="other")
    async def triple(n: int) -> int:
        return n * 3

    assert double(4) == 8
    assert await triple(4) == 12
    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")


def test_names_are_those_of_module_and_function_unless_given(app: App) -> None:
    @app.task
    def one() -> None: ...

    @app.task(name="short")
    def two() -> None: ...

    assert one.name.endswith("test_app.test_names_are_those_of_module_and_function_unless_given.one")
    assert two.name == "short"


def test_two_tasks_cannot_share_a_name(app: App) -> None:
    @app.task(name="same")
    def one() -> None: ...

    with pytest.raises(BadSetting, match="same"):

        @app.task(name="same")
        def two() -> None: ...


def test_a_bad_queue_or_number_fails_at_declaration(app: App) -> None:
    with pytest.raises(BadName, match="queue"):
        app.task(queue="not a queue")(lambda: None)
    with pytest.raises(BadName, match="priority"):
        app.task(priority=1000)(lambda: None)
    with pytest.raises(BadSetting, match="max_crashes=0"):
        app.task(max_crashes=0)(lambda: None)


def test_a_timeout_that_cannot_be_kept_is_refused_at_declaration(app: App) -> None:
    """S0.15, S0.18: threads cannot be stopped."""

    def compute() -> None: ...

    with pytest.raises(BadSetting, match='isolate="process"'):
        app.task(timeout="1s")(compute)
    app.task(timeout="1s", abandon=True, name="a")(compute)
    app.task(timeout="1s", isolate="process", name="b")(compute)
    with pytest.raises(BadSetting, match="isolate"):
        app.task(isolate="submarine", name="c")(compute)  # type: ignore[call-overload]  # wrong on purpose


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "dead"},
        {"on_success": "delete"},
        {"on_success": dead},
        {"on_timeout": 3},
        {"on_error": {ValueError: "dead"}},
        {"on_error": {"ValueError": dead}},
    ],
)
def test_what_is_no_strategy_is_refused_at_declaration(app: App, wrong: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match="on_"):
        app.task(**wrong)(lambda: None)


@pytest.mark.parametrize("times", [0, 3])
def test_retries_is_short_for_a_strategy(app: App, times: int) -> None:
    @app.task(retries=times)
    async def call() -> None: ...

    echo = app.command("echo", ["echo"], retries=times)
    strategy = repeat(times, exponential("2s", cap="10m")).then(dead)
    assert call.options.policy.on_error == echo.options.policy.on_error == strategy
    assert call.options.policy.on_timeout == Policy().on_timeout


@pytest.mark.parametrize("on_error", [dead, {ValueError: dead}])
def test_retries_and_a_strategy_for_errors_are_too_much(app: App, on_error: Any) -> None:
    with pytest.raises(BadSetting, match=r"retries= and on_error= both decide .* give one of them"):
        app.task(retries=5, on_error=on_error)


def test_retries_cannot_be_fewer_than_none(app: App) -> None:
    with pytest.raises(BadSetting, match="retries=-1: give 0 or more"):
        app.task(retries=-1)


def test_only_functions_can_be_tasks(app: App) -> None:
    class Thing: ...

    with pytest.raises(BadSetting, match="function"):
        app.task(Thing)


def test_a_timeout_given_for_one_call_is_held_to_the_same_rule(app: App) -> None:
    @app.task
    def compute() -> None: ...

    with pytest.raises(BadSetting, match="thread"):
        compute.using(timeout="1s")


# --- enqueuing ---------------------------------------------------------------------------


async def test_an_enqueued_job_carries_its_arguments(app: App) -> None:
    """S0.3, S0.36: one line, good defaults."""

    @app.task
    async def send(to: str, *, copies: int = 1) -> None: ...

    handle = await send.aenqueue("bob", copies=2)
    envelope = await envelope_of(app, handle.id)
    assert bytes(envelope.args) == b'["bob"]'
    assert bytes(envelope.kwargs) == b'{"copies":2}'
    assert envelope.queue == "default"


@pytest.mark.parametrize("bad", [(), (1,), ("bob", "hi", "more"), (None,)])
async def test_wrong_arguments_are_a_type_error_here_and_not_in_the_worker(
    app: App, bad: tuple[object, ...]
) -> None:
    @app.task
    async def send(to: str, subject: str = "hi") -> None: ...

    with pytest.raises(TypeError):
        await send.aenqueue(*bad)  # type: ignore[arg-type]  # wrong on purpose
    assert await app.jobs.afind() == []


async def test_a_value_without_a_json_form_is_refused(app: App) -> None:
    @app.task
    async def take(thing: object) -> None: ...

    with pytest.raises(TypeError, match="no JSON form"):
        await take.aenqueue(object())


async def test_everything_may_be_said_differently_for_one_call(app: App) -> None:
    """S0.36: each default can be overridden."""

    @app.task
    async def send(to: str) -> None: ...

    call = send.using(
        delay="5m", priority=5, unique="mail:bob", queue="slow", expires="1h", job_id="mine", result_ttl="1h",
        timeout="10s", key="bob", on_error=repeat(2).then(delete), on_success=delete, headers={"trace": "1"},
    )  # fmt: skip
    handle = await call.aenqueue("bob")
    record = await app.jobs.aget("mine")
    assert record is not None
    assert handle.id == "mine"
    assert (record.queue, record.priority, record.unique, record.key) == ("slow", 5, "mail:bob", "bob")
    assert record.due_at - record.put_at == timedelta(minutes=5)
    assert record.expires_at is not None
    assert record.expires_at - record.put_at == timedelta(hours=1)
    envelope = decode(record.body)
    assert (envelope.timeout_ms, envelope.result_ttl_ms, envelope.chosen) == (10_000, 3_600_000, True)
    assert envelope.on_error == repeat(2).then(delete)
    assert envelope.headers == {"trace": "1"}


async def test_a_job_may_be_for_a_moment_in_the_far_future(app: App) -> None:
    """S2.18, S2.29: a year and more."""

    @app.task
    async def celebrate() -> None: ...

    moment = datetime(2100, 1, 1, tzinfo=UTC)
    handle = await celebrate.using(at=moment, expires=datetime(2100, 1, 2, tzinfo=UTC)).aenqueue()
    record = await handle.astatus()
    assert record is not None
    assert record.due_at == moment
    with pytest.raises(BadSetting, match="not both"):
        celebrate.using(at=moment, delay="1s")
    with pytest.raises(BadSetting, match="time zone"):
        await celebrate.using(at=datetime(2100, 1, 1)).aenqueue()  # noqa: DTZ001  # naive on purpose


async def test_a_chosen_id_and_a_unique_key_make_one_job(app: App) -> None:
    @app.task
    async def send(to: str) -> None: ...

    first = await send.using(unique="bob").aenqueue("bob")
    second = await send.using(unique="bob").aenqueue("bob")
    assert (first.created, second.created, second.id) == (True, False, first.id)


async def test_many_calls_become_few_puts(app: App) -> None:
    @app.task
    async def add(a: int, b: int = 1) -> None: ...

    handles = await add.many([(1, 2), (3,), 4]).aenqueue()
    bodies = [bytes((await envelope_of(app, handle.id)).args) for handle in handles]
    assert bodies == [b"[1,2]", b"[3]", b"[4]"]


async def test_of_many_calls_none_is_put_if_one_does_not_fit(app: App) -> None:
    @app.task
    async def add(a: int) -> None: ...

    with pytest.raises(TypeError, match="add"):
        await add.many([*range(2500), "three"]).aenqueue()

    assert await (await app.ready()).queues() == {}


async def test_many_calls_may_share_other_circumstances(app: App) -> None:
    @app.task
    async def add(a: int) -> None: ...

    [handle] = await add.using(queue="slow", delay="1h").many([1]).aenqueue()
    record = await app.jobs.aget(handle.id)
    assert record is not None
    assert record.queue == "slow"
    with pytest.raises(BadSetting, match="transactions"):
        await add.using(tx=object()).many([1]).aenqueue()


class CountingEngine(MemoryEngine):
    """Counts the puts, and has to be waited for like an engine at the other end of a wire."""

    def __init__(self) -> None:
        super().__init__()
        self.bundles: list[int] = []

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        self.bundles.append(len(jobs))
        await asyncio.sleep(0)
        if any(job.queue == "full" for job in jobs):
            raise QueueFull("full", 0)
        return await super().put(jobs, token=token)


@pytest.fixture
async def counting(app: App) -> CountingEngine:
    app.client._engine = engine = CountingEngine()
    return engine


async def test_concurrent_enqueues_are_coalesced(app: App, counting: CountingEngine) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    handles = await asyncio.gather(*(ping.aenqueue(n) for n in range(200)))
    assert len({handle.id for handle in handles}) == 200
    assert sum(counting.bundles) == 200
    assert len(counting.bundles) <= 3


async def test_what_an_iterator_makes_is_put_bundle_by_bundle(app: App, counting: CountingEngine) -> None:
    """So a million calls need the memory of a thousand."""
    made = 0

    def numbers() -> Iterator[int]:
        nonlocal made
        for n in range(2500):
            made = n + 1
            yield n

    @app.task
    async def ping(n: int) -> None: ...

    handles = ping.many(numbers()).astream()
    first = await anext(handles)
    assert (made, counting.bundles) == (1000, [1000])
    rest = [handle async for handle in handles]
    assert (made, counting.bundles) == (2500, [1000, 1000, 500])
    assert len({first.id, *(handle.id for handle in rest)}) == 2500
    assert len(await ping.many(numbers()).aenqueue()) == 2500


def test_handles_stream_in_synchronous_code_too(app: App) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    handles = ping.many(iter(range(1500))).stream()
    next(handles)
    assert app.queues.counts()["default"].put == 1000
    assert len(list(handles)) == 1499
    assert app.queues.counts()["default"].put == 1500
    app.close()


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_wrong_call_among_many_is_found_before_any_is_put_unless_they_are_made_as_needed(
    app: App, lazy: bool
) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    calls: list[Any] = [*range(1500), "wrong"]
    with pytest.raises(TypeError):
        await ping.many(iter(calls) if lazy else calls).aenqueue()
    queues = await app.queues.acounts()
    assert sum(queue.put for queue in queues.values()) == (1000 if lazy else 0)


class SlowlyOpened(MemoryEngine):
    """Is used by nobody before it is open, and fails to open so many times at first."""

    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults
        self.opens = 0
        self.open_now = False

    async def open(self) -> Self:
        self.opens += 1
        await asyncio.sleep(0.01)
        if self.opens <= self.faults:
            raise EngineUnavailable("not yet")
        self.open_now = True
        return await super().open()

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        assert self.open_now
        return await super().put(jobs, token=token)


async def test_many_who_come_first_wait_for_one_who_opens_the_engine(app: App) -> None:
    """In this thread and in another; one that is half open was taken for open."""
    app.client._engine = engine = SlowlyOpened(faults=0)

    @app.task
    async def ping(n: int) -> None: ...

    elsewhere = [asyncio.to_thread(ping.enqueue, n) for n in range(5)]
    await asyncio.gather(*elsewhere, *(ping.aenqueue(n) for n in range(20)))
    assert engine.opens == 1
    assert len(await app.jobs.afind()) == 25


async def test_waiting_for_the_loop_that_one_keeps_from_opening_the_engine_is_refused(app: App) -> None:
    """It would hang for ever."""
    app.client._engine = SlowlyOpened(faults=0)

    @app.task
    async def ping(n: int) -> None: ...

    opening = asyncio.create_task(app.ready())
    await asyncio.sleep(0)
    with pytest.raises(BadSetting, match="use the verbs that begin with a"):
        ping.enqueue(1)
    await opening
    await ping.aenqueue(1)


async def test_whoever_waits_for_an_engine_that_cannot_be_opened_hears_of_it(app: App) -> None:
    app.client._engine = engine = SlowlyOpened(faults=1)
    answers = await asyncio.gather(*(app.ready() for _ in range(3)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [EngineUnavailable] * 3
    assert engine.opens == 1
    assert await app.ready() is engine


async def test_of_those_who_wait_for_the_engine_the_next_opens_it_if_the_first_is_stopped(app: App) -> None:
    app.client._engine = engine = SlowlyOpened(faults=0)
    first, second = (asyncio.create_task(app.ready()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second is engine
    assert engine.opens == 2


async def test_one_bad_job_of_a_bundle_fails_alone(app: App, counting: CountingEngine) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    calls = [ping.using(queue="full" if n == 3 else "default").aenqueue(n) for n in range(6)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(answer, QueueFull) for answer in answers] == [n == 3 for n in range(6)]
    assert len(await app.jobs.afind()) == 5


async def test_a_value_that_cannot_be_sent_is_its_callers_error_alone(
    app: App, counting: CountingEngine
) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    odd: Any = {"a": object()}
    calls = [(ping.using(headers=odd) if n == 3 else ping).aenqueue(n) for n in range(1500)]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, BaseException)] == [3]


async def test_a_caller_that_gives_up_disturbs_no_other(app: App, counting: CountingEngine) -> None:
    @app.task
    async def ping(n: int) -> None: ...

    impatient = asyncio.create_task(ping.aenqueue(1))
    patient = asyncio.create_task(ping.aenqueue(2))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).created
    with pytest.raises(asyncio.CancelledError):
        await impatient


# --- from synchronous code ---------------------------------------------------------------


def test_synchronous_code_enqueues_looks_and_cancels(tmp_path: Path) -> None:
    """S1.20: what fails raises; sync and async."""
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def send(to: str) -> None: ...

    handle = send.enqueue("bob")
    status = handle.status()
    assert status is not None
    assert status.state is State.READY
    assert len(send.many(["eve", "joe"]).enqueue()) == 2
    assert app.queues.counts()["default"].ready == 3
    assert handle.cancel() is True
    assert app.jobs.find(Filter(state=State.CANCELLED))[0].id == handle.id
    app.close()
    assert app.queues.counts()["default"].ready == 2  # used again, it opens again
    app.close()


def test_threads_may_enqueue_at_once(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def ping(n: int) -> None: ...

    async def from_threads() -> None:
        await asyncio.gather(*(asyncio.to_thread(ping.enqueue, n) for n in range(30)))

    asyncio.run(from_threads())
    assert app.queues.counts()["default"].ready == 30
    app.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from 3.12 on, forking with threads warns
def test_after_a_fork_the_app_opens_an_engine_of_its_own(tmp_path: Path) -> None:
    """F48."""
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def ping() -> None: ...

    ping.enqueue()
    child = os.fork()
    if child == 0:
        ping.enqueue()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert app.queues.counts()["default"].ready == 2
    app.close()


# --- results -----------------------------------------------------------------------------


async def test_a_kept_result_comes_back_as_what_it_was(app: App) -> None:
    """S0.44."""

    @app.task(result_ttl="1h")
    async def when(day: int) -> datetime:
        return datetime(2026, 1, day, tzinfo=UTC)

    handle = await when.aenqueue(5)
    waiting = asyncio.create_task(handle.aresult(timeout="10s"))
    await work(app)
    assert await waiting == datetime(2026, 1, 5, tzinfo=UTC)


async def test_a_result_that_nobody_keeps_is_said_to_be_gone(app: App) -> None:
    @app.task
    async def forget() -> int:
        return 1

    handle = await forget.aenqueue()
    await work(app)
    with pytest.raises(ResultNotKept, match="result_ttl"):
        await handle.aresult(timeout="1s")


async def test_the_result_of_a_dead_job_is_its_error(app: App) -> None:
    @app.task(result_ttl="1h", on_error=dead)
    async def fail() -> int:
        raise ValueError("no luck")

    handle = await fail.aenqueue()
    await work(app)
    with pytest.raises(JobFailed, match="ValueError: no luck"):
        await handle.aresult(timeout="1s")


async def test_waiting_for_a_result_ends(app: App) -> None:
    @app.task(result_ttl="1h")
    async def later() -> int:
        return 1

    handle = await later.aenqueue()
    with pytest.raises(TimeoutError):
        await handle.aresult(timeout="10ms")


# --- the engine behind -------------------------------------------------------------------


async def test_a_floor_of_durability_is_enforced_at_first_use() -> None:
    app = App("memory://", durability=Durability.PROCESS)

    @app.task
    async def ping() -> None: ...

    with pytest.raises(DurabilityTooLow):
        await ping.aenqueue()


def test_an_unknown_engine_is_a_clear_error() -> None:
    with pytest.raises(UnknownEngine, match="sqlite://"):
        App("carrier-pigeon://roof")


async def test_a_job_may_join_the_callers_transaction(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def ping() -> None: ...

    await ping.aenqueue()
    mine = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
    mine.execute("BEGIN IMMEDIATE")
    await ping.using(tx=mine).aenqueue()
    mine.execute("ROLLBACK")
    mine.close()
    assert (await app.queues.acounts())["default"].ready == 1
    await app.aclose()


def test_a_job_joins_the_callers_transaction_in_its_own_thread(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    def ping(number: int) -> None: ...

    ping.enqueue(0)
    mine = sqlite3.connect(tmp_path / "jobs.db")  # which refuses every other thread
    ping.using(tx=mine).enqueue(1)
    mine.rollback()
    handles = ping.using(tx=mine, unique="u").many([2, 3]).enqueue()
    assert app.queues.counts()["default"].ready == 1
    mine.commit()
    mine.close()
    assert [handle.created for handle in handles] == [True, False]
    assert app.queues.counts()["default"].ready == 2
    app.close()


async def test_an_engine_without_transactions_says_so(app: App) -> None:
    @app.task
    async def ping() -> None: ...

    with pytest.raises(BadSetting, match="transactions"):
        await ping.using(tx=object()).aenqueue()


# --- operating ---------------------------------------------------------------------------


async def test_the_fate_of_jobs_is_in_the_operators_hand(app: App) -> None:
    """S1.19, S2.10, S2.17: pause, replay, purge."""

    @app.task(on_error=dead)
    async def fail() -> None:
        raise Discard("never")

    @app.task(queue="other")
    async def fine() -> None: ...

    broken = [(await fail.aenqueue()).id for _ in range(3)]
    await app.queues.apause("other")
    assert await app.queues.apause("other") is False
    handle = await fine.aenqueue()
    await work(app)
    assert "paused" in (await app.jobs.aexplain(handle.id))[0]
    assert {record.id for record in await app.jobs.afind(Filter(state=State.DEAD))} == set(broken)
    assert await app.jobs.areplay(broken[0]) == [True]
    assert await app.jobs.areplay_all(Filter(state=State.DEAD)) == 2
    await work(app)
    assert await app.jobs.apurge(Filter(state=State.DEAD)) == 3
    assert await app.queues.aresume("other") is True
    assert await app.queues.ablock("other") is True
    assert [rule.kind.value for rule in await app.queues.arules()] == ["block"]
    assert await app.queues.aunblock("other") is True
    assert await app.jobs.areschedule(handle.id, datetime(2100, 1, 1, tzinfo=UTC)) is True
    for moment in (datetime(2100, 1, 1), datetime(9999, 12, 31, tzinfo=UTC)):  # noqa: DTZ001
        with pytest.raises(BadSetting):
            await app.jobs.areschedule(handle.id, moment)
    assert await app.queues.adrop("other") == 1


async def test_types_defined_beside_a_local_task_are_found(app: App) -> None:
    class Colour(enum.Enum):
        RED = "red"

    @app.task
    async def bare(colour: Colour) -> None: ...

    @app.task(queue="other")
    async def declared(colour: Colour) -> None: ...

    for task in (bare, declared):
        handle = await task.aenqueue(Colour.RED)
        assert bytes((await envelope_of(app, handle.id)).args) == b'["red"]'


async def test_a_parameter_of_type_job_is_not_an_argument(app: App) -> None:
    @app.task(result_ttl="1h")
    async def who(job: Job, name: str) -> str:
        return f"{name} {job.attempt}"

    handle = await who.aenqueue("bob")
    await work(app)
    assert await handle.aresult(timeout="1s") == "bob 1"


def test_a_task_is_declared_once() -> None:
    """Otherwise the options of one of the two would be lost without a word."""
    app = App("memory://")

    @app.cron("@daily")
    async def nightly() -> None: ...

    with pytest.raises(BadSetting, match=r"above @app\.task"):
        app.task(queue="mail")(nightly)


@pytest.mark.parametrize("level", ["process", Durability.POWER])
async def test_a_floor_of_durability_is_a_level_or_its_name(level: Durability | str) -> None:
    with pytest.raises(DurabilityTooLow):
        await App("memory://", durability=level).ready()


def test_an_unknown_level_of_durability_fails_at_once() -> None:
    with pytest.raises(BadSetting, match="'power'"):
        App("memory://", durability="strong")


async def test_a_list_goes_on_until_it_has_as_many_as_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: what one call does not find, the next ones look for."""
    monkeypatch.setattr(snapshot, "COUNTED", 10)
    app = App(f"sqlite:///{tmp_path / 'jobs.db'}")
    await app.client.aput_many([a_job(task="other") for _ in range(25)])
    await app.client.aput_many(wanted := [a_job(task="wanted") for _ in range(25)])

    for limit in (1, 20, 100):
        found = await app.jobs.afind(Filter(task="wanted"), limit=limit)
        assert [info.id for info in found] == [job.id for job in wanted[:limit]]
    await app.aclose()

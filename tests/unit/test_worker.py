"""The worker on the memory engine: what becomes of jobs, and of the worker itself."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Annotated, Any

import pytest

from skep import (
    App,
    Depends,
    Failure,
    Filter,
    Job,
    Retry,
    Snooze,
    State,
    archive,
    current_job,
    dead,
    delete,
    fixed,
    repeat,
    repeat_forever,
)
from skep.brokers.memory import MemoryBroker
from skep.errors import BadSetting, EngineUnavailable, StorageBroken
from skep.job import Done, Lease, Progress, Record
from skep.job import Job as Envelope
from skep.registry import Next
from skep.testing.make import a_job
from skep.worker import Lane, Mode, Settings, Worker
from skep.worker.pump import Pump
from skep.worker.slots import MOST_BYTES, SlotLane

AT_ONCE = repeat(3, fixed(0))


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("memory://")
    yield app
    await app.aclose()


async def work(app: App, **settings: Any) -> Worker:
    worker = Worker(app, Settings(**{"mode": Mode.UNTIL_EMPTY, **settings}))
    await worker.run()
    return worker


@asynccontextmanager
async def working(app: App, **settings: Any) -> AsyncIterator[Worker]:
    """A worker that serves for as long as the block lasts."""
    worker = Worker(app, Settings(**settings))
    running = asyncio.create_task(worker.run())
    await worker.started.wait()
    try:
        yield worker
    finally:
        worker.stop()
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)  # a look at a state that no event tells


async def until_state(app: App, job_id: str, state: State) -> None:
    async with asyncio.timeout(20):
        while (await record_of(app, job_id)).state is not state:
            await asyncio.sleep(0.005)  # a look at a state that no event tells


async def record_of(app: App, job_id: str) -> Record:
    record = await app.jobs.aget(job_id)
    assert record is not None
    return record


# --- verdicts and strategies -------------------------------------------------------------


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_verdicts_mean_the_same_returned_or_raised(app: App, raised: bool, is_async: bool) -> None:
    """S1.4: Retry, Failure and Snooze."""
    runs: Counter[str] = Counter()
    verdicts = {"retry": Retry("busy", after=0), "failure": Failure("never"), "snooze": Snooze(0)}

    def say(which: str) -> object:
        runs[which] += 1
        if runs[which] > 1:
            return None
        if raised:
            raise verdicts[which]
        return verdicts[which]

    async def say_async(which: str) -> object:
        return say(which)

    task = app.task(on_success=archive, name="say")(say_async if is_async else say)
    ids = {which: (await task.aenqueue(which)).id for which in verdicts}
    await work(app)

    retried, failed, snoozed = [await record_of(app, ids[which]) for which in ("retry", "failure", "snooze")]
    assert (retried.state, retried.attempts, retried.failures) == (State.DONE, 2, 1)
    assert [event.kind for event in retried.history] == ["retried"]
    assert (failed.state, failed.attempts, failed.reason) == (State.DEAD, 1, "failed")
    assert failed.error is not None
    assert failed.error.message == "never"
    assert (snoozed.state, snoozed.attempts, snoozed.failures) == (State.DONE, 1, 0)


@pytest.mark.parametrize(("times", "runs"), [(0, 1), (1, 2), (3, 4)])
async def test_repeat_runs_once_more_than_it_repeats(app: App, times: int, runs: int) -> None:
    """S0.28, S1.9, S3.25."""
    seen = []

    @app.task(on_error=repeat(times, fixed(0)).then(dead))
    async def fail() -> None:
        seen.append(1)
        raise ValueError("no")

    handle = await fail.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert len(seen) == runs
    assert (record.state, record.attempts, record.failures) == (State.DEAD, runs, runs)
    assert record.error is not None
    assert (record.error.type, record.error.message) == ("ValueError", "no")
    assert "raise ValueError" in record.error.traceback


@pytest.mark.parametrize(("ending", "state"), [(dead, State.DEAD), (archive, State.DEAD), (delete, None)])
async def test_the_ending_decides_where_a_failed_job_goes(app: App, ending: Any, state: State | None) -> None:
    """S0.26, S3.27."""

    @app.task(on_error=ending)
    async def fail() -> None:
        raise ValueError

    handle = await fail.aenqueue()
    await work(app)
    record = await app.jobs.aget(handle.id)
    assert (record.state if record else None) == state


async def test_each_kind_of_error_may_have_its_own_strategy(app: App) -> None:
    seen: Counter[str] = Counter()

    @app.task(on_error={LookupError: AT_ONCE, ValueError: dead})
    async def fail(kind: str) -> None:
        seen[kind] += 1
        raise {"key": KeyError, "value": ValueError}[kind]("x")

    await fail.aenqueue("key")
    await fail.aenqueue("value")
    await work(app)
    assert seen == {"key": 4, "value": 1}


async def test_a_job_may_bring_its_own_strategies(app: App) -> None:
    @app.task
    async def fine() -> None: ...

    handle = await fine.using(on_success=archive.keep("1h")).aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.state is State.DONE
    assert record.keep_until is not None
    assert record.ended_at is not None
    assert record.keep_until - record.ended_at == timedelta(hours=1)


async def test_failures_are_in_the_log(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks there first finds what failed, how often, and where."""

    @app.task(name="mail.send", on_error=repeat(1, fixed(0)))
    async def send(address: str) -> None:
        raise ValueError(f"no such address: {address}")

    @app.task(name="mail.read")
    async def read() -> None: ...

    await read.aenqueue()
    handle = await send.aenqueue("nobody")
    with caplog.at_level(logging.WARNING, "skep.worker"):
        await work(app)
    again, dead = caplog.records
    assert again.levelname == "WARNING"
    assert again.getMessage() == (
        f"mail.send {handle.id}, attempt 1, failed and runs again at once: "
        f"ValueError: no such address: nobody"
    )
    assert dead.levelname == "ERROR"
    assert f"mail.send {handle.id}, attempt 2, is dead (failed): ValueError" in dead.getMessage()
    assert "in send" in dead.getMessage()


async def test_retries_may_run_from_another_queue(app: App) -> None:
    """S3.27."""

    @app.task(on_error=AT_ONCE.on("slow-lane"))
    async def fail_once(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError

    handle = await fail_once.using(on_success=archive).aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).queue == "slow-lane"
    await work(app, lanes=[Lane({"slow-lane": 1}, 1)])
    assert (await record_of(app, handle.id)).state is State.DONE


async def test_a_custom_backoff_is_asked_for_each_delay(app: App) -> None:
    asked = []

    def backoff(repetition: int) -> float:
        asked.append(repetition)
        return 0

    @app.task(on_error=repeat(2, backoff))
    async def fail() -> None:
        raise ValueError

    await fail.aenqueue()
    await work(app)
    assert asked == [1, 2]


async def test_repeat_forever_goes_on_until_it_works(app: App) -> None:
    @app.task(on_error=repeat_forever(fixed(0)))
    async def stubborn(job: Job) -> None:
        if job.attempt < 30:
            raise ValueError

    handle = await stubborn.using(on_success=archive).aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).attempts == 30


async def test_a_returned_error_value_is_a_result(app: App) -> None:
    """S2.15: what is returned is done, whatever it says, unless it is a verdict."""

    @app.task(result_ttl="1h")
    async def report() -> dict[str, str]:
        return {"error": "no such page"}

    handle = await report.aenqueue()
    await work(app)
    assert await handle.aresult(timeout="1s") == {"error": "no such page"}


async def test_a_result_that_cannot_be_kept_is_an_error_and_not_a_crash(app: App) -> None:
    @app.task(result_ttl="1h")
    async def strange() -> object:
        return object()

    handle = await strange.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.state is State.DEAD
    assert record.error is not None
    assert "cannot be kept" in record.error.message


class Odd(BaseException):
    """Somebody's own idea of an exception."""


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Odd()]
)
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_nothing_that_a_job_raises_stops_the_worker(
    app: App, error: BaseException, is_async: bool
) -> None:
    """S0.22, S1.10."""

    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    @app.task(result_ttl="1h")
    async def fine() -> str:
        return "fine"

    task = app.task(on_error=dead, name="fail")(fail_async if is_async else fail)
    first = await task.aenqueue()
    second = await fine.aenqueue()
    await work(app)
    assert (await record_of(app, first.id)).state is State.DEAD
    assert await second.aresult(timeout="1s") == "fine"


@pytest.mark.parametrize("backoff", [lambda n: 1 / 0, lambda n: -1, lambda n: "soon"])
async def test_a_backoff_that_fails_buries_the_job_and_not_the_slot(
    app: App, backoff: Callable[[int], Any]
) -> None:
    @app.task(on_error=repeat(3, backoff))
    async def fail() -> None:
        raise ValueError

    @app.task(result_ttl="1h")
    async def fine() -> str:
        return "fine"

    first, second = await fail.aenqueue(), await fine.aenqueue()
    await work(app, lanes=[Lane({"default": 1}, 1)])
    assert (await record_of(app, first.id)).state is State.DEAD
    assert await second.aresult(timeout="1s") == "fine"


@pytest.mark.parametrize("verdict", [Failure, Retry])
async def test_a_verdict_may_carry_anything_as_its_reason(
    app: App, verdict: Callable[[object], Exception]
) -> None:
    @app.task(on_error=dead)
    async def fail() -> None:
        raise verdict(ValueError("lone \udc80 surrogate"))

    handle = await fail.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.error is not None
    assert record.error.message.startswith("lone ")


async def test_what_one_call_says_of_errors_comes_before_the_rules_of_the_task(app: App) -> None:
    @app.task(on_error={ValueError: AT_ONCE})
    async def fail() -> None:
        raise ValueError

    handle = await fail.using(on_error=dead).aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).attempts == 1


async def test_a_job_that_cancels_itself_takes_no_slot_with_it(app: App) -> None:
    @app.task(name="self", on_error=dead)
    async def cancels_itself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(60)

    @app.task(result_ttl="1h")
    async def fine() -> str:
        return "fine"

    first, second = await cancels_itself.aenqueue(), await fine.aenqueue()
    await work(app, lanes=[Lane({"default": 1}, 1)])
    assert (await record_of(app, first.id)).state is State.DEAD
    assert await second.aresult(timeout="1s") == "fine"


async def test_work_that_was_only_prepared_is_not_done(app: App) -> None:
    """A coroutine behind a plain decorator, a generator: their bodies would never run."""

    async def real() -> None: ...

    def decorated() -> Any:
        return real()

    def generating() -> Any:
        return (n for n in range(3))

    handles = [
        await app.task(on_error=dead, name="decorated")(decorated).aenqueue(),
        await app.task(on_error=dead, name="generating")(generating).aenqueue(),
    ]
    await work(app)
    for handle in handles:
        record = await record_of(app, handle.id)
        assert record.error is not None
        assert "that nobody" in record.error.message

    with pytest.raises(BadSetting, match="generator"):

        @app.task
        def generator() -> Iterator[int]:
            yield 1


async def test_a_hook_that_takes_long_does_not_cost_a_job_its_success(app: App) -> None:
    """The run is over: neither its timeout nor the shutdown may throw its outcome away."""

    @app.on_finished
    async def slow(job: Job, result: object) -> None:
        await asyncio.sleep(0.3)

    @app.task(timeout="50ms", on_success=archive)
    async def quick() -> None: ...

    handle = await quick.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).state is State.DONE


async def test_a_hook_that_hangs_before_the_run_is_stopped_with_it(app: App) -> None:
    @app.on_fetched
    async def hang(job: Job) -> None:
        if job.attempt == 1:
            await asyncio.sleep(60)

    @app.task(timeout="50ms", on_success=archive, on_timeout=AT_ONCE)
    async def quick() -> None: ...

    handle = await quick.aenqueue()
    await work(app, lanes=[Lane({"default": 1}, 1)])
    record = await record_of(app, handle.id)
    assert (record.state, record.attempts) == (State.DONE, 2)


# --- what cannot be run ------------------------------------------------------------------


async def test_unknown_tasks_and_wrong_arguments_are_shelved_and_replayable(app: App) -> None:
    """S0.24, S1.17, S1.21, S2.21, S3.23, F41: kept with the reason, and the queue moves on."""

    @app.task
    async def greet(name: str) -> None: ...

    unknown = a_job(task="not.here")
    wrong = a_job(5, task=greet.name)
    await (await app.ready()).put([unknown, wrong, greet.job("bob")])
    await work(app)
    shelf = await app.jobs.afind(Filter(reason="broken"))
    told = {record.id: record.error.message for record in shelf if record.error}
    assert "does the worker import its module" in told[unknown.id]
    assert "do not fit" in told[wrong.id]

    ran = []

    @app.task(name="not.here")
    async def now_here() -> None:
        ran.append(1)

    await app.jobs.areplay(unknown.id)
    await work(app)
    assert ran == [1]


async def test_bytes_that_are_no_job_are_shelved_as_they_came(app: App) -> None:
    """S1.17: raw bytes kept, worker unharmed."""
    job = a_job()
    engine = await app.ready()
    await engine.put([job])
    engine._entries[job.id].body = b"\x80\x04not json"  # type: ignore[attr-defined]  # as a foreign hand would
    await work(app)
    record = await record_of(app, job.id)
    assert (record.reason, record.body) == ("broken", b"\x80\x04not json")


# --- context, hooks, middleware, dependencies --------------------------------------------


async def test_a_job_knows_itself(app: App) -> None:
    seen: list[Any] = []

    @app.task
    def tell(n: int, job: Job, m: int) -> None:
        seen.append(
            (n, m, job.attempt, job.queue, job.headers, job.batch, job.stopping, current_job() is job)
        )
        seen.append((job.id, job.task, job.fence, job.app, job.put_at))

    handle = await tell.using(headers={"a": "b"}).aenqueue(1, 2)  # type: ignore[call-arg]  # not first
    await work(app)
    assert seen[0] == (1, 2, 1, "default", {"a": "b"}, None, False, True)
    assert seen[1][:2] == (handle.id, tell.name)
    assert seen[1][3] is app


async def test_progress_and_log_lines_are_kept_and_bounded(app: App) -> None:
    @app.task(on_success=archive)
    async def long(job: Job) -> None:
        for n in range(250):
            job.log(f"line {n}")
        job.progress(1, 2)
        job.progress(2, 2, "done")
        job.log("x" * 10_000)

    handle = await long.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.progress is not None
    assert (record.progress.done, record.progress.total, record.progress.note) == (2, 2, "done")
    assert len(record.log) == 100
    assert record.log[-2] == "line 249"
    assert len(record.log[-1]) == 2000


async def test_a_plain_function_tells_from_its_thread(app: App) -> None:
    @app.task(on_success=archive)
    def long(job: Job) -> None:
        for n in range(5000):
            job.log(f"line {n} \udc80")
            job.progress(n, 5000)

    handle = await long.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.progress == Progress(4999, 5000)
    assert [line.split()[1] for line in record.log] == [str(n) for n in range(4900, 5000)]


@pytest.mark.parametrize("done", [float("nan"), float("inf"), "half"])
async def test_progress_that_is_no_number_is_the_jobs_own_error(app: App, done: Any) -> None:
    @app.task(on_error=dead)
    async def vague(job: Job) -> None:
        job.progress(done, 3)

    handle = await vague.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert record.error is not None
    assert "takes numbers" in record.error.message


async def test_progress_shows_while_the_job_runs(app: App) -> None:
    going = asyncio.Event()

    @app.task
    async def slow(job: Job) -> None:
        job.progress(1, 3)
        await going.wait()

    handle = await slow.aenqueue()
    async with working(app) as worker:
        await until(lambda: not worker._pump._notes and bool(worker._running()))
        assert (await record_of(app, handle.id)).progress == Progress(1, 3)
        going.set()


async def test_hooks_hear_in_order(app: App) -> None:
    """S0.32, S3.26: fetched, then finished, error or timeout, then dead."""
    heard: list[tuple[object, ...]] = []
    app.on_fetched(lambda job: heard.append(("fetched", job.task)))

    @app.on_finished
    async def finished(job: Job, result: object) -> None:
        heard.append(("finished", result))

    app.on_error(lambda job, error: heard.append(("error", str(error))))
    app.on_timeout(lambda job: heard.append(("timeout",)))
    app.on_dead(lambda job, reason: heard.append(("dead", reason)))

    @app.task(name="fine")
    async def fine() -> int:
        return 5

    @app.task(name="fail", on_error=repeat(1, fixed(0)))
    async def fail() -> None:
        raise ValueError("no")

    @app.task(name="slow", timeout="10ms", on_timeout=dead)
    async def slow() -> None:
        await asyncio.sleep(60)

    for task in (fine, fail, slow):
        await task.aenqueue()
        await work(app, lanes=[Lane({"default": 1}, 1)])
    assert heard == [
        ("fetched", "fine"), ("finished", 5),
        ("fetched", "fail"), ("error", "no"), ("fetched", "fail"), ("error", "no"), ("dead", "failed"),
        ("fetched", "slow"), ("timeout",), ("dead", "timeout"),
    ]  # fmt: skip


async def test_hooks_hear_what_happened_and_nothing_else(app: App) -> None:
    """A snooze is no error; a result that cannot be kept is one, and no success."""
    heard: list[str] = []
    app.on_finished(lambda job, result: heard.append(f"finished {job.task}"))
    app.on_error(lambda job, error: heard.append(f"error {job.task}"))
    app.on_dead(lambda job, reason: heard.append(f"dead {job.task}"))

    @app.task(name="sleepy")
    async def sleepy(job: Job) -> None:
        if not job.lease.fence % 2 or job.fence > 2:
            return
        raise Snooze(0)

    @app.task(name="odd", result_ttl="1h")
    async def odd() -> object:
        return object()

    await sleepy.aenqueue()
    await work(app)
    await odd.aenqueue()
    await work(app)
    assert heard == ["finished sleepy", "error odd", "dead odd"]


async def test_a_hook_that_raises_changes_nothing(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """S0.33, S3.26."""

    @app.on_finished
    def explode(job: Job, result: object) -> None:
        raise RuntimeError("hook")

    @app.task(on_success=archive)
    async def fine() -> None: ...

    handle = await fine.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).state is State.DONE
    assert "the hook" in caplog.text


async def test_middleware_wraps_the_run_the_first_outermost(app: App) -> None:
    """S3.33."""
    seen = []

    @app.middleware
    async def outer(job: Job, call: Next) -> object:
        seen.append("outer in")
        result = await call()
        seen.append("outer out")
        return f"<{result}>"

    @app.middleware
    async def inner(job: Job, call: Next) -> object:
        seen.append("inner")
        return await call()

    @app.task(result_ttl="1h")
    def greet() -> str:
        seen.append("task")
        return "hi"

    handle = await greet.aenqueue()
    await work(app)
    assert seen == ["outer in", "inner", "task", "outer out"]
    assert await handle.aresult(timeout="1s") == "<hi>"


async def test_dependencies_are_made_and_cleaned_up(app: App) -> None:
    """S1.23: from the state that start-up hooks have left."""
    seen = []

    @app.on_startup
    async def connect(state: Any) -> None:
        state.pool = "pool"

    @app.on_shutdown
    def disconnect(state: Any) -> None:
        seen.append("shut down")

    def pool(job: Job) -> str:
        return str(job.state.pool)

    async def session(pool: Annotated[str, Depends(pool)]) -> AsyncIterator[str]:
        seen.append("session opened")
        yield f"session of {pool}"
        seen.append("session closed")

    def cursor() -> Iterator[str]:
        yield "cursor"
        seen.append("cursor closed")

    @app.task
    async def query(
        sql: str,
        session: str = Depends(session),  # type: ignore[assignment]  # the marker is no str
        cursor: str = Depends(cursor),  # type: ignore[assignment]  # the marker is no str
    ) -> None:
        seen.append(f"{sql} {session} {cursor}")

    await query.aenqueue("select")
    await work(app)
    assert seen == [
        "session opened",
        "select session of pool cursor",
        "cursor closed",
        "session closed",
        "shut down",
    ]


async def test_a_start_up_hook_that_raises_stops_the_worker(app: App) -> None:
    @app.on_startup
    def explode(state: Any) -> None:
        raise RuntimeError("no database")

    with pytest.raises(RuntimeError, match="no database"):
        await work(app)


async def test_jobs_enqueue_further_jobs(app: App) -> None:
    """S0.19, S0.39: from within, with the same app; and by emission, when they are done."""
    seen: Counter[str] = Counter()

    @app.task
    async def leaf() -> None:
        seen["leaf"] += 1

    @app.task(on_error=repeat(1, fixed(0)))
    async def parent(job: Job) -> None:
        seen["parent"] += 1
        await leaf.aenqueue()
        job.emit(leaf)
        job.emit(leaf.using(job_id="mine"))
        if job.attempt == 1:
            raise ValueError  # what was emitted is not put

    await parent.aenqueue()
    await work(app)
    assert seen == {"parent": 2, "leaf": 4}


async def test_a_job_that_fans_out_to_ten_thousand(app: App) -> None:
    """S0.39."""
    seen: Counter[str] = Counter()

    @app.task
    async def leaf(n: int) -> None:
        seen["leaf"] += 1

    @app.task
    async def parent() -> None:
        await leaf.many(range(10_000)).aenqueue()

    await parent.aenqueue()
    await work(app)
    assert seen["leaf"] == 10_000


async def test_a_periodic_job_puts_itself_again(app: App) -> None:
    """S0.37: their pattern works, and a retried turn makes no second chain."""
    turns: list[int] = []

    @app.task(on_error=repeat(5, fixed(0)))
    async def turn(job: Job, n: int) -> None:
        if n < 5:
            job.emit(turn.using(delay=0), n + 1)
        if job.attempt == 1 and n == 2:
            raise ValueError
        turns.append(n)

    await turn.aenqueue(0)
    await work(app)
    assert turns == [0, 1, 2, 3, 4, 5]


# --- timeouts, cancelling, stuck ---------------------------------------------------------


async def test_a_coroutine_is_cancelled_at_its_timeout(app: App) -> None:
    """S0.15, S0.27, S2.25: stopped by the worker's own clock."""
    cancelled = []

    @app.task(timeout="20ms", on_timeout=repeat(1, fixed(0)).then(archive))
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    handle = await slow.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert (record.state, record.reason, record.attempts) == (State.DEAD, "timeout", 2)
    assert len(cancelled) == 2


async def test_swallowing_broad_exceptions_does_not_swallow_the_timeout(app: App) -> None:
    """S0.18."""

    @app.task(timeout="20ms", on_timeout=dead)
    async def greedy() -> str:
        try:
            await asyncio.sleep(60)
        except Exception:
            return "not caught"
        return "slept"

    @app.task(timeout="20ms", on_timeout=dead)
    async def greedier() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "caught, but late"
        return "slept"

    handles = [await greedy.aenqueue(), await greedier.aenqueue()]
    await work(app)
    for handle in handles:
        assert (await record_of(app, handle.id)).reason == "timeout"


async def test_a_coroutine_that_will_not_stop_is_left_behind(app: App) -> None:
    """F10: reported as stuck, its slot replaced, its outcome recorded all the same."""
    release = asyncio.Event()

    @app.task(name="deaf", timeout="10ms", on_timeout=dead)
    async def deaf() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    @app.task(result_ttl="1h")
    async def fine() -> str:
        return "fine"

    handle = await deaf.aenqueue()
    settings = {"lanes": [Lane({"default": 1}, 1)], "stuck_after": timedelta(milliseconds=20)}
    async with working(app, **settings) as worker:
        await until(lambda: worker.stuck == 1)
        assert await (await fine.aenqueue()).aresult(timeout="10s") == "fine"  # the only slot is usable again
        assert (await record_of(app, handle.id)).reason == "timeout"
        release.set()


async def test_a_hundred_stuck_threads_leak_no_slot(app: App) -> None:
    """F10, S1.11: each is fenced and replaced; when they end at last, so do their threads."""
    release = threading.Event()
    before = threading.active_count()

    @app.task(timeout="5ms", abandon=True, on_timeout=dead)
    def deaf() -> None:
        release.wait(60)

    await deaf.many([()] * 100).aenqueue()
    worker = await work(app, lanes=[Lane({"default": 1}, 10)])
    assert worker.lost == 0
    assert len(await app.jobs.afind(Filter(reason="timeout"), limit=200)) == 100
    release.set()
    await until(lambda: threading.active_count() <= before + 1)


async def test_a_running_job_is_cancelled_by_an_operator(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def slow() -> None:
        started.set()
        await asyncio.sleep(60)

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)):
        await started.wait()
        assert await handle.acancel() is True
        await until_state(app, handle.id, State.CANCELLED)


async def test_a_thread_may_ask_whether_it_should_stop(app: App) -> None:
    started = threading.Event()

    @app.task
    def slow(job: Job) -> None:
        started.set()
        while not job.stopping:
            time.sleep(0.002)

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)):
        await until(started.is_set)
        await handle.acancel()
        await until_state(app, handle.id, State.CANCELLED)


# --- leases ------------------------------------------------------------------------------


class Looked(MemoryBroker):
    """Counts the looks for jobs, and remembers which one found some."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.found = 0

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        self.looks += 1
        number = self.looks
        leases = await super().lease(wants, span=span, holder=holder, limit=limit)
        self.found = number if leases else self.found
        return leases


async def test_a_job_starts_before_its_worker_looks_for_more(app: App) -> None:
    """It was alone, so the next look is in no hurry, and would delay its start."""
    app._engine = engine = Looked()
    started = asyncio.Event()
    looks = 0

    @app.task
    async def note() -> None:
        nonlocal looks
        looks = engine.looks
        started.set()

    async with working(app):
        await note.aenqueue()
        async with asyncio.timeout(20):
            await started.wait()
    assert looks == engine.found > 0


async def test_a_job_of_many_leases_runs_once(app: App) -> None:
    """S0.14, S0.16, S1.13, S4.8, S4.26: renewed while it runs, and no longer."""
    runs = []

    @app.task(on_success=archive)
    async def long() -> None:
        runs.append(1)
        await asyncio.sleep(0.6)

    handle = await long.aenqueue()
    worker = await work(app, lease=timedelta(milliseconds=150))
    assert (len(runs), worker.lost) == (1, 0)
    assert (await record_of(app, handle.id)).history == ()
    assert not worker._keeper._held


async def test_a_blocked_event_loop_loses_no_lease(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """F05: the keeper has a thread of its own."""

    @app.task(on_success=archive)
    async def rude() -> None:
        time.sleep(0.8)  # noqa: ASYNC251  # rude on purpose

    handle = await rude.aenqueue()
    worker = await work(app, lease=timedelta(milliseconds=200))
    record = await record_of(app, handle.id)
    assert (record.state, record.attempts, record.crashes, worker.lost) == (State.DONE, 1, 0, 0)


async def test_a_lost_lease_stops_the_run_and_nothing_of_it_is_recorded(app: App) -> None:
    """S1.6, S4.10: the other run decides."""
    runs: list[str] = []
    lost = []
    app.on_lost(lambda job: lost.append(job.attempt))

    @app.task(on_success=archive)
    async def slow(job: Job) -> None:
        if job.attempt == 1:
            try:
                await asyncio.sleep(60)
            finally:
                runs.append("stopped")
        runs.append("done")

    handle = await slow.aenqueue()
    async with working(app, lease=timedelta(milliseconds=200)) as worker:
        await until(lambda: bool(worker._running()))
        [slot] = worker._running()
        assert slot.lease is not None
        await (await app.ready()).renew([slot.lease], span=timedelta(0))  # as if it had stalled
        await until_state(app, handle.id, State.DONE)
    record = await record_of(app, handle.id)
    assert runs == ["stopped", "done"]
    assert (record.attempts, record.crashes, lost) == (2, 1, [1])
    assert [event.kind for event in record.history] == ["crashed"]


# --- queues, slots, modes ----------------------------------------------------------------


async def test_a_slow_queue_does_not_disturb_a_fast_one(app: App) -> None:
    """S0.20: each queue has its own slots."""
    release = asyncio.Event()
    fast_done = []

    @app.task(queue="slow")
    async def slow() -> None:
        await release.wait()

    @app.task(queue="fast")
    async def fast(n: int) -> None:
        fast_done.append(n)

    await slow.many([()] * 10).aenqueue()
    async with working(app, lanes=[Lane({"slow": 1}, 2), Lane({"fast": 1}, 2)]):
        await fast.many(range(50)).aenqueue()
        await until(lambda: len(fast_done) == 50)
        assert (await app.queues.acounts())["slow"].running == 2
        release.set()


async def test_queues_that_share_slots_are_served_by_weight(app: App) -> None:
    order = []

    @app.task
    async def note(job: Job) -> None:
        order.append(job.queue)

    for queue in ("light", "heavy"):
        await note.using(queue=queue).many([()] * 300).aenqueue()
    lane = Lane({"light": 1, "heavy": 9}, 1)
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[lane]))
    firsts = Counter(
        next(iter(slot_lane.wants(1))) for slot_lane in [await _lane_of(worker)] for _ in range(1000)
    )
    assert 800 < firsts["heavy"] < 980
    await worker.run()
    assert Counter(order) == {"light": 300, "heavy": 300}


async def _lane_of(worker: Worker) -> SlotLane:
    return SlotLane(
        worker._settings.lanes[0], run=worker._run_one, settle=worker._ended, clock=time.monotonic
    )


async def test_large_jobs_are_leased_ahead_by_the_bytes_and_not_by_the_hundred(app: App) -> None:
    most = 0

    @app.task
    async def large(text: str) -> None:
        nonlocal most
        most = max(most, len(worker._lanes[0].buffer))

    await large.many(["x" * 250_000] * 100).aenqueue()
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, 2)]))
    await worker.run()
    assert 2 < most <= MOST_BYTES / 250_000 + 2


async def watch_exchanges(app: App, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the engine, as over a wire: the bytes leave a turn of the loop later."""
    engine, seen = await app.ready(), list[str]()
    for verb in ("lease", "exchange"):
        real = getattr(engine, verb)

        async def over_a_wire(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            seen.append("asked")
            await asyncio.sleep(0)
            seen.append("sent")
            return await real(*args, **kwargs)

        monkeypatch.setattr(engine, verb, over_a_wire)
    return seen


async def test_the_next_bundle_is_asked_for_before_the_last_is_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine would have nothing to do while jobs run, and nothing would run while it works."""
    seen = await watch_exchanges(app, monkeypatch)
    monkeypatch.setattr("skep.worker.slots.TURN", 60.0)

    @app.task
    async def ping(n: int) -> None:
        seen.append("run")

    await ping.many(range(400)).aenqueue()
    worker = Worker(app, Settings(mode=Mode.UNTIL_EMPTY))
    await worker.run()

    runs = [n for n, what in enumerate(seen) if what == "run"]
    assert len(runs) == 400
    first_of_a_large_bundle = next(n for n in runs if seen[n + 1 : n + 20] == ["run"] * 19)
    assert seen[first_of_a_large_bundle - 3 : first_of_a_large_bundle] == ["sent", "asked", "sent"]


async def test_a_few_jobs_start_before_anything_else_is_done(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is over by then goes with the next look."""
    seen = await watch_exchanges(app, monkeypatch)

    @app.task
    async def ping() -> None:
        seen.append("run")

    async with working(app) as worker:
        await worker._pump.resting.wait()
        seen.clear()
        worker._pump.resting.clear()
        await ping.aenqueue()
        await worker._pump.resting.wait()
    assert seen[:5] == ["asked", "sent", "run", "asked", "sent"]


async def test_concurrency_changes_while_running(app: App) -> None:
    """S2.23."""
    release = asyncio.Event()
    running: Counter[str] = Counter()

    @app.task
    async def hold() -> None:
        running["now"] += 1
        await release.wait()
        running["now"] -= 1

    await hold.many([()] * 20).aenqueue()
    async with working(app, lanes=[Lane({"default": 1}, 2)]) as worker:
        await until(lambda: running["now"] == 2)
        worker.resize("default", 5)
        await until(lambda: running["now"] == 5)
        worker.resize("default", 1)
        release.set()
        await until(lambda: running["now"] == 0)
        await until(lambda: len(worker._lanes[0].slots) == 1)
        with pytest.raises(BadSetting, match="serve"):
            worker.resize("nowhere", 3)
        with pytest.raises(BadSetting, match="at least one"):
            worker.resize("default", 0)


async def test_once_runs_one_job(app: App) -> None:
    """S4.19."""

    @app.task
    async def count() -> None: ...

    await count.many([()] * 3).aenqueue()
    await work(app, mode=Mode.ONCE)
    assert (await app.queues.acounts())["default"].ready == 2


async def test_a_worker_that_serves_for_ever_wakes_up_for_new_jobs(app: App) -> None:
    done = asyncio.Event()

    @app.task
    async def ping() -> None:
        done.set()

    async with working(app, poll=timedelta(seconds=60)):
        await asyncio.sleep(0)
        await ping.aenqueue()
        async with asyncio.timeout(10):
            await done.wait()


async def test_of_many_idle_workers_those_who_are_always_too_late_step_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hear of each job, and few look for it; the last of them takes what comes all the same."""
    looks = 0
    lease = MemoryBroker.lease

    async def counted(self: MemoryBroker, *args: Any, **kwargs: Any) -> list[Lease]:
        nonlocal looks
        looks += 1
        return await lease(self, *args, **kwargs)

    monkeypatch.setattr(MemoryBroker, "lease", counted)

    @app.task(result_ttl="1h")
    async def one() -> str:
        return "done"

    async def run_one() -> None:
        assert await (await one.aenqueue()).aresult(timeout="20s") == "done"

    async with working(app), AsyncExitStack() as others:
        for _ in range(23):
            await others.enter_async_context(working(app))
        for _ in range(300):
            await run_one()
        assert looks < 24 * 300 * 2 / 3
        await others.aclose()
        await run_one()


async def test_who_gets_each_job_it_hears_of_does_not_step_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns it takes to settle them, because others end meanwhile."""
    steps: list[Pump] = []

    async def step_back(self: Pump) -> None:
        steps.append(self)

    def slow(verb: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def act(*args: Any, **kwargs: Any) -> object:
            await asyncio.sleep(0.003)
            return await verb(*args, **kwargs)

        return act

    monkeypatch.setattr(Pump, "_step_back", step_back)
    monkeypatch.setattr(MemoryBroker, "settle", slow(MemoryBroker.settle))
    monkeypatch.setattr(MemoryBroker, "exchange", slow(MemoryBroker.exchange))

    @app.task(result_ttl="1h")
    async def some(milliseconds: int) -> None:
        if milliseconds:
            await asyncio.sleep(milliseconds / 1000)

    async with working(app):
        for _ in range(5):
            handles = await some.many(range(0, 20, 2)).aenqueue()
            for handle in handles:
                await handle.aresult(timeout="20s")
    assert steps == []


async def test_what_comes_to_a_lane_that_is_full_wakes_nobody(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not too late for it: there was no room."""
    steps: list[Pump] = []

    async def step_back(self: Pump) -> None:
        steps.append(self)

    monkeypatch.setattr(Pump, "_step_back", step_back)
    go_on = asyncio.Event()

    @app.task(queue="slow")
    async def slow() -> None:
        await go_on.wait()

    @app.task(queue="fast", result_ttl="1h")
    async def fast() -> str:
        return "done"

    async with working(app, lanes=[Lane({"slow": 1}, 1), Lane({"fast": 1}, 1)]):
        for _ in range(20):
            await slow.aenqueue()
        for _ in range(20):
            await slow.aenqueue()
            await asyncio.sleep(0.001)
        assert await (await fast.aenqueue()).aresult(timeout="20s") == "done"
        go_on.set()
    assert steps == []


async def test_a_delayed_job_starts_when_it_is_due_and_not_at_the_next_poll(app: App) -> None:
    """S0.11, S3.28: the worker knows when the next one is due."""
    started: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    @app.task
    async def ping() -> None:
        started.set_result(time.monotonic())

    async with working(app, poll=timedelta(seconds=60)):
        sent = time.monotonic()
        await ping.using(delay="300ms").aenqueue()
        async with asyncio.timeout(10):
            assert await started - sent >= 0.29


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": []}, "at least one queue"),
        ({"lanes": [Lane({"a": 1}, 0)]}, "at least 1"),
        ({"lanes": [Lane({"a": 0}, 1)]}, "at least 1"),
        ({"lanes": [Lane({"a": 1}, 1), Lane({"a": 1}, 1)]}, "two lanes"),
        ({"lease": timedelta(milliseconds=1)}, "too short"),
    ],
)
async def test_settings_that_cannot_work_are_refused(
    app: App, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadSetting, match=message):
        Worker(app, Settings(**settings))


# --- stopping ----------------------------------------------------------------------------


async def test_stopping_lets_short_jobs_finish_and_releases_long_ones(app: App) -> None:
    """S0.34, S2.24: no attempt is counted for what was released."""
    started: Counter[str] = Counter()

    @app.task(on_success=archive)
    async def sleep(name: str, seconds: float) -> None:
        started[name] += 1
        await asyncio.sleep(seconds)

    short = await sleep.aenqueue("short", 0.05)
    long = await sleep.aenqueue("long", 60)
    waiting = await sleep.aenqueue("waiting", 0)
    worker = Worker(app, Settings(lanes=[Lane({"default": 1}, 2)], grace=timedelta(milliseconds=300)))
    running = asyncio.create_task(worker.run())
    await until(lambda: started["short"] + started["long"] == 2)
    worker.stop()
    await running
    assert (await record_of(app, short.id)).state is State.DONE
    released = await record_of(app, long.id)
    assert (released.state, released.attempts, released.crashes) == (State.READY, 0, 0)
    assert [event.kind for event in released.history] == ["released"]
    assert (await record_of(app, waiting.id)).attempts == 0
    assert await (await app.ready()).position(long.id) == 0  # the front of the queue


async def test_a_stop_while_the_worker_starts_is_heard(app: App) -> None:
    @app.on_startup
    async def hang(state: Any) -> None:
        await asyncio.sleep(60)

    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0)
    worker.stop()
    async with asyncio.timeout(10):
        await running


async def test_jobs_that_arrive_while_the_worker_stops_are_released(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F02: leased a moment before, and given back without having started."""
    engine = await app.ready()
    asked, let_go = asyncio.Event(), asyncio.Event()
    lease = engine.lease

    async def slow_lease(*args: Any, **kwargs: Any) -> Any:
        leases = await lease(*args, **kwargs)
        if leases:
            asked.set()
            await let_go.wait()
        return leases

    monkeypatch.setattr(engine, "lease", slow_lease)
    seen = []

    @app.task
    async def ping() -> None:
        seen.append(1)

    handle = await ping.aenqueue()
    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    await asked.wait()
    worker.stop()
    asyncio.get_running_loop().call_later(0.05, let_go.set)
    await running
    record = await record_of(app, handle.id)
    assert (record.state, record.attempts, seen) == (State.READY, 0, [])
    assert [event.kind for event in record.history] == ["released"]


async def test_a_second_stop_does_not_wait(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def long() -> None:
        started.set()
        await asyncio.sleep(60)

    handle = await long.aenqueue()
    worker = Worker(app, Settings(grace=timedelta(hours=1)))
    running = asyncio.create_task(worker.run())
    await started.wait()
    worker.stop()
    worker.stop()
    async with asyncio.timeout(10):
        await running
    assert (await record_of(app, handle.id)).state is State.READY


async def test_jobs_that_wait_too_long_in_the_buffer_are_given_back(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that were thought to be short and turn out long do not keep others waiting behind them."""
    monkeypatch.setattr("skep.worker.slots.BUFFER_PATIENCE", 0.05)
    release = asyncio.Event()
    quick: list[int] = []

    @app.task
    async def work_on(n: int) -> None:
        if n >= 1000:
            await release.wait()
        quick.append(n)

    await work_on.many(range(1000)).aenqueue()
    async with working(app, lanes=[Lane({"default": 1}, 1)]):
        await until(lambda: len(quick) == 1000)
        entries = app.engine._entries  # type: ignore[attr-defined]  # those of the memory engine
        await work_on.many(range(1000, 1100)).aenqueue()
        await until(lambda: sum(e.state is State.RUNNING for e in entries.values()) == 1)
        release.set()
        await until(lambda: len(quick) == 1100)


# --- an engine that fails ----------------------------------------------------------------


async def test_the_worker_outlives_an_engine_that_is_away(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S0.23, S2.33, F13: it goes on, with pauses, and delivers what it had."""
    engine = await app.ready()
    done: list[int] = []
    away = False
    for verb in ("exchange", "lease", "settle", "sweep", "renew"):
        real = getattr(engine, verb)

        def flaky(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            if away:
                raise EngineUnavailable("down for maintenance")
            return real(*args, **kwargs)

        monkeypatch.setattr(engine, verb, flaky)

    release = asyncio.Event()

    @app.task(on_success=archive)
    async def slow() -> None:
        await release.wait()
        done.append(1)

    monkeypatch.setattr("skep.worker.pump.FIRST_BACKOFF", 0.01)
    handle = await slow.aenqueue()
    with caplog.at_level(logging.WARNING, "skep.worker"):
        async with working(app, poll=timedelta(milliseconds=20)) as worker:
            await until(lambda: bool(worker._running()))
            away = True
            release.set()
            await until(lambda: "the engine is away" in caplog.text)
            away = False
            await until_state(app, handle.id, State.DONE)
    assert done == [1]


async def test_a_worker_that_waits_for_its_engine_stops_without_waiting_longer(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F13: the engine is back, and what is left is delivered at once and not after the pause."""
    monkeypatch.setattr("skep.worker.pump.FIRST_BACKOFF", 3600.0)
    engine = await app.ready()
    real, away = engine.settle, True

    async def flaky(outcomes: Any) -> Any:
        if away:
            raise EngineUnavailable("down for maintenance")
        return await real(outcomes)

    monkeypatch.setattr(engine, "settle", flaky)
    monkeypatch.setattr(engine, "exchange", lambda outcomes, *_, **__: flaky(outcomes))

    @app.task(on_success=archive)
    async def quick() -> None: ...

    handle = await quick.aenqueue()
    with caplog.at_level(logging.WARNING, "skep.worker"):
        async with asyncio.timeout(10), working(app):
            await until(lambda: "the engine is away" in caplog.text)
            away = False
    await until_state(app, handle.id, State.DONE)


async def test_an_outcome_that_cannot_be_stored_buries_its_job_and_no_other(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await app.ready()
    for verb in ("settle", "exchange"):
        real = getattr(engine, verb)

        async def picky(outcomes: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            if any(isinstance(outcome, Done) and outcome.result == b'"bad"' for _, outcome in outcomes):
                raise OverflowError("too big for us")
            return await real(outcomes, *args, **kwargs)

        monkeypatch.setattr(engine, verb, picky)

    @app.task(result_ttl="1h")
    async def say(what: str) -> str:
        return what

    good, bad = await say.aenqueue("good"), await say.aenqueue("bad")
    await work(app)
    assert await good.aresult(timeout="1s") == "good"
    assert (await record_of(app, bad.id)).state is State.DEAD


async def test_storage_that_is_broken_ends_the_worker(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """F36: it says why and is started again, rather than waiting for a disk to mend itself."""
    engine = await app.ready()

    async def broken(**_: Any) -> Any:
        raise StorageBroken("check the disk")

    monkeypatch.setattr(engine, "sweep", broken)
    with pytest.raises(StorageBroken):
        await work(app)


# --- many --------------------------------------------------------------------------------


async def test_a_thousand_failing_and_succeeding_jobs_leak_nothing(app: App) -> None:
    """S0.22: alternating, in the loop and in threads."""
    before = threading.active_count()
    seen: Counter[bool] = Counter()

    @app.task(on_error=dead)
    async def flip(n: int) -> None:
        seen[n % 2 == 0] += 1
        if n % 2:
            raise ValueError(n)

    @app.task(on_error=dead, name="thread")
    def flip_in_thread(n: int) -> None:
        seen[n % 2 == 0] += 1
        if n % 2:
            raise ValueError(n)

    await flip.many(range(1000)).aenqueue()
    await flip_in_thread.many(range(200)).aenqueue()
    worker = await work(app)
    assert seen == {True: 600, False: 600}
    assert (await app.queues.acounts())["default"].dead == 600
    assert not worker._running()
    assert not worker._keeper._held
    await until(lambda: threading.active_count() <= before)


async def test_envelopes_keep_their_shape(app: App) -> None:
    @app.task
    async def ping() -> None: ...

    assert isinstance(ping.job(), Envelope)

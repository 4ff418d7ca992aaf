"""What becomes of jobs: verdicts, strategies, and what cannot be run."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
from tests.unit.worker.working import AT_ONCE, record_of, work

from propolis import App, Discard, Job, Retry, Snooze
from propolis.app import context
from propolis.core.protocols import MAX_CHECKPOINT, Receipt
from propolis.core.wire import HARD_LIMIT
from propolis.errors import BadDuration, BadSetting, CheckpointTooLarge, OutcomeTooLarge
from propolis.flows import FlowState, each
from propolis.strategies import archive, dead, delete, fixed, repeat, repeat_forever
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import counts
from propolis.values import Filter, State
from propolis.worker import Lane, outcomes

# --- verdicts and strategies -------------------------------------------------------------


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
async def test_verdicts_mean_the_same_returned_or_raised(app: App, raised: bool, is_async: bool) -> None:
    """S1.4: Retry, Discard and Snooze."""
    runs: Counter[str] = Counter()
    verdicts = {"retry": Retry("busy", after=0), "failure": Discard("never"), "snooze": Snooze(0)}

    def judge(which: str) -> object:
        runs[which] += 1
        if runs[which] > 1:
            return None
        if raised:
            raise verdicts[which]
        return verdicts[which]

    async def judge_async(which: str) -> object:
        return judge(which)

    task = app.task(on_success=archive, name="judge")(judge_async if is_async else judge)
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


MISUSES: dict[str, Callable[[Job], object]] = {
    "a checkpoint without a JSON form": lambda job: job.save(object()),
    "a checkpoint that is too large": lambda job: job.save("x" * MAX_CHECKPOINT),
    "save_now in an event loop": lambda job: job.save_now(1),
    "arguments of no task": lambda job: job.emit(cast("Any", job.state.other), 1, 2),
    "an option that there is not": lambda job: job.state.other.using(que="mail"),
    "a wait without an end": lambda job: job.state.other.handle(Receipt("x", created=True)).aresult(),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES.keys())
@pytest.mark.parametrize(
    ("strategy", "state"),
    [(AT_ONCE, State.DEAD), ({Exception: repeat(3).then(delete)}, None), (archive, State.DEAD)],
)
async def test_what_cannot_work_in_any_run_is_not_repeated(
    app: App, misuse: Callable[[Job], object], strategy: Any, state: State | None
) -> None:
    """As after `Discard`: the strategy still says how it ends."""
    runs = []

    @app.task
    async def other(n: int) -> None: ...

    @app.task(on_error=strategy)
    async def task(job: Job) -> None:
        runs.append(job.attempt)
        job.state.other = other
        answer = misuse(job)
        if inspect.isawaitable(answer):
            await answer

    handle = await task.aenqueue()
    await work(app)
    record = await app.jobs.aget(handle.id)
    assert (runs, record.state if record else None) == ([1], state)


async def test_a_rule_for_a_misuse_is_obeyed(app: App) -> None:
    runs = []

    @app.task(on_error={CheckpointTooLarge: AT_ONCE, Exception: dead})
    async def task(job: Job) -> None:
        runs.append(job.attempt)
        await job.save("x" * MAX_CHECKPOINT)

    await task.aenqueue()
    await work(app)
    assert runs == [1, 2, 3, 4]


@pytest.mark.parametrize("mistake", [TypeError("no"), BadDuration("soon"), ValueError("no")])
async def test_what_values_may_be_to_blame_for_is_repeated(app: App, mistake: Exception) -> None:
    """A TypeError of the task's own, or a setting that was computed from what it has read."""
    runs = []

    @app.task(on_error=AT_ONCE)
    async def task(job: Job) -> None:
        runs.append(job.attempt)
        raise mistake

    await task.aenqueue()
    await work(app)
    assert runs == [1, 2, 3, 4]


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
    """Whoever reads it first finds what failed, how often, and where."""

    @app.task(name="mail.send", on_error=repeat(1, fixed(0)))
    async def send(address: str) -> None:
        raise ValueError(f"no such address: {address}")

    @app.task(name="mail.read")
    async def read() -> None: ...

    await read.aenqueue()
    handle = await send.aenqueue("nobody")
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        await work(app)
    again, dead = caplog.records
    assert again.levelname == "WARNING"
    assert re.sub(r"\d\.\d{3}", "0.000", again.getMessage()) == (
        f"mail.send {handle.id}, attempt 1 (queue default, waited 0.000 s, ran 0.000 s), "
        f"failed and runs again at once: ValueError: no such address: nobody"
    )
    assert dead.levelname == "ERROR"
    assert dead.getMessage().startswith(f"mail.send {handle.id}, attempt 2 (")
    assert "), is dead (failed): ValueError" in dead.getMessage()
    assert "in send" in caplog.text  # its traceback


@pytest.mark.parametrize(("ending", "word"), [(delete, "deleted"), (archive, "dead"), (dead, "dead")])
async def test_the_log_says_whether_a_job_that_failed_is_kept(
    app: App, caplog: pytest.LogCaptureFixture, ending: Any, word: str
) -> None:
    @app.task(name="mail.send", on_error=ending)
    async def send() -> None:
        raise Discard("no such address")

    handle = await send.aenqueue()
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        await work(app)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"mail.send {handle.id}, attempt 1 (")
    assert line.endswith(f"), is {word} (failed): Discard: no such address")


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


async def test_a_result_that_no_engine_could_keep_is_an_error_of_its_job(app: App) -> None:
    """The engine would refuse it again and again, and with it the outcomes of all its neighbours."""

    @app.task(result_ttl="1h")
    async def large() -> str:
        return "x" * HARD_LIMIT

    handle = await large.aenqueue()
    await work(app)
    record = await record_of(app, handle.id)
    assert (record.state, record.reason, record.attempts) == (State.DEAD, "failed", 1)
    assert record.error is not None
    assert record.error.message == "its result cannot be kept: 16,777,218 bytes are too many"


@pytest.mark.parametrize("caught", [False, True])
async def test_more_than_one_step_can_store_is_an_error_of_its_job(
    app: App, monkeypatch: pytest.MonkeyPatch, caught: bool
) -> None:
    """L5: whatever it emits, together with its result; and nothing is half put."""
    monkeypatch.setattr(context, "MAX_OUTCOME", 10_000)
    monkeypatch.setattr(outcomes, "MAX_OUTCOME", 10_000)
    runs: list[int] = []

    @app.task(queue="next")
    async def piece(text: str) -> None: ...

    @app.task(on_error=repeat(1, fixed(0)).then(dead), result_ttl="1h")
    async def many(job: Job, size: int, result: int) -> str:
        runs.append(size)
        try:
            for _ in range(size):
                job.emit(piece, "x" * 900)
        except OutcomeTooLarge:
            if not caught:
                raise
        return "x" * result

    emits, gives, fits = [await many.aenqueue(*given) for given in ((12, 0), (5, 6_000), (5, 3_000))]
    await work(app)

    records = [await record_of(app, handle.id) for handle in (emits, gives, fits)]
    first = State.DONE if caught else State.DEAD
    assert [record.state for record in records] == [first, State.DEAD, State.DONE]
    assert Counter(runs) == {12: 1 if caught else 2, 5: 3}
    failed = records[1].error
    assert failed is not None
    assert (failed.type, "`app.batch`" in failed.message) == ("OutcomeTooLarge", True)
    assert (await counts(app.client.engine, "next")).put == (9 if caught else 0) + 5


async def test_a_fan_out_beyond_one_step_is_an_error_of_the_job_that_was_to_be_followed(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: a result that is short may be followed by many."""
    monkeypatch.setattr(outcomes, "MAX_OUTCOME", 10_000)

    @app.task(queue="next")
    async def piece(number: int) -> None: ...

    @app.task(on_error=dead)
    async def numbers() -> list[int]:
        return list(range(500))

    run = await (numbers.step() | each(piece.step())).aenqueue()
    await work(app)

    [failed] = (await app.client.engine.find(Filter(state=State.DEAD))).jobs
    assert failed.error is not None
    assert (failed.task, failed.error.type) == (numbers.name, "OutcomeTooLarge")
    status = await run.astatus()
    assert status is not None
    assert status.state is FlowState.DEAD
    assert (await counts(app.client.engine, "next")).put == 0


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


@pytest.mark.parametrize("verdict", [Discard, Retry])
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


async def test_wrong_arguments_are_shelved_and_unknown_tasks_wait_for_who_knows_them(app: App) -> None:
    """S0.24, S1.17, S1.21, S2.21, S3.23, T12b, F41: kept with the reason, and the queue moves on."""

    @app.task
    async def greet(name: str) -> None: ...

    unknown = a_job(task="not.here")
    wrong = a_job(5, task=greet.name)
    await (await app.ready()).put([unknown, wrong, greet.job("bob")])
    await work(app)
    broken = await app.jobs.afind(Filter(reason="broken"))
    error_texts = {record.id: record.error.message for record in broken if record.error}
    assert "do not fit" in error_texts[wrong.id]

    ran = []

    @app.task(name="not.here")
    async def now_here() -> None:
        ran.append(1)

    await work(app)
    assert ran == [1]


async def test_bytes_that_are_no_job_are_shelved_as_they_came(app: App) -> None:
    """S1.17: raw bytes kept, worker unharmed."""
    job = a_job()
    engine = await app.ready()
    await engine.put([job])
    engine._book.entries[job.id].body = b"\x80\x04not json"  # type: ignore[attr-defined]  # as a foreign hand would
    await work(app)
    record = await record_of(app, job.id)
    assert (record.reason, record.body) == ("broken", b"\x80\x04not json")

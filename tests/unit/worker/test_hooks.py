"""What surrounds a run: its context, hooks, middleware, dependencies, and further jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import pytest
from tests.unit.worker.working import record_of, until, work, working

from propolis import App, Depends, Job, Snooze, current_job
from propolis.app.registry import END_EVENTS, Next
from propolis.core.job import Progress
from propolis.engines.memory import MemoryEngine
from propolis.strategies import archive, dead, fixed, repeat
from propolis.values import State
from propolis.worker import Lane


async def test_a_job_knows_itself(app: App) -> None:
    seen: list[Any] = []

    @app.task
    def inspect(n: int, job: Job, m: int) -> None:
        seen.append(
            (n, m, job.attempt, job.queue, job.headers, job.batch, job.stopping, current_job() is job)
        )
        seen.append((job.id, job.task, job.fence, job.app, job.put_at))

    handle = await inspect.using(headers={"a": "b"}).aenqueue(1, 2)  # type: ignore[call-arg]  # not first
    await work(app)
    assert seen[0] == (1, 2, 1, "default", {"a": "b"}, None, False, True)
    assert seen[1][:2] == (handle.id, inspect.name)
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


@pytest.mark.parametrize("fails", [False, True])
async def test_the_last_lines_of_short_jobs_are_kept(
    app: App, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What jobs report and end with while another call is on its way is stored before their end."""

    def slowly(verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **more: Any) -> Any:
            for _ in range(5):  # turns of the event loop, as an engine with a thread or a wire has them
                await asyncio.sleep(0)
            return await verb(*args, **more)

        return call

    monkeypatch.setattr(MemoryEngine, "note", slowly(MemoryEngine.note))
    monkeypatch.setattr(MemoryEngine, "exchange", slowly(MemoryEngine.exchange))

    @app.task(on_success=archive, on_error=dead)
    async def short(job: Job) -> None:
        await asyncio.sleep(0)
        job.log("the last line")
        job.progress(1, 1)
        if fails:
            raise ValueError("and this is why")

    await short.many([()] * 50).aenqueue()
    await work(app)
    records = await app.jobs.afind(limit=100)
    assert [(each.log, each.progress) for each in records] == [(("the last line",), Progress(1, 1))] * 50


class Scalar(float):
    """As numpy has them."""


@pytest.mark.parametrize("done", [Scalar(1.5), Fraction(3, 2), Decimal("1.5"), True, 2**70])
async def test_progress_takes_whatever_counts_as_a_number(tmp_path: Path, done: Any) -> None:
    """F58, L7: what cannot be stored takes along what its neighbours report, or cannot be read again."""
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task(on_success=archive, on_error=dead)
    async def counts(job: Job) -> None:
        job.progress(done, done)

    handle = await counts.aenqueue()
    await work(app)
    assert (await record_of(app, handle.id)).progress == Progress(float(done), float(done))
    await app.aclose()


@pytest.mark.parametrize("done", [float("nan"), float("inf"), pytest.param(10**400, id="huge"), "half"])
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
        await until(lambda: not worker._pump.notes and bool(worker._running()))
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


@pytest.mark.parametrize(
    ("event", "hooked"), [*((event, True) for event in END_EVENTS), ("fetched", False), ("startup", False)]
)
def test_only_a_hook_for_the_end_of_jobs_costs_every_job_a_report(app: App, event: str, hooked: bool) -> None:
    assert not app.hooked
    getattr(app, f"on_{event}")(lambda *_: None)
    assert app.hooked is hooked


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

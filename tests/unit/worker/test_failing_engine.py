"""A worker whose engine fails; and many jobs, of which nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.worker.working import record_of, until, until_state, work, working

from propolis import App, Job
from propolis.core.envelope import Envelope
from propolis.core.job import Done, Lease
from propolis.core.protocols import Exchange, Records
from propolis.core.records import Swap
from propolis.engines.memory import MemoryEngine
from propolis.errors import Busy, EngineError, EngineUnavailable, OutcomeUnknown, StorageBroken, StorageFull
from propolis.strategies import archive, dead
from propolis.values import State
from propolis.worker.pump import BUNDLE, EMISSION, weight_of
from propolis.worker.settings import monotonic

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

    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 0.01)
    handle = await slow.aenqueue()
    moved = 0.0
    with caplog.at_level(logging.INFO, "propolis.worker"):
        async with working(
            app,
            clock=lambda: monotonic() + moved,
            lease=timedelta(hours=2),
            poll=timedelta(milliseconds=20),
        ) as worker:
            await until(lambda: bool(worker._running()))
            away = True
            release.set()
            await until(lambda: "the engine is away" in caplog.text)
            assert "the engine is back" not in caplog.text
            moved = 3600.0
            away = False
            await until_state(app, handle.id, State.DONE)
            await until(lambda: "the engine is back after 36" in caplog.text)
    assert done == [1]
    assert caplog.text.count("the engine is back") == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (StorageFull("jobs"), "the engine has room again after 0 s"),
        (Busy("a lock", {1: "somebody"}), "nobody is in the way any more, after 0 s"),
    ],
)
async def test_the_log_says_what_is_over_where_the_engine_was_not_away(
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: EngineError,
    words: str,
) -> None:
    engine = await app.ready()
    real, failing = engine.exchange, True

    async def flaky(*args: Any, **options: Any) -> Any:
        if failing:
            raise error
        return await real(*args, **options)

    monkeypatch.setattr(engine, "exchange", flaky)
    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 0.001)
    with caplog.at_level(logging.INFO, "propolis.worker"):
        async with working(app, clock=lambda: 0.0):
            await until(lambda: "trying again" in caplog.text)
            failing = False
            await until(lambda: words in caplog.text)


async def test_a_worker_stops_although_its_engine_has_gone_mad(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an outcome to blame, the pump turned without a pause, and nothing else had a turn."""
    await app.ready()

    async def mad(self: MemoryEngine, *_: Any, **__: Any) -> Exchange:
        raise TypeError("a mistake of ours")

    monkeypatch.setattr(MemoryEngine, "exchange", mad)
    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 0.001)
    async with working(app):
        await until(lambda: caplog.text.count("a mistake of ours") > 1)


@pytest.mark.parametrize(
    "refusal", [StorageFull("records"), OutcomeUnknown("records", "swap"), Busy("records", {})], ids=repr
)
async def test_a_worker_whose_schedules_cannot_be_stored_yet_works_all_the_same(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: EngineError
) -> None:
    """F54: only workers make room, so none may wait for it before it starts."""
    monkeypatch.setattr("propolis.worker.worker.STORED_EVERY", 0.01)
    engine = await app.ready()
    assert isinstance(engine, Records)
    real, tried, full = engine.swap, 0, True

    async def swapped(swaps: Sequence[Swap], **options: Any) -> Any:
        nonlocal tried
        if full and any(change.kind == "schedule" for swap in swaps for change in swap.changes):
            tried += 1
            raise refusal
        return await real(swaps, **options)

    monkeypatch.setattr(engine, "swap", swapped)

    @app.every("1h")
    @app.task(on_success=archive)
    async def hourly() -> None: ...

    handle = await hourly.aenqueue()
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        async with working(app):
            await until_state(app, handle.id, State.DONE)
            await until(lambda: tried == 3)
            full = False
            async with asyncio.timeout(20):
                while [each.schedule.name for each in await app.schedules.alist()] != [hourly.name]:
                    await asyncio.sleep(0.005)  # no event shows this state
    assert caplog.text.count("schedules and limits of this code are stored later") == 1


async def test_a_worker_that_waits_for_its_engine_stops_without_waiting_longer(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F13: the engine is back, and what is left is delivered at once and not after the pause."""
    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 3600.0)
    engine = await app.ready()
    real, away = engine.exchange, True

    async def flaky(outcomes: Any, *args: Any, **options: Any) -> Any:
        if away and outcomes:
            raise EngineUnavailable("down for maintenance")
        return await real(outcomes, *args, **options)

    monkeypatch.setattr(engine, "exchange", flaky)  # lease and settle follow from it

    @app.task(on_success=archive)
    async def quick() -> None: ...

    handle = await quick.aenqueue()
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        async with asyncio.timeout(10), working(app):
            await until(lambda: "the engine is away" in caplog.text)
            away = False
    await until_state(app, handle.id, State.DONE)


async def test_outcomes_that_are_large_together_are_settled_in_bundles(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server refuses a call of some hundred megabytes, again and again: nothing was settled any more."""
    engine = await app.ready()
    bundles: list[list[int]] = []
    real, together = engine.exchange, asyncio.Barrier(6)

    async def seen(outcomes: Any, *args: Any, **options: Any) -> Any:
        bundles.append([weight_of(outcome) for _, outcome in outcomes])
        return await real(outcomes, *args, **options)

    monkeypatch.setattr(engine, "exchange", seen)

    @app.task(result_ttl="1h")
    async def returns(job: Job, size: int, emissions: int) -> str:
        for _ in range(emissions):
            job.emit(follows)
        await together.wait()
        return "x" * size

    @app.task
    async def follows() -> None: ...

    large = BUNDLE // 3
    handles = [await returns.aenqueue(0, 1100), *[await returns.aenqueue(large, 0) for _ in range(4)]]
    handles.append(await returns.aenqueue(5, 0))
    await work(app)
    assert [(await record_of(app, handle.id)).state for handle in handles] == [State.DONE] * 6
    assert [bundle for bundle in bundles if sum(bundle) > BUNDLE] == [[1100 * EMISSION + 2]]


async def test_nobody_waits_for_an_outcome_that_cannot_be_stored(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2.33: the lightest go first, also where the heaviest has ended before them."""
    engine = await app.ready()
    monkeypatch.setattr("propolis.worker.pump.FIRST_BACKOFF", 0.001)
    real, full, refused, beside = engine.exchange, True, asyncio.Event(), asyncio.Event()

    async def exchange(outcomes: Any, *args: Any, **options: Any) -> Any:
        if full and sum(weight_of(outcome) for _, outcome in outcomes) > BUNDLE:
            refused.set()
            raise StorageFull("jobs")
        return await real(outcomes, *args, **options)

    monkeypatch.setattr(engine, "exchange", exchange)

    @app.task(on_success=archive)
    async def heavy(job: Job) -> None:
        await beside.wait()
        for _ in range(1 + BUNDLE // EMISSION):
            job.emit(light)

    @app.task(on_success=archive)
    async def light() -> None:
        beside.set()
        await refused.wait()

    async with working(app):
        handles = [await heavy.aenqueue(), await light.aenqueue()]
        await until_state(app, handles[1].id, State.DONE)
        assert (await record_of(app, handles[0].id)).state is State.RUNNING
        full = False
        await until_state(app, handles[0].id, State.DONE)


async def test_what_is_recorded_later_keeps_its_lease(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6, F50: its outcome wants what somebody's open transaction holds; it is given again and again."""
    engine = await app.ready()
    monkeypatch.setattr("propolis.worker.pump.LATER", 0.001)
    real, held, put_off = engine.exchange, True, 0

    async def exchange(outcomes: Any, *args: Any, **options: Any) -> Exchange:
        nonlocal put_off
        if not (held and outcomes):
            return await real(outcomes, *args, **options)
        put_off += 1
        got = await real([], *args, **options)
        return Exchange(got.lost, got.leases, [lease for lease, _ in outcomes])

    monkeypatch.setattr(engine, "exchange", exchange)

    @app.task(on_success=archive)
    async def quick(job: Job) -> None:
        leases.append(job.lease)

    leases: list[Lease] = []
    async with working(app) as worker:
        handle = await quick.aenqueue()
        await until(lambda: put_off > 1)  # so that the pump has the first of these answers
        [lease] = leases
        assert worker._keeper.holds(lease)
        assert worker._pump.settled == 0
        held = False
        await until_state(app, handle.id, State.DONE)
        await until(lambda: not worker._keeper.holds(lease))
        assert (worker._pump.settled, len(leases)) == (1, 1)


async def test_where_notes_have_no_room_jobs_end_and_what_is_saved_comes_again(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """L6.6, F54: outcomes make room, so nothing may stand in their way."""
    engine = await app.ready()
    real, full = engine.note, True

    async def noted(notes: Any) -> Any:
        if full:
            raise StorageFull("notes")
        return await real(notes)

    monkeypatch.setattr(engine, "note", noted)

    @app.task(on_success=archive)
    async def telling(job: Job) -> None:
        job.progress(1, 2)

    @app.task(on_success=archive)
    async def saving(job: Job) -> None:
        await job.save({"at": 1})

    handles = [await telling.aenqueue(), await saving.aenqueue()]
    with caplog.at_level(logging.WARNING, "propolis.worker"):
        async with working(app, poll=timedelta(milliseconds=20)):
            await until_state(app, handles[0].id, State.DONE)
            assert (await record_of(app, handles[1].id)).state is State.RUNNING
            full = False
            await until_state(app, handles[1].id, State.DONE)
    assert (await record_of(app, handles[0].id)).progress is None
    assert "running jobs have reported is not kept: no space left for notes" in caplog.text
    assert "the engine is away" not in caplog.text


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
    async def repeat_back(what: str) -> str:
        return what

    good, bad = await repeat_back.aenqueue("good"), await repeat_back.aenqueue("bad")
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

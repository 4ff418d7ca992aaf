"""Rows of the five designs that go through several parts at once, on the real worker."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from propolis import App, Job, cron
from propolis.app.batch.plan import plan_batch
from propolis.core.batch import Batch
from propolis.core.policy import Policy
from propolis.core.protocols import MAX_CHECKPOINT
from propolis.strategies import dead, exponential, repeat
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, State
from propolis.worker import Lane, Mode, Settings, Worker
from propolis.worker.children.processes import MAX_SUSPECTS

DEFAULTS = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text(encoding="utf-8")


@pytest.fixture
def app() -> App:
    return App("memory://")


async def test_backoff_waits_within_its_bounds(app: App) -> None:
    """S0.38: doubling, never above the cap, at most half of it drawn at random."""

    @app.task(on_error=repeat(4, exponential("10s", cap="1m")).then(dead))
    async def fail() -> None:
        raise ValueError

    async with app.test() as t:
        handle = await fail.aenqueue()
        await t.advance("1h")
        moments = [t.job(handle).put_at, *(event.at for event in t.history(handle))]
        ended = t.job(handle).ended_at
    assert ended is not None
    waits = [
        (later - earlier).total_seconds()
        for earlier, later in zip(moments[1:], [*moments[2:], ended], strict=True)
    ]
    for wait, full in zip(waits, (10, 20, 40, 60), strict=True):
        assert full / 2 <= wait <= full


async def test_by_default_a_failing_job_is_repeated_with_pauses_and_then_buried(app: App) -> None:
    """S1.28, S3.25: neither for ever nor in a hot loop."""
    attempts = []

    @app.task
    async def fail(job: Job) -> None:
        attempts.append(job.attempt)
        raise ValueError

    async with app.test() as t:
        handle = await fail.aenqueue()
        await t.drain()
        assert attempts == [1]  # it waits, and does not spin
        await t.advance("1d")
        assert t.job(handle).state is State.DEAD
    assert attempts == [1, 2, 3, 4, 5, 6]


async def test_a_discarded_job_stays_away(app: App) -> None:
    """S0.35: cancelled while it ran, it does not come back after its lease, nor after twice that."""
    runs = []

    @app.task
    async def long(job: Job) -> None:
        runs.append(job.attempt)
        await t.engine.cancel([job.id])
        raise ValueError  # which would mean another attempt

    async with app.test() as t:
        handle = await long.aenqueue()
        await t.drain()
        await t.advance("1m")
        assert t.job(handle).state is State.CANCELLED
    assert runs == [1]


async def test_a_dropped_queue_leaves_nothing_behind(tmp_path: Path) -> None:
    """S1.22, S4.15: not one row in any table."""
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task(on_error=dead, queue="doomed")
    async def fail() -> None:
        raise ValueError

    await fail.many([()] * 3).aenqueue()
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"doomed": 1}, 2)])).run()
    await fail.using(delay="1h", unique="k").aenqueue()
    await fail.aenqueue()
    assert await app.queues.adrop("doomed") == 5
    assert await app.queues.acounts() == {}
    await app.aclose()
    database = sqlite3.connect(tmp_path / "jobs.db")
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    left = {table: database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
    database.close()
    # What says which tables these are, and the last numbers that were given.
    lasting = {"propolis_migration", "propolis_counter", "propolis_version"}
    assert {table for table, rows in left.items() if rows} == lasting


async def test_jobs_put_before_a_deployment_run_after_it(tmp_path: Path) -> None:
    """S1.32: the old worker keeps what it cannot read, the new one upgrades what the old code put."""
    url = f"sqlite:///{tmp_path}/jobs.db"
    old, new = App(url), App(url)
    seen = []

    @old.task(name="greet")
    async def greet_v1(name: str) -> None:
        seen.append(("old", name))

    @new.task(name="greet")
    async def greet_v2(first: str, last: str, polite: bool = True) -> None:
        seen.append((first, last))

    @greet_v2.upgrade
    def from_v1(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
        if len(args) == 1 and not kwargs:
            return args[0].split(" ", 1), {}
        return None

    await greet_v1.aenqueue("Ada Lovelace")
    await Worker(new, Settings(mode=Mode.UNTIL_EMPTY)).run()
    await greet_v2.aenqueue("Grace", "Hopper")
    await Worker(old, Settings(mode=Mode.UNTIL_EMPTY)).run()  # a rolling deploy: the old one is still there
    assert seen == [("Ada", "Lovelace")]
    assert await new.jobs.areplay_all(Filter(reason="broken")) == 1
    await (await new.ready()).put([a_job("x", "y", "z", task="greet")])
    await Worker(new, Settings(mode=Mode.UNTIL_EMPTY)).run()
    assert seen == [("Ada", "Lovelace"), ("Grace", "Hopper")]
    [hopeless] = await new.jobs.afind(Filter(reason="broken"))
    assert hopeless.error is not None
    assert "do not fit" in hopeless.error.message
    await old.aclose()
    await new.aclose()


def _said(name: str) -> str:
    [value] = re.findall(rf"^\| `{re.escape(name)}` \| ([^|]+) \|", DEFAULTS, re.MULTILINE)
    return str(value).strip()


def test_the_table_of_defaults_is_that_of_the_code(app: App) -> None:
    """S0.17: one table, and it is true."""

    @app.task(name="plain")
    async def plain() -> None: ...

    options, settings, policy = plain.options, Settings(), Policy()
    assert _said("queue") == f'"{options.queue}"'
    assert _said("priority") == str(options.priority)
    assert _said("timeout") == str(options.timeout_ms).lower()
    assert _said("result_ttl") == str(options.result_ttl_ms).lower()
    assert _said("max_crashes") == str(options.max_crashes)
    assert (_said("isolate"), options.isolate) == ("none", None)
    assert (_said("abandon"), options.abandon) == ("no", False)
    assert (_said("memory_limit"), options.memory_limit) == ("none", None)
    assert f"at most {MAX_CHECKPOINT // 1024} KiB" in DEFAULTS
    assert max(4, os.cpu_count() or 1) == MAX_SUSPECTS
    assert _said("on_success") == "`delete`"
    assert policy.on_error == repeat(5, exponential("2s", cap="10m")).then(dead)
    assert _said("on_error") == '`repeat(5, exponential("2s", cap="10m")).then(dead)`'
    assert _said("retries") == "none"
    assert policy.on_timeout == repeat(2, exponential("2s", cap="10m")).then(dead)
    assert _said("on_timeout") == '`repeat(2, exponential("2s", cap="10m")).then(dead)`'
    batch = plan_batch({}).batch
    assert batch == Batch(id=batch.id)
    assert _said("keep_for") == f"{batch.keep_for_ms / 86_400_000:g} d"
    assert _said("open_for") == f"{batch.open_for_ms / 86_400_000:g} d"
    plan = cron("@daily")
    assert _said("tz") == '"UTC"'
    assert _said("misfire") == f'"{plan.misfire.value}"'
    assert _said("misfire_limit") == str(plan.misfire_limit)
    assert _said("misfire_after") == f"{plan.misfire_after_ms / 60_000:g} m"
    assert _said("overlap") == f'"{plan.overlap.value}"'
    assert (_said("jitter"), plan.jitter_ms) == ("none", 0)
    assert _said("--lease") == f"{settings.lease.total_seconds():g} s"
    assert _said("--grace") == f"{settings.grace.total_seconds():g} s"
    assert _said("--poll") == f"{settings.poll.total_seconds():g} s"
    assert _said("--concurrency") == str(settings.lanes[0].slots)
    assert _said("--log-jobs") == f"`{settings.log_jobs}`"

"""Sentry: errors of jobs with where they come from, one trace, and monitors of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope as Sent
from sentry_sdk.transport import Transport
from tests.unit.worker.working import work

from propolis import App, Discard, Job, Retry, Snooze
from propolis.core.schedule import cron, every
from propolis.errors import BadSetting
from propolis.integrations import sentry
from propolis.strategies import dead, fixed, repeat


class Kept(Transport):
    """What would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Sent) -> None:
        for item in envelope.items:
            if isinstance(item.payload.json, dict):
                self.items.append({"kind": item.type, **item.payload.json})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.items if item["kind"] == kind]


@pytest.fixture
def kept() -> Iterator[Kept]:
    transport = Kept()
    sentry_sdk.init(
        "https://key@sentry.invalid/1",
        transport=transport,
        traces_sample_rate=1.0,
        release="shop@1",
        default_integrations=False,
    )
    yield transport
    sentry_sdk.get_client().close()
    sentry_sdk.init()


async def test_an_error_says_which_job_and_is_sent_once_per_run(app: App, kept: Kept) -> None:
    sentry.instrument(app)

    @app.task(name="charge", queue="default", on_error=repeat(2, fixed(0)).then(dead))
    async def charge(cents: int) -> None:
        raise ValueError("declined")

    handle = await charge.aenqueue(5)
    await work(app)

    errors = kept.of("event")
    assert len(errors) == 3
    assert {error["exception"]["values"][0]["type"] for error in errors} == {"ValueError"}
    assert [error["contexts"]["job"]["attempt"] for error in errors] == [1, 2, 3]
    assert {error["contexts"]["job"]["job"] for error in errors} == {handle.id}
    assert {error["tags"]["propolis.task"] for error in errors} == {"charge"}
    assert {(error["release"], error["transaction"]) for error in errors} == {("shop@1", "charge")}


async def test_which_errors_are_sent_can_be_said(app: App, kept: Kept) -> None:
    sentry.instrument(app, when=lambda job, error: job.attempt >= 2)

    @app.task(on_error=repeat(1, fixed(0)).then(dead))
    def plain() -> None:
        raise KeyError("x")

    await plain.aenqueue()
    await work(app)

    assert [error["contexts"]["job"]["attempt"] for error in kept.of("event")] == [2]


async def test_verdicts_are_no_errors_but_a_discard_is(app: App, kept: Kept) -> None:
    sentry.instrument(app)

    @app.task(on_error=repeat(3, fixed(0)).then(dead))
    async def decide(job: Job) -> Discard:
        if job.attempt == 1:
            raise Retry("busy", after=0)
        return Discard("no such customer")

    @app.task
    async def later() -> None:
        raise Snooze("1h")

    await decide.aenqueue()
    await later.aenqueue()
    await work(app)

    assert [error["exception"]["values"][0]["type"] for error in kept.of("event")] == ["Discard"]


async def test_a_put_and_its_run_are_one_trace(app: App, kept: Kept) -> None:
    sentry.instrument(app)

    @app.task(name="mail")
    async def mail() -> None: ...

    with sentry_sdk.start_transaction(name="GET /") as request:
        handle = await mail.aenqueue()
    await work(app)

    page, run = kept.of("transaction")
    [put] = page["spans"]
    assert put["op"] == "queue.publish"
    assert run["contexts"]["trace"]["trace_id"] == request.trace_id
    assert run["contexts"]["trace"]["parent_span_id"] == put["span_id"]
    assert run["contexts"]["trace"]["op"] == "queue.process"
    assert run["contexts"]["trace"]["data"]["messaging.message.id"] == handle.id
    assert run["contexts"]["trace"]["data"]["messaging.message.retry.count"] == 0


async def test_what_one_job_leaves_in_its_scope_is_not_in_that_of_the_next(app: App, kept: Kept) -> None:
    sentry.instrument(app)

    @app.task(on_error=dead)
    async def fail(n: int) -> None:
        sentry_sdk.set_tag(f"only-{n}", "yes")
        sentry_sdk.add_breadcrumb(message=f"crumb {n}")
        raise ValueError(n)

    await fail.many([1, 2]).aenqueue()
    await work(app)

    one, two = kept.of("event")
    assert ("only-1" in one["tags"], "only-1" in two["tags"]) == (True, False)
    assert [crumb["message"] for crumb in two["breadcrumbs"]["values"]] == ["crumb 2"]


async def test_a_schedule_is_a_monitor(app: App, kept: Kept) -> None:
    sentry.instrument(app)
    fails: list[bool] = [False, True]

    @app.cron("0 9 * * *", tz="Europe/Paris", name="Daily.Report")
    @app.task(on_error=dead)
    async def report() -> None:
        if fails.pop(0):
            raise ValueError("no data")

    async with app.test() as t:
        await t.advance("1d")
        await t.drain()
        await t.advance("1d")
        await t.drain()

    check_ins = kept.of("check_in")
    assert [one["status"] for one in check_ins[:4]] == ["in_progress", "ok", "in_progress", "error"]
    assert {one["monitor_slug"] for one in check_ins} == {"daily-report"}
    assert check_ins[0]["monitor_config"] == {
        "schedule": {"type": "crontab", "value": "0 9 * * *"},
        "timezone": "Europe/Paris",
    }
    assert check_ins[0]["check_in_id"] == check_ins[1]["check_in_id"] != check_ins[2]["check_in_id"]


def test_what_a_monitor_cannot_say_is_left_out() -> None:
    assert sentry.monitor_config(every("15m")) == {
        "schedule": {"type": "interval", "value": 15, "unit": "minute"}
    }
    assert sentry.monitor_config(every("90s")) is None
    assert sentry.monitor_config(cron("*/5 * * * * *")) is None


def test_an_app_is_instrumented_once(app: App, kept: Kept) -> None:
    sentry.instrument(app)
    with pytest.raises(BadSetting, match="once"):
        sentry.instrument(app)

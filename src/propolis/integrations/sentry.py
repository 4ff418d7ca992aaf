"""Errors, traces and cron monitors for Sentry: `instrument(app)`, with `pip install "propolis[sentry]"`.

`sentry_sdk.init(…)` is the application's own: where to send, which release, how many traces.  It belongs
where the app is made, so that tasks which run in child processes are seen as well.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import sentry_sdk
from msgspec.structs import replace

from propolis.app.application import App
from propolis.app.client.client import Stamp
from propolis.app.context import Job, fields_of
from propolis.app.verdicts import Discard, Verdict
from propolis.core.envelope import Envelope
from propolis.core.schedule import SCHEDULE_HEADER, Cron, Plan
from propolis.errors import BadSetting

if TYPE_CHECKING:
    from sentry_sdk._types import MonitorConfig

__all__ = ["instrument"]

When = Callable[[Job, BaseException], bool]
_NOT_A_SLUG = re.compile(r"[^a-z0-9_-]+")


def instrument(app: App, *, when: When | None = None) -> None:
    """Send what goes wrong in the jobs of this app, and how its schedules fare.  Once for each app.

    `when(job, error)` says which errors are sent, for example `lambda job, error: job.attempt >= 5`; by
    default each one that a run raises.  `Retry` and `Snooze` are no errors, and a `Discard` is one.
    """
    if app.client.sending is not None:
        raise BadSetting(
            "this app is traced already: call instrument(app) once, and let one of OpenTelemetry and Sentry "
            "trace (Sentry takes spans of OpenTelemetry: see its documentation)"
        )
    reporting = Reporting(app, when)
    app.client.sending = sending
    app.middlewares.insert(0, reporting.run)


@contextmanager
def sending() -> Iterator[Stamp]:
    """A span around a put; its jobs carry its trace."""
    with sentry_sdk.start_span(op="queue.publish", name="put") as span:

        def stamp(job: Envelope) -> Envelope:
            span.set_data("messaging.system", "propolis")
            span.set_data("messaging.destination.name", job.queue)
            span.set_data("messaging.message.id", job.id)
            if "sentry-trace" in job.headers:
                return job
            trace = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
            given = {name: text for name, text in trace.items() if text}
            return replace(job, headers={**given, **job.headers}) if given else job

        yield stamp


class Reporting:
    def __init__(self, app: App, when: When | None) -> None:
        self._app = app
        self._when = when

    async def run(self, job: Job, call: Callable[[], Any]) -> Any:
        """The middleware: each run has a scope and a transaction of its own, where it runs."""
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            for name in ("task", "queue"):
                scope.set_tag(f"propolis.{name}", getattr(job, name))
            scope.set_context("job", fields_of(job.lease))
            scope.set_transaction_name(job.task, source="task")
            transaction = sentry_sdk.continue_trace(
                job.headers, op="queue.process", name=job.task, source="task", origin="auto.queue.propolis"
            )
            with sentry_sdk.start_transaction(transaction), self._monitored(job):
                _describe(job)
                try:
                    value = await call()
                except BaseException as error:
                    self._failed(job, error)
                    raise
                if isinstance(value, Discard):
                    self._failed(job, value)
                return value

    def _failed(self, job: Job, error: BaseException) -> None:
        is_end = isinstance(error, asyncio.CancelledError | Verdict) and not isinstance(error, Discard)
        span = sentry_sdk.get_current_span()
        if span is not None:
            span.set_status("aborted" if is_end else "internal_error")
        if not is_end and (self._when is None or self._when(job, error)):
            sentry_sdk.capture_exception(error)

    @contextmanager
    def _monitored(self, job: Job) -> Iterator[None]:
        """Where a schedule has put it, its monitor hears how the run fares."""
        name = job.headers.get(SCHEDULE_HEADER)
        if name is None:
            yield
            return
        slug, config = slug_of(name), self._monitor_of(name)
        check_in = sentry_sdk.crons.capture_checkin(slug, status="in_progress", monitor_config=config)
        started, status = time.monotonic(), "error"
        try:
            yield
            status = "ok"
        except Verdict as verdict:
            status = "error" if isinstance(verdict, Discard) else "in_progress"
            raise
        finally:
            duration = time.monotonic() - started
            sentry_sdk.crons.capture_checkin(slug, check_in, status, duration, config)

    def _monitor_of(self, name: str) -> MonitorConfig | None:
        """None for a schedule that is not declared in code, or has a period that Sentry has no word for."""
        declared = self._app.declared_schedules.get(name)
        return None if declared is None else monitor_config(declared.plan)


def slug_of(schedule: str) -> str:
    """The name of a schedule as that of a monitor, which has small letters, digits, - and _ only."""
    return _NOT_A_SLUG.sub("-", schedule.lower()).strip("-")[:50] or "schedule"


def monitor_config(plan: Plan) -> MonitorConfig | None:
    timing = plan.timing
    if isinstance(timing, Cron):
        if len(timing.expression.split()) > 5:  # with seconds
            return None
        return {"schedule": {"type": "crontab", "value": timing.expression}, "timezone": timing.tz}
    minutes, rest = divmod(timing.period_ms, 60_000)
    if rest or not minutes:
        return None
    return {"schedule": {"type": "interval", "value": minutes, "unit": "minute"}}


def _describe(job: Job) -> None:
    span = sentry_sdk.get_current_span()
    if span is None:
        return
    waited = datetime.now(UTC) - job.put_at
    about = {
        "messaging.system": "propolis",
        "messaging.message.id": job.id,
        "messaging.destination.name": job.queue,
        "messaging.message.body.size": len(job.lease.body),
        "messaging.message.retry.count": job.attempt - 1,
        "messaging.message.receive.latency": max(0.0, waited.total_seconds() * 1000),
    }
    for name, value in about.items():
        span.set_data(name, value)

"""Traces and measures for OpenTelemetry: `instrument(app)`, with `pip install "propolis[otel]"`.

Only its API is used: which SDK there is and where it exports to is the application's business.  The names of
attributes are those of the semantic conventions for messaging, which are still being developed: they stand
here and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace
from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider

from propolis import __version__
from propolis.app.application import App
from propolis.app.client.client import Stamp
from propolis.app.context import Job
from propolis.app.verdicts import Discard, Retry, Snooze, Verdict
from propolis.core.batch import BATCH_HEADER
from propolis.core.envelope import Envelope
from propolis.core.job import name_of
from propolis.errors import BadSetting

__all__ = ["instrument"]

_SYSTEM = {"messaging.system": "propolis"}
_SEND = {"messaging.operation.name": "send", "messaging.operation.type": "send"}
_PROCESS = {"messaging.operation.name": "process", "messaging.operation.type": "process"}


def instrument(
    app: App, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
) -> None:
    """Trace what this app puts and runs.  Once for each app, where it is made, so that children do so too.

    The run of a job is a part of the trace in which it was put.  A member of a batch, the callback of one and
    a step of a flow begin traces of their own, with a link there: batches would make traces that nobody can
    look at.
    """
    if app.client.sending is not None:
        raise BadSetting("this app is traced already: call instrument(app) once")
    tracing = Tracing(tracer_provider, meter_provider)
    app.client.sending = tracing.sending
    app.middlewares.insert(0, tracing.run)


class Tracing:
    def __init__(self, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        self._tracer = trace.get_tracer("propolis", __version__, tracers)
        meter = metrics.get_meter("propolis", __version__, meters)
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Jobs that were put")
        self._runs = meter.create_histogram("messaging.process.duration", "s", "How long jobs ran")

    # --- whoever puts --------------------------------------------------------------------

    @contextmanager
    def sending(self) -> Iterator[Stamp]:
        """A span around a put, which is named after its first job, and the stamp for its jobs."""
        with self._tracer.start_as_current_span("send", kind=SpanKind.PRODUCER, attributes=_SYSTEM) as span:
            sent = Sent()
            try:
                yield sent.stamp
            except Exception as error:
                self._count(sent, span, {"error.type": name_of(type(error))})
                raise
            self._count(sent, span, {})

    def _count(self, sent: Sent, span: Span, failed: dict[str, str]) -> None:
        if sent.first is None:
            return
        common = {
            **_SYSTEM,
            "messaging.operation.name": "send",
            "messaging.destination.name": sent.first.queue,
            **failed,
        }
        span.update_name(f"send {sent.first.queue}")
        span.set_attributes({**common, **_SEND, "propolis.task": sent.first.task})
        if sent.n == 1:
            span.set_attribute("messaging.message.id", sent.first.id)
        else:
            span.set_attribute("messaging.batch.message_count", sent.n)
        self._sent.add(sent.n, common)

    # --- whoever runs --------------------------------------------------------------------

    async def run(self, job: Job, call: Callable[[], Any]) -> Any:
        """The middleware: a span around a run, in the process where it runs."""
        context, links = _origin(job)
        started = time.perf_counter()
        failed: dict[str, str] = {}
        with self._tracer.start_as_current_span(
            f"process {job.queue}",
            context,
            SpanKind.CONSUMER,
            _attributes(job),
            links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                value = await call()
                failed = _ended(span, value if isinstance(value, Verdict) else None)
                return value
            except BaseException as error:
                failed = _ended(span, error)
                raise
            finally:
                common = {**_SYSTEM, "messaging.destination.name": job.queue, "propolis.task": job.task}
                self._runs.record(
                    time.perf_counter() - started, {**common, "messaging.operation.name": "process", **failed}
                )


class Sent:
    """What one put has sent so far."""

    def __init__(self) -> None:
        self.first: Envelope | None = None
        self.n = 0

    def stamp(self, job: Envelope) -> Envelope:
        """With the context of the span around its put; one that has brought its own keeps it."""
        self.first = self.first or job
        self.n += 1
        if "traceparent" in job.headers:
            return job
        context: dict[str, str] = {}
        propagate.inject(context)
        return replace(job, headers={**job.headers, **context}) if context else job


def _origin(job: Job) -> tuple[Context, list[Link]]:
    """The context in which its span begins, and what that is linked to."""
    context = propagate.extract(job.headers)
    put = trace.get_current_span(context).get_span_context()
    is_one_of_many = job.batch is not None or BATCH_HEADER in job.headers
    if not (is_one_of_many and put.is_valid):
        return context, []
    return trace.set_span_in_context(trace.INVALID_SPAN, context), [Link(put)]


def _attributes(job: Job) -> dict[str, str | int]:
    about: dict[str, str | int] = {
        **_SYSTEM,
        **_PROCESS,
        "messaging.destination.name": job.queue,
        "messaging.message.id": job.id,
        "messaging.message.body.size": len(job.lease.body),
        "propolis.task": job.task,
        "propolis.attempt": job.attempt,
    }
    if job.batch is not None:
        about["messaging.message.conversation_id"] = job.batch
    return about


def _ended(span: Span, error: BaseException | None) -> dict[str, str]:
    """Write into the span how the run has ended; gives the attributes of its measure."""
    match error:
        case None:
            return {}
        case Snooze():
            span.add_event("snoozed", {"propolis.after": str(error.after)})
            return {}
        case asyncio.CancelledError():
            kind, why = "cancelled", "it was stopped: out of time, cancelled, released or lost"
        case Retry() | Discard():
            kind, why = type(error).__name__, error.reason
        case _:
            kind, why = name_of(type(error)), ""
            span.record_exception(error)
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, why))
    return {"error.type": kind}

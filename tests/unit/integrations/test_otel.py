"""OpenTelemetry: what is put and what runs are spans of one trace, and batches are links."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from tests.unit.worker.working import record_of, work

from propolis import App, Job, Retry, Snooze
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.errors import BadSetting, QueueFull
from propolis.flows import each
from propolis.integrations import otel
from propolis.strategies import archive, dead, fixed, repeat
from propolis.values import Filter
from propolis.worker import Lane


class Seen:
    """What is exported."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._measures = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._measures])

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if name is None or span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self._measures.get_metrics_data()
        assert data is not None
        found: Iterable[Any] = (
            metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        )
        return [point for metric in found if metric.name == name for point in metric.data.data_points]


def context(span: ReadableSpan) -> SpanContext:
    found: SpanContext | None = span.context
    assert found is not None
    return found


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == context(of).span_id


async def envelope_of(app: App, job_id: str) -> Envelope:
    return wire.decode((await record_of(app, job_id)).body)


async def work_on(app: App, *queues: str) -> None:
    await work(app, lanes=[Lane(dict.fromkeys(queues, 1), 1)])


@pytest.fixture
async def seen(app: App) -> AsyncIterator[Seen]:
    exported = Seen()
    otel.instrument(app, tracer_provider=exported.tracers, meter_provider=exported.meters)
    yield exported
    exported.tracers.shutdown()


async def test_a_put_and_its_run_are_one_trace_with_that_of_the_caller(app: App, seen: Seen) -> None:
    @app.task(queue="mail", on_success=archive)
    async def send(to: str) -> None:
        inner.append(trace.get_current_span().get_span_context())

    inner: list[SpanContext] = []
    with seen.tracers.get_tracer("web").start_as_current_span("GET /") as request:
        handle = await send.aenqueue("ann")
    await work_on(app, "mail")

    [put], [run] = seen.spans("send mail"), seen.spans("process mail")
    assert put.parent is not None
    assert put.parent.span_id == request.get_span_context().span_id
    assert is_child(run, put)
    assert inner == [context(run)]
    assert (put.kind, run.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert {one.attributes["messaging.message.id"] for one in (put, run) if one.attributes} == {handle.id}
    assert "traceparent" in (await envelope_of(app, handle.id)).headers


def test_synchronous_code_and_threads_are_in_it_too(app: App, seen: Seen) -> None:
    @app.task
    def save() -> None:
        inner.append(trace.get_current_span().get_span_context())

    inner: list[SpanContext] = []
    with seen.tracers.get_tracer("web").start_as_current_span("main") as main:
        save.enqueue()
        save.many([(), ()]).enqueue()
    app.client.wait(work(app))

    one, both = seen.spans("send default")
    assert one.parent
    assert both.parent
    assert one.parent.span_id == both.parent.span_id == main.get_span_context().span_id
    assert both.attributes
    assert both.attributes["messaging.batch.message_count"] == 2
    runs = seen.spans("process default")
    assert sorted((is_child(run, one), is_child(run, both)) for run in runs) == [
        (False, True),
        (False, True),
        (True, False),
    ]
    assert sorted(each.span_id for each in inner) == sorted(context(run).span_id for run in runs)


async def test_each_attempt_is_a_span_and_says_how_it_ended(app: App, seen: Seen) -> None:
    @app.task(on_error=repeat(3, fixed(0)).then(dead))
    async def fail(job: Job) -> None:
        match job.attempt:
            case 1:
                raise ValueError("no")
            case 2:
                raise Retry("later", after=0)

    @app.task
    async def wait() -> Snooze:
        return Snooze("1h")

    await fail.aenqueue()
    await wait.aenqueue()
    await work(app)

    [put, _] = seen.spans("send default")
    runs = [run for run in seen.spans("process default") if is_child(run, put)]
    assert [run.attributes["propolis.attempt"] for run in runs if run.attributes] == [1, 2, 3]
    assert [run.attributes.get("error.type") for run in runs if run.attributes] == [
        "ValueError",
        "Retry",
        None,
    ]
    assert [run.status.status_code for run in runs] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    assert [event.name for event in runs[0].events] == ["exception"]
    [snoozed] = [run for run in seen.spans("process default") if run not in runs]
    assert (snoozed.status.status_code, [event.name for event in snoozed.events]) == (
        StatusCode.UNSET,
        ["snoozed"],
    )


async def test_members_and_callbacks_of_a_batch_are_linked(app: App, seen: Seen) -> None:
    @app.task
    async def member(n: int) -> None: ...

    @app.task(queue="after")
    async def callback() -> None: ...

    with seen.tracers.get_tracer("web").start_as_current_span("import"):
        await app.batch(member.many(range(3)), callback=callback)
    await work_on(app, "default", "after")

    puts = {
        context(span).span_id: context(span).trace_id
        for span in seen.spans()
        if span.kind is SpanKind.PRODUCER
    }
    runs = [*seen.spans("process default"), *seen.spans("process after")]
    assert len(runs) == 4
    for run in runs:
        [link] = run.links
        assert run.parent is None
        assert puts[link.context.span_id] == link.context.trace_id
        assert context(run).trace_id != link.context.trace_id


async def test_steps_of_a_flow_are_linked_to_where_it_began(app: App, seen: Seen) -> None:
    @app.task
    async def pages() -> list[int]:
        return [1, 2]

    @app.task
    async def fetch(page: int) -> int:
        return page

    @app.task
    async def total(found: list[int]) -> int:
        return sum(found)

    with seen.tracers.get_tracer("web").start_as_current_span("start") as start:
        await (pages.step() | each(fetch.step()) | total.step()).aenqueue()
    await work(app)

    runs = seen.spans("process default")
    assert len(runs) == 4
    traces = [link.context.trace_id for run in runs for link in run.links]
    assert traces == [start.get_span_context().trace_id] * 4


async def test_what_a_job_emits_is_in_its_trace_and_its_next_turn_in_another(app: App, seen: Seen) -> None:
    @app.task(queue="next")
    async def follow() -> None: ...

    @app.task
    async def lead(job: Job) -> None:
        job.emit(follow)
        job.again(after="1h")

    handle = await lead.aenqueue()
    await work_on(app, "default", "next")

    [lead_run], [follow_run] = seen.spans("process default"), seen.spans("process next")
    assert context(follow_run).trace_id == context(lead_run).trace_id
    [turn] = [info for info in await app.jobs.afind(Filter(queue="default")) if info.id != handle.id]
    assert (await envelope_of(app, turn.id)).headers == {}


async def test_a_put_that_fails_says_why(app: App, seen: Seen) -> None:
    @app.task
    async def send() -> None: ...

    await (await app.ready()).add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 0))
    with pytest.raises(QueueFull):
        await send.aenqueue()

    [put] = seen.spans("send default")
    assert put.status.status_code is StatusCode.ERROR
    assert put.attributes
    assert put.attributes["error.type"] == "QueueFull"
    [point] = seen.points("messaging.client.sent.messages")
    assert (point.value, point.attributes["error.type"]) == (1, "QueueFull")


async def test_how_long_jobs_ran_is_measured_by_task_and_error(app: App, seen: Seen) -> None:
    @app.task(name="good")
    async def good() -> None: ...

    @app.task(name="bad", on_error=dead)
    async def bad() -> None:
        raise KeyError("x")

    await good.many([(), ()]).aenqueue()
    await bad.aenqueue()
    await work(app)

    points = seen.points("messaging.process.duration")
    assert {
        (point.attributes["propolis.task"], point.attributes.get("error.type")): point.count
        for point in points
    } == {("good", None): 2, ("bad", "KeyError"): 1}


async def test_a_job_that_brings_its_own_trace_keeps_it(app: App, seen: Seen) -> None:
    @app.task
    async def send() -> None: ...

    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await send.using(headers={"traceparent": given}).aenqueue()
    await work(app)

    [run] = seen.spans("process default")
    assert run.parent is not None
    assert f"{run.parent.span_id:016x}" == "b7ad6b7169203331"


def test_an_app_is_traced_once(app: App, seen: Seen) -> None:
    with pytest.raises(BadSetting, match="traced already"):
        otel.instrument(app)


async def test_an_app_that_is_not_traced_puts_no_headers(app: App) -> None:
    @app.task(on_success=archive)
    async def send() -> None: ...

    handle = await send.aenqueue()
    assert (await envelope_of(app, handle.id)).headers == {}

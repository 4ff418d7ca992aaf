"""The app of test_traced_children.py: every child imports it, and appends its spans to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from propolis import App
from propolis.integrations import otel


class ToFile(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with Path(os.environ["SPANS"]).open("a", encoding="utf-8") as file:
            for span in spans:
                print(json.dumps({"pid": os.getpid(), **json.loads(span.to_json(None))}), file=file)
        return SpanExportResult.SUCCESS


tracers = TracerProvider()
tracers.add_span_processor(SimpleSpanProcessor(ToFile()))
app = App("memory://")
otel.instrument(app, tracer_provider=tracers)


@app.task(isolate="process", env={"SPANS": os.environ["SPANS"]})
def alone() -> None:
    with trace.get_tracer("own", tracer_provider=tracers).start_as_current_span("own"):
        pass

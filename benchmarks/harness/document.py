"""Results into docs/benchmarks.md, between markers, so that what people wrote around them stays."""

from __future__ import annotations

import textwrap
from pathlib import Path

from harness.charts import Bar, bars, dots
from harness.results import Results, Row, dump
from harness.tables import OURS, RAW, by_drain, notes, ratios, table

WIDTH = 110


def between_markers(text: str, name: str, content: str, script: str = "peers.py") -> str:
    """`text` with `content` between the markers of `name`; without markers they are added at its end."""
    begin, end = f"<!-- {name}: begin, written by benchmarks/{script} -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{wrapped(content.strip())}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    head, rest = text.split(begin, 1)
    if end not in rest:
        raise ValueError(f"the marker {end!r} is missing: put it after what the script wrote")
    return head + block + rest.split(end, 1)[1]


def wrapped(text: str) -> str:
    """`text` with each long line wrapped, but for tables; what follows in a list is indented."""
    return "\n".join(line if line.startswith("|") else _wrapped_line(line) for line in text.split("\n"))


def _wrapped_line(line: str) -> str:
    text = line.lstrip(" ")
    indent = len(line) - len(text) + (2 if text.startswith("- ") else 0)
    pieces = textwrap.wrap(
        line.rstrip(),
        WIDTH,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(pieces)


def write(results: Results, document: Path) -> list[Path]:
    """The table into the document, charts and raw results into the folder beside it; what was written."""
    folder = document.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drain, latency, raw = (folder / name for name in _files(results))
    drain.write_text(drain_chart(results))
    if has_latencies(results):
        latency.write_text(latency_chart(results))
    dump(results, raw)
    text = document.read_text() if document.exists() else "# Benchmarks\n"
    content = section(results, folder.name)
    document.write_text(between_markers(text, results.name, content))
    return [path for path in (document, drain, latency, raw) if path.exists()]


def section(results: Results, folder: str) -> str:
    title, options = results.title, results.options
    drain, latency, raw = (f"{folder}/{name}" for name in _files(results))
    backlog = f", {options['backlog']:,} more waiting" if options.get("backlog") else ""
    chart_of_latencies = f"![Idle latency on {title}]({latency})\n\n" if has_latencies(results) else ""
    return f"""### {title}

{results.date}; {results.storage}, {results.storage_settings}; {results.machine}.
Up to {options["jobs"]:,} no-op jobs of 300 bytes{backlog}, one worker process,
{options["repeat"]} turn(s), medians (smallest–largest). {results.caveat}

{table(results)}

{ratios(results)}

![Jobs drained per second on {title}]({drain})

{chart_of_latencies}How each was set up, and what failed ([raw results]({raw})):

{notes(results)}
"""


def has_latencies(results: Results) -> bool:
    return any(row.of("latency", "p50_ms") for row in results.rows)


def _files(results: Results) -> list[str]:
    return [f"{results.name}-{name}" for name in ("drain.svg", "latency.svg", "run.json")]


def drain_chart(results: Results) -> str:
    found = [(row, row.of("drain", "rate")) for row in by_drain(results.rows)]
    rows = [Bar(row.peer, rate.median, rate.low, rate.high, _kind(row)) for row, rate in found if rate]
    return bars(f"{results.title}: jobs drained per second", "one worker process, no-op jobs", rows)


def latency_chart(results: Results) -> str:
    rows = []
    for row in results.rows:
        p50, p99 = row.of("latency", "p50_ms"), row.of("latency", "p99_ms")
        if p50 and p99:
            rows.append(Bar(row.peer, p50.median, p50.median, p99.median, _kind(row)))
    rows.sort(key=lambda bar: bar.low)
    return dots(f"{results.title}: sent to started, idle worker", "milliseconds, p50 and p99", rows)


def _kind(row: Row) -> str:
    return {OURS: "ours", RAW: "raw"}.get(row.peer, "bar")

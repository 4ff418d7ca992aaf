"""Results as a Markdown table with notes.  Pure: values in, text out."""

from __future__ import annotations

from harness.results import Results, Row
from harness.statistics import Summary, ratio

HEAD = (
    "queue",
    "send one by one /s",
    "bulk /s",
    "drain /s",
    "of raw",
    "worker + server µs/job",
    "RSS MB",
    "idle p50 / p99 ms",
    "kill -9: unfinished / run twice",
    "whole after s",
)
NOTHING = "–"
RAW = "raw loop"
OURS = "propolis"


def table(results: Results) -> str:
    """One row per peer, the fastest drain first; what failed says so and has a note."""
    raw = next((row.all("drain", "rate") for row in results.rows if row.peer == RAW), [])
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    lines += [_line(cells(row, raw)) for row in by_drain(results.rows)]
    return "\n".join(lines)


def by_drain(rows: list[Row]) -> list[Row]:
    def rate(row: Row) -> float:
        found = row.of("drain", "rate")
        return found.median if found else -1.0

    return sorted(rows, key=rate, reverse=True)


def cells(row: Row, raw: list[float]) -> list[str]:
    of_raw = ratio(row.all("drain", "rate"), raw)
    return [
        _name(row),
        _cell(row, "send", number(row.of("send", "rate"))),
        _cell(row, "bulk", number(row.of("bulk", "rate"))),
        _cell(row, "drain", with_spread(row.of("drain", "rate"))),
        _share(of_raw) if of_raw else NOTHING,
        _pair(row, "drain", "cpu_us", "server_us", " + "),
        number(row.of("drain", "rss_mb")),
        _cell(row, "latency", _pair(row, "latency", "p50_ms", "p99_ms", " / ")),
        _cell(row, "crash", _worst(row)),
        number(row.of("crash", "whole_after_s")),
    ]


def notes(results: Results) -> str:
    """Versions, settings and failures, a line each."""
    lines = []
    for row in by_drain(results.rows):
        version = f" {row.version}" if row.version else ""
        lines.append(f"- **{row.peer}**{version} ({row.language}): {row.settings or 'not started'}")
        lines += [f"    - {step} failed: {reason}" for step, reason in sorted(row.failures.items())]
    return "\n".join(lines)


def ratios(results: Results) -> str:
    """How many times the drain of each peer ours is, and how much more CPU a job costs there."""
    rates = {row.peer: rates for row in results.rows if (rates := row.all("drain", "rate"))}
    costs = {row.peer: costs for row in results.rows if (costs := cpu_of(row))}
    if OURS not in rates:
        return "propolis has no drain in this run."
    others = [peer for peer in rates if peer != OURS]
    if not others:
        return "Drain of propolis alone was measured."
    faster = {peer: ratio(rates[OURS], rates[peer]) or 0.0 for peer in others}
    cheaper = {peer: ratio(costs[peer], costs[OURS]) or 0.0 for peer in others}
    return (
        f"Drain of propolis: {_times(faster)}.\n"
        f"CPU of worker and server for a job, compared with propolis's: {_times(cheaper)}."
    )


def cpu_of(row: Row) -> list[float]:
    """Microseconds of worker and server for one job, in each turn."""
    pairs = zip(row.all("drain", "cpu_us"), row.all("drain", "server_us"), strict=True)
    return [worker + server for worker, server in pairs]


def _times(factors: dict[str, float]) -> str:
    ordered = sorted(factors.items(), key=lambda item: item[1])
    return ", ".join(f"{digits(factor)} × {peer}" for peer, factor in ordered)


def number(found: Summary | None) -> str:
    """Three digits are more than a noisy machine can promise."""
    return NOTHING if found is None else digits(found.median)


def digits(value: float) -> str:
    if value >= 999.5:
        size = 10 ** (len(str(round(value))) - 3)
        return f"{round(value / size) * size:,}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _share(part: float) -> str:
    return f"{part:.2f}" if part >= 0.1 else f"{part:.2g}"


def with_spread(found: Summary | None) -> str:
    if found is None:
        return NOTHING
    if found.runs == 1:
        return f"**{digits(found.median)}**"
    return f"**{digits(found.median)}** ({digits(found.low)}–{digits(found.high)})"


def _pair(row: Row, step: str, one: str, other: str, between: str) -> str:
    first, second = row.of(step, one), row.of(step, other)
    return (
        NOTHING
        if first is None or second is None
        else f"{digits(first.median)}{between}{digits(second.median)}"
    )


def _worst(row: Row) -> str:
    """Of several turns the worst counts: a job lost once is a job lost."""
    unfinished, twice = row.of("crash", "unfinished"), row.of("crash", "twice")
    return NOTHING if unfinished is None or twice is None else f"{unfinished.high:.0f} / {twice.high:.0f}"


def _name(row: Row) -> str:
    name = f"*{row.peer}*" if row.peer in (RAW, OURS) else row.peer
    return f"{name} (Node)" if row.language == "node" else name


def _cell(row: Row, step: str, text: str) -> str:
    """A figure, or that the step failed: a missing figure would look like a missing ability."""
    if step in row.failures or "start" in row.failures:
        return f"{text} (failed)" if text != NOTHING else "failed"
    return text


def _line(parts: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(parts) + " |"

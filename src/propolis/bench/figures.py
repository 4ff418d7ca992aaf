"""What measurements give: values, their units, and what several runs of one say together."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct


class Figure(Struct, frozen=True):
    """One value of one run.  `raw` is what the hand-written loop did in the same run, in the same unit."""

    name: str
    value: float
    unit: str
    raw: float | None = None


class Summary(Struct, frozen=True):
    """What several runs say: the middle, the two ends, and the share of raw where that was measured."""

    name: str
    unit: str
    median: float
    lowest: float
    highest: float
    raw: float | None
    of_raw: float | None
    runs: int


def summed_up(figures: Sequence[Figure]) -> list[Summary]:
    """One summary per name, in the order in which the names first came.

    The ratio is the middle of the runs' own ratios: a machine's speed varies from minute to minute, and a
    ratio within one run less than one across runs.
    """
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.name, []).append(figure)
    return [_summary(runs) for runs in found.values()]


def _summary(runs: list[Figure]) -> Summary:
    values = [run.value for run in runs]
    raws = [run.raw for run in runs if run.raw is not None]
    ratios = [run.value / run.raw for run in runs if run.raw]
    return Summary(
        name=runs[0].name,
        unit=runs[0].unit,
        median=statistics.median(values),
        lowest=min(values),
        highest=max(values),
        raw=statistics.median(raws) if raws else None,
        of_raw=statistics.median(ratios) if ratios else None,
        runs=len(runs),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    versions: dict[str, str | int] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
    }
    for package in ("propolis", "msgspec", "uvloop", "asyncpg", "hiredis"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions

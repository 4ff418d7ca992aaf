"""What a run found, as plain values that go to JSON and come back."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.statistics import Summary, summary


@dataclass(slots=True)
class Row:
    """One peer on one engine: the figures of every step of every turn, and what went wrong."""

    peer: str
    language: str
    version: str = ""
    settings: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    steps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, step: str, figures: dict[str, float]) -> None:
        self.steps.setdefault(step, []).append(figures)

    def of(self, step: str, fact: str) -> Summary | None:
        return summary(self.all(step, fact))

    def all(self, step: str, fact: str) -> list[float]:
        return [figures[fact] for figures in self.steps.get(step, []) if figures.get(fact) is not None]


@dataclass(slots=True)
class Results:
    """One run on one engine: figures of different runs are never put beside one another."""

    engine: str
    storage: str
    storage_settings: str
    date: str
    machine: str
    options: dict[str, Any]
    caveat: str = ""
    label: str = ""
    rows: list[Row] = field(default_factory=list)

    @property
    def title(self) -> str:
        engine = {"postgres": "PostgreSQL", "redis": "Redis", "sqlite": "SQLite"}[self.engine]
        return f"{engine}, {self.label}" if self.label else engine

    @property
    def name(self) -> str:
        """For markers and files: a run with a label stands beside the one without."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.engine} {self.label}".lower()).strip("-")


def dump(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_plain(asdict(results)), indent=1, sort_keys=True) + "\n")


def read(path: Path) -> Results:
    found = json.loads(path.read_text())
    return Results(**found | {"rows": [Row(**row) for row in found["rows"]]})


def _plain(value: Any) -> Any:
    """JSON has no NaN: what has no number becomes null.  Rates do not need nine digits."""
    match value:
        case dict():
            return {name: _plain(part) for name, part in value.items()}
        case list():
            return [_plain(part) for part in value]
        case float():
            return None if math.isnan(value) else float(f"{value:.5g}")
        case _:
            return value


def machine() -> str:
    """What is known of this machine, without its name."""
    parts = [f"{_cores()} cores", _processor(), _memory(), f"{platform.system()} {platform.release()}"]
    return ", ".join(part for part in parts if part)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _processor() -> str:
    return _proc_field("/proc/cpuinfo", "model name") or platform.processor()


def _memory() -> str:
    kilobytes = _proc_field("/proc/meminfo", "MemTotal").split(" ")[0]
    return f"{int(kilobytes) / 1024**2:.0f} GiB" if kilobytes else ""


def _proc_field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")

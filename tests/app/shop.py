"""An app whose batches are under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from propolis import App, BatchReport
from propolis.app.batch.new_batch import BatchHandle, NewBatch
from propolis.core.envelope import Envelope
from propolis.strategies import dead, fixed, repeat
from propolis.values import BatchStatus


class Shop:
    """An app with members that succeed or fail by choice, and callbacks that remember."""

    def __init__(self) -> None:
        self.app = app = App("memory://")
        self.runs: Counter[str] = Counter()
        self.reports: list[tuple[str, BatchStatus]] = []

        @app.task(on_error=repeat(2, fixed("1m")).then(dead), result_ttl="1h")
        async def square(n: int) -> int:
            self.runs["square"] += 1
            return n * n

        @app.task(on_error=repeat(2, fixed("1m")).then(dead))
        async def fail(_: int = 0) -> None:
            self.runs["fail"] += 1
            raise ValueError("no")

        @app.task
        async def finished(report: BatchReport) -> None:
            self.reports.append(("finished", report.status))

        @app.task
        async def succeeded(report: BatchReport) -> None:
            self.reports.append(("succeeded", report.status))

        @app.task
        async def failed(report: BatchReport) -> None:
            self.reports.append(("failed", report.status))

        self.square, self.fail = square, fail
        self.finished, self.succeeded, self.failed = finished, succeeded, failed
        self.callbacks: Any = {"callback": finished, "on_succeeded": succeeded, "on_failed": failed}

    def called_back(self) -> list[tuple[str, str]]:
        return [(what, status.state.value) for what, status in self.reports]


class Broken(Exception):
    """What happens to somebody who fills a batch."""


async def fill_and_break(batch: NewBatch, calls: Iterable[Envelope]) -> None:
    async with batch as b:
        await b.add_many(calls)
        raise Broken


async def status_of(batch: BatchHandle) -> BatchStatus:
    status = await batch.astatus()
    assert status is not None
    return status

"""A large fan-out holds up nobody."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.unit.worker.working import work

from propolis import App
from propolis.app.flow.continuation import following
from propolis.app.flow.steps import each
from propolis.worker import outcomes


@pytest.mark.parametrize(("size", "apart"), [(3, False), (3000, True)])
async def test_what_follows_a_large_result_is_not_made_in_the_event_loop(
    app: App, monkeypatch: pytest.MonkeyPatch, size: int, apart: bool
) -> None:
    """L5.11."""
    threads: list[tuple[str, int]] = []
    made = following

    def watched(*args: Any) -> tuple[Any, ...]:
        jobs = tuple(made(*args))
        threads.append((threading.current_thread().name, len(jobs)))
        return jobs

    monkeypatch.setattr(outcomes, "next_jobs", watched)

    @app.task
    async def numbers(size: int) -> list[int]:
        return list(range(size))

    @app.task
    async def twice(number: int) -> int:
        return 2 * number

    @app.task(result_ttl="1h")
    async def total(all_of_them: list[int]) -> int:
        return sum(all_of_them)

    handle = await (numbers.step(size) | each(twice.step()) | total.step()).aenqueue()
    await work(app)
    assert await handle.aresult() == size * (size - 1)
    [name] = [name for name, jobs in threads if jobs == size]
    assert (name == "propolis-slot-thread") is apart

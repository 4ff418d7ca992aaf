"""A job as it is called, wherever that is: through the middlewares, with its dependencies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from propolis.app.client.blocking import in_event_loop
from propolis.app.context import Job
from propolis.app.registry import Middleware
from propolis.app.task import Task, is_async
from propolis.errors import Misuse
from propolis.worker.calls.dependencies import provide
from propolis.worker.calls.plain_calls import CallsPlain, call_either

Innermost = Callable[[], Coroutine[Any, Any, Any]]


async def call_around(
    middlewares: Sequence[Middleware], job: Job, innermost: Innermost, plain: CallsPlain
) -> Any:
    """Through the middlewares, the first declared outermost.

    What a plain one is given to call gives the value, and not something to await.
    """
    if not middlewares:
        return await innermost()
    wrap, *others = middlewares

    def inner() -> Coroutine[Any, Any, Any]:
        return call_around(others, job, innermost, plain)

    def inner_of_plain() -> Any:
        # In the loop a coroutine that it returned is awaited.
        return inner() if in_event_loop() else plain.wait(inner())

    return await call_either(plain, wrap, job, inner if is_async(wrap) else inner_of_plain)


async def call_task(
    task: Task[..., Any], job: Job, args: tuple[Any, ...], kwargs: dict[str, Any], plain: CallsPlain
) -> Any:
    async with AsyncExitStack() as stack:
        provided = await provide(task.signature, job, stack, plain) if task.signature.provided else {}
        if task.is_async:
            return await task.function(*args, **kwargs, **provided)
        return _finished(await plain.call(task.function, args, kwargs | provided))


def _finished(value: Any) -> Any:
    """A plain function that only made a coroutine or a generator has not done its work."""
    if inspect.iscoroutine(value):
        value.close()
        raise Misuse("it returned a coroutine that nobody awaits: an `async def` behind a plain decorator?")
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise Misuse("it returned a generator that nobody runs")
    return value

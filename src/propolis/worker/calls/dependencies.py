"""What the worker gives to a function besides its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from propolis.app.context import Job
from propolis.app.signature import Depends, Signature
from propolis.worker.calls.plain_calls import CallsPlain, call_either


async def provide(signature: Signature, job: Job, stack: AsyncExitStack, plain: CallsPlain) -> dict[str, Any]:
    """What the worker gives to a function: the job itself, and its dependencies in their order."""
    given: dict[str, Any] = {}
    for name, source in signature.provided.items():
        if isinstance(source, Depends):
            kwargs = await provide(signature.providers[name], job, stack, plain)
            given[name] = await _make(source.provider, kwargs, stack, plain)
        else:
            given[name] = await source.given(job)
    return given


async def _make(
    provider: Callable[..., Any], kwargs: dict[str, Any], stack: AsyncExitStack, plain: CallsPlain
) -> Any:
    if inspect.isasyncgenfunction(provider):
        return await stack.enter_async_context(asynccontextmanager(provider)(**kwargs))
    if not inspect.isgeneratorfunction(provider):
        return await call_either(plain, provider, **kwargs)
    manager = contextmanager(provider)(**kwargs)

    async def leave(*error: Any) -> bool | None:
        swallowed: bool | None = await plain.call(manager.__exit__, error, {})
        return swallowed

    made = await plain.call(manager.__enter__, (), {})
    stack.push_async_exit(leave)
    return made

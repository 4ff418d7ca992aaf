"""What the worker gives to a function besides its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from skep.context import Job
from skep.signature import Depends, Signature


async def provide(signature: Signature, job: Job, stack: AsyncExitStack) -> dict[str, Any]:
    """What the worker gives to a function: the job itself, and its dependencies in their order."""
    given: dict[str, Any] = {}
    for name, source in signature.provided.items():
        if isinstance(source, Depends):
            kwargs = await provide(signature.providers[name], job, stack)
            given[name] = await _make(source.provider, kwargs, stack)
        else:
            given[name] = await source.given(job)
    return given


async def _make(provider: Callable[..., Any], kwargs: dict[str, Any], stack: AsyncExitStack) -> Any:
    if inspect.isasyncgenfunction(provider):
        return await stack.enter_async_context(asynccontextmanager(provider)(**kwargs))
    if inspect.isgeneratorfunction(provider):
        return stack.enter_context(contextmanager(provider)(**kwargs))
    made = provider(**kwargs)
    return await made if inspect.isawaitable(made) else made

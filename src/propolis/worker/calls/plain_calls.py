"""Calls of functions that may be plain: those run in the thread of their job, never in the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from propolis.app.task import is_async

T = TypeVar("T")


class CallsPlain(Protocol):
    """Whoever has a thread for the plain functions of a job."""

    async def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine gives, run by the event loop; called by a function that `call` has called."""
        ...


async def call_either(plain: CallsPlain, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A coroutine function in the event loop, any other in the thread of the job."""
    answer = function(*args, **kwargs) if is_async(function) else await plain.call(function, args, kwargs)
    return await answer if inspect.isawaitable(answer) else answer

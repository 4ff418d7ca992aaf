"""Asynchronous code for synchronous callers: an event loop in a thread, and verbs that wait for it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  # it registers what it can register neither at exit nor in a fork
import ctypes
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from propolis.engines.shared.guarded_lock import serves_others, waits_in_vain
from propolis.errors import EngineUnavailable, OutcomeUnknown

P = ParamSpec("P")
T = TypeVar("T")

WINDS_UP_WITHIN = 2.0  # seconds, when the program ends


def in_event_loop() -> bool:
    """Does one run here?  Asked so, nothing that follows seems to happen while another error is handled."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Background:
    """One event loop in a thread, for callers that have none."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ended = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="propolis-background", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # newer Pythons begin none once the program ends
            self._loop.close()
            raise EngineUnavailable(f"{error}: nothing was changed") from error
        _backgrounds.add(self)

    def _run(self) -> None:
        serves_others()
        self._run_until_stopped()
        self._loop.run_until_complete(_wind_up())
        self._ended = True  # whoever comes from now on sees that; those who came meanwhile are answered:
        self._loop.run_until_complete(_wind_up())

    def _run_until_stopped(self) -> None:
        """Also where a task or a callback in it calls `sys.exit()`: others wait for answers."""
        while True:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                continue  # whoever awaits that task hears of it
            return

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """`EngineUnavailable` once it was stopped."""
        try:
            return self._submitted(coroutine).result()
        except CancelledError as error:
            raise OutcomeUnknown("the app was closed by another thread before there was an answer") from error
        except RuntimeError as error:  # neither names are resolved then, nor is a busy file waited for
            if "interpreter shutdown" not in str(error):
                raise
            raise EngineUnavailable(f"the program is ending ({error}): nothing was changed") from error

    def _submitted(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        with suppress(RuntimeError):  # the loop is closed
            answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            if not self._ended:
                return answer
            self._thread.join()
            if answer.done():
                return answer
        coroutine.close()
        raise EngineUnavailable("the app was closed by another thread: nothing was changed")

    def stop(self) -> None:
        _backgrounds.discard(self)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def end_with_the_program(self) -> None:
        """A program that ends without `close()` lets go of its connections all the same."""
        if self._pid == os.getpid():  # or else it is the parent's, whose thread is not here
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WINDS_UP_WITHIN)

    def leave_to_the_parent(self) -> None:
        """In a child: what runs in this loop is never torn down here, also not when the child ends.

        Tasks that are destroyed clean up, and would close connections that are still the parent's.
        """
        everything = [self._loop, *asyncio.all_tasks(self._loop)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(everything))


async def _wind_up() -> None:
    """What still runs in this loop, such as an engine that lets go of its connections, comes to its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if not task.cancelling():  # a second time would disturb what cleans up
            task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()
_program_ends = False


def _at_exit() -> None:
    """After all handlers that were registered later than this module was imported: they may still wait."""
    global _program_ends
    _program_ends = True
    for background in list(_backgrounds):
        background.end_with_the_program()


atexit.register(_at_exit)


def check_can_wait() -> None:
    """`EngineUnavailable` where whoever waits for another thread would do so for ever."""
    if _program_ends or sys.is_finalizing():
        raise EngineUnavailable(
            "the program is ending, and nothing was changed: do it before, or in an atexit handler that is "
            "registered after propolis was imported"
        )
    if waits_in_vain():
        raise EngineUnavailable(
            "this signal handler, or __del__, has interrupted the engine, which cannot go on while you wait: "
            "nothing was changed; have it set a flag, and do the rest elsewhere"
        )


def _after_fork() -> None:
    for background in _backgrounds:
        background.leave_to_the_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- verbs for synchronous code ----------------------------------------------------------


class Waits(Protocol):
    """Whoever runs a coroutine for a synchronous caller: a client."""

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T: ...


class HasClient(Protocol):
    """An object whose verbs go through a client."""

    @property
    def _client(self) -> Waits: ...


H = TypeVar("H", bound=HasClient)


def blocking(
    method: Callable[Concatenate[H, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[H, P], T]:
    """The twin of an asynchronous verb for synchronous code: `get = blocking(aget)`."""

    @wraps(method)
    def twin(owner: H, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return owner._client.wait(method(owner, *args, **kwargs))

    return _as_twin(twin, method)


def blocking_list(
    method: Callable[Concatenate[H, P], AsyncIterator[T]],
) -> Callable[Concatenate[H, P], list[T]]:
    """The twin of an asynchronous iterator: a list of all that it gives."""

    async def everything(items: AsyncIterator[T]) -> list[T]:
        return [item async for item in items]

    @wraps(method)
    def twin(owner: H, /, *args: P.args, **kwargs: P.kwargs) -> list[T]:
        return owner._client.wait(everything(method(owner, *args, **kwargs)))

    return _as_twin(twin, method)


def _as_twin(twin: T, method: Callable[..., Any]) -> T:
    name, doc = method.__name__, method.__doc__
    about = {
        "__name__": name.removeprefix("a"),
        "__qualname__": method.__qualname__.removesuffix(name) + name.removeprefix("a"),
        "__doc__": f"`{name}`, for synchronous code." + (f"\n\n{doc}" if doc else ""),
    }
    for attribute, value in about.items():
        setattr(twin, attribute, value)
    return twin

"""Plain functions in threads of their own: one thread per slot, left behind if it does not come back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

from propolis.worker.process.signals import end_if_forked

T = TypeVar("T")
Answer = tuple[BaseException | None, Any]


class PlainCall:
    """One call of a function, and the task that it waits for, if it does."""

    __slots__ = ("call", "future", "loop", "waits_for")

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Answer] = self.loop.create_future()
        self.waits_for: asyncio.Task[Any] | None = None

    def answer(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)


class SlotThread:
    """Runs one function at a time.  A daemon: a function that never returns cannot hold up the process."""

    _here = threading.local()

    def __init__(self) -> None:
        self.left = False
        self._work: SimpleQueue[PlainCall | asyncio.Task[Any] | None] = SimpleQueue()
        self._current: PlainCall | None = None
        self._thread = threading.Thread(target=self._run, name="propolis-slot-thread", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises what the function raises.  Cancelled, it is `left` with the function, which runs on.

        What the function sets in context variables is set here too.
        """
        context = copy_context()
        work = PlainCall(lambda: context.run(function, *args, **kwargs))
        self._work.put(work)
        while True:
            try:
                error, answer = await work.future
                break
            except asyncio.CancelledError:
                if work.waits_for is None:
                    self.left = True
                    self.end()
                    raise
                work.future = work.loop.create_future()  # it hears of it by what it waits for
                work.waits_for.cancel()
        set_again(context)
        if error is not None:
            raise error
        return answer

    @classmethod
    def wait(cls, coroutine: Coroutine[Any, Any, T]) -> T:
        """Called in such a function: have the event loop run this, and do what that asks for meanwhile."""
        thread: SlotThread = cls._here.thread
        work, context = thread._current, copy_context()
        assert work is not None

        def begin() -> None:
            work.waits_for = work.loop.create_task(coroutine, context=context)
            work.waits_for.add_done_callback(end)

        def end(task: asyncio.Task[Any]) -> None:
            work.waits_for = None
            if thread.left:  # with a function that it called further in
                work.future.cancel()
            thread._work.put(task)

        work.loop.call_soon_threadsafe(begin)
        task = thread._serve()
        if task is None:
            raise asyncio.CancelledError
        set_again(context)
        waited: T = task.result()
        return waited

    def end(self) -> None:
        """When it is done with what it does."""
        self._work.put(None)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        self._here.thread = self
        while self._serve() is not None:  # a task whose waiter was left
            pass

    def _serve(self) -> asyncio.Task[Any] | None:
        """Call what is asked for, until a task has ended that somebody here waits for, or it is to end."""
        before = self._current
        while isinstance(work := self._work.get(), PlainCall):
            self._current = work
            try:
                answer: Answer = (None, work.call())
            except BaseException as error:
                answer = (error, None)
            end_if_forked()
            with suppress(RuntimeError):  # the loop has ended, and with it whatever waited
                work.loop.call_soon_threadsafe(work.answer, answer)
            del work, answer
            self._current = before
        if work is None and before is not None:
            self._work.put(None)  # whoever waits further out is to end too
        return work


def set_again(context: Context) -> None:
    """Set here what was set in another context."""
    for variable, value in context.items():
        if variable.get(_NOTHING) is not value:
            variable.set(value)


_NOTHING = object()

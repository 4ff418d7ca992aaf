"""Plain functions in threads of their own: one thread per slot, left behind if it does not come back."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

Answer = tuple[BaseException | None, Any]
Work = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Answer]"]


class SlotThread:
    """Runs one function at a time.  A daemon: a function that never returns cannot hold up the process."""

    def __init__(self) -> None:
        self.left = False
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="skep-slot-thread", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raises what the function raises.  Cancelled, it is `left` with the function, which runs on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        context = contextvars.copy_context()
        self._work.put((lambda: context.run(function, *args, **kwargs), loop, future))
        try:
            error, answer = await future
        except asyncio.CancelledError:
            self.left = True
            self.end()
            raise
        if error is not None:
            raise error
        return answer

    def end(self) -> None:
        """When it is done with what it does."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            call, loop, future = work
            try:
                answer: Answer = (None, call())
            except BaseException as error:
                answer = (error, None)
            with suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
                loop.call_soon_threadsafe(_tell, future, answer)
            del work, call, future, answer


def _tell(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)

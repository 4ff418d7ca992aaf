"""The threads of the slots: made when they are needed, and counted when they are left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from propolis.worker.attempt import Slot
from propolis.worker.calls.threads import SlotThread

log = logging.getLogger("propolis.worker")

T = TypeVar("T")


class SlotThreads:
    def __init__(self) -> None:
        self._left: list[SlotThread] = []

    def of(self, slot: Slot) -> ThreadOfSlot:
        return ThreadOfSlot(slot, self._left)

    @property
    def left(self) -> int:
        """How many run on for jobs that were to stop."""
        self._left[:] = [thread for thread in self._left if thread.alive]
        return len(self._left)


class ThreadOfSlot:
    """Calls plain functions for the job of a slot."""

    def __init__(self, slot: Slot, left: list[SlotThread]) -> None:
        self._slot = slot
        self._left = left

    async def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slot = self._slot
        thread = slot.resource
        if not isinstance(thread, SlotThread):
            thread = slot.resource = SlotThread()
        try:
            return await thread.call(function, args, kwargs)
        finally:
            if thread.left:  # it runs on: nobody listens to it any more, and the slot gets a new one
                self._leave(thread)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return SlotThread.wait(coroutine)

    def _leave(self, thread: SlotThread) -> None:
        if thread not in self._left:
            self._left.append(thread)
            lease = self._slot.lease
            log.error("job %s is stuck: its thread cannot be stopped", lease.id if lease else "?")
        if self._slot.resource is thread:
            self._slot.resource = None

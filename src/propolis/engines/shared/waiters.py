"""Wake-ups inside one process, across threads and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from propolis.engines.shared.guarded_lock import GuardedLock


class Waiters:
    """Those that wait, and for which queues.

    A change that happens between a look and the wait that follows it is not missed: `wait` returns
    at once when one of its queues has been woken since the last look into that.
    """

    def __init__(self) -> None:
        self._lock = GuardedLock()
        self._waiting: dict[Callable[[], None], frozenset[str]] = {}
        self._changed: set[str] = set()
        self._seen: set[str] | None = None  # since all were woken; None: they never were

    def looked(self, queues: Iterable[str]) -> None:
        """Whoever calls this has seen everything up to now in these queues."""
        if self._changed or self._seen is not None:
            with self._lock:
                seen = set(queues)
                self._changed -= seen
                if self._seen is not None:
                    self._seen |= seen

    def wake(self, queue: str | None = None) -> None:
        """Something may have changed in this queue, or (None) in any."""
        if not self._waiting and queue in self._changed:
            return
        with self._lock:
            if queue is None:
                self._seen = set()
            else:
                self._changed.add(queue)
        self.wake_waiting(queue)

    def wake_waiting(self, queue: str | None = None) -> None:
        """Only those that wait now: nobody who comes later hears of it."""
        with self._lock:
            woken = [wake for wake, queues in self._waiting.items() if queue is None or queue in queues]
        for wake in woken:
            wake()

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        with self.waiting(queues) as event:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await event.wait()
            return event.is_set()

    @contextlib.contextmanager
    def waiting(self, queues: Sequence[str]) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set when one of these queues changes, or has already."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()
        here = threading.get_ident()
        wanted = frozenset(queues)

        def wake() -> None:
            if threading.get_ident() == here:  # no detour, and no waking of a loop that is awake
                event.set()
                return
            with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody waits there any more
                loop.call_soon_threadsafe(event.set)

        with self._lock:
            unseen = self._seen is not None and not wanted <= self._seen
            if unseen or not wanted.isdisjoint(self._changed):
                event.set()
            self._waiting[wake] = wanted
        try:
            yield event
        finally:
            with self._lock:
                self._waiting.pop(wake, None)

"""The engine that keeps jobs in this process: for tests, scripts and trying things out.

It keeps every promise of the contract but the first: nothing survives the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Self

from propolis.core.clock import Clock, span_until
from propolis.core.protocols import Durability
from propolis.core.records import Bounds
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.address import Address
from propolis.engines.memory.book import Book
from propolis.engines.shared.book.engine import BookEngine
from propolis.engines.shared.feed_verbs import Hears, heard_by
from propolis.engines.shared.guarded_lock import GuardedLock
from propolis.engines.shared.waiters import Waiters
from propolis.errors import EngineClosed


class Gate:
    """Lets one at a time into the book, and nobody once it is closed."""

    def __init__(self, book: Book, clock: Clock) -> None:
        self.closed = False
        self._book = book
        self._clock = clock
        self._lock = GuardedLock()

    def __enter__(self) -> Book:
        self._lock.acquire()
        if self.closed:
            self._lock.release()
            raise EngineClosed
        self._book.now_us = self._clock.now_us()
        return self._book

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class MemoryEngine(BookEngine):
    """The whole contract in dicts, behind one lock.

    One instance may be shared by any number of threads and event loops.
    """

    def __init__(self, *, clock: Clock | None = None, retention: Retention = RETENTION) -> None:
        super().__init__(clock)
        self._waiters = Waiters()
        self._feed_waiters = Waiters()
        self._book = self._new_book(retention)
        self._gate = Gate(self._book, self._clock)

    def _new_book(self, retention: Retention) -> Book:
        return Book(self._waiters, retention)

    def _call(self) -> Gate:
        return self._gate

    @property
    def durability(self) -> Durability:
        return Durability.MEMORY

    async def open(self) -> Self:
        self._gate.closed = False
        return self

    async def close(self) -> None:
        """What it holds stays, in case it is opened again."""
        self._gate.closed = True
        self._waiters.wake()
        self._feed_waiters.wake_waiting()

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        with self._gate as book:
            left = span_until(book.next_token_us(), book.now_us)
        seconds = timeout if left is None else min(timeout, left.total_seconds())
        return await self._waiters.wait(queues, seconds) or seconds < timeout

    async def append_entries(self, feed: str, entries: Sequence[bytes], bounds: Bounds) -> int | None:
        number = await super().append_entries(feed, entries, bounds)
        self._feed_waiters.wake_waiting(feed)
        return number

    @asynccontextmanager
    async def _hearing(self, feeds: Sequence[str]) -> AsyncIterator[Hears]:
        with self._feed_waiters.waiting(feeds) as event:
            yield heard_by(event)


def from_url(address: Address, clock: Clock | None) -> MemoryEngine:
    """`memory://`: each call makes an engine of its own."""
    address.reject_unknown()
    return MemoryEngine(clock=clock)

"""An engine over any store that keeps keys in order and has transactions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, Unpack

from propolis.core.clock import Clock
from propolis.core.job import Lease, Outcome
from propolis.core.protocols import Durability, Exchange, LeaseTerms
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.shared.book.engine import BookEngine
from propolis.engines.shared.book.store import Store
from propolis.engines.shared.book.stored import StoreBook
from propolis.engines.shared.guarded_lock import GuardedLock
from propolis.errors import EngineClosed, EngineUnavailable


class StoreEngine(BookEngine):
    """The whole contract but `Transactional`, in a store.  Each call is one transaction of it."""

    def __init__(self, store: Store, *, clock: Clock | None = None, retention: Retention = RETENTION) -> None:
        super().__init__(clock)
        self._store = store
        self._retention = retention
        self._lock = GuardedLock()
        self._is_open = False
        self._next_token_us: int | None = None  # as of the last look

    @property
    def durability(self) -> Durability:
        return self._store.durability

    async def open(self) -> Self:
        with self._lock:
            if not self._is_open:
                self._store.open()
                self._is_open, self._looked = True, self._store.changes()
        return self

    async def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._store.close()
                self._is_open = False

    @contextmanager
    def _call(self) -> Iterator[StoreBook]:
        with self._lock:
            if not self._is_open:
                raise EngineClosed
            try:
                with self._store.transaction() as table:
                    book = StoreBook(table, self._clock.now_us(), self._retention)
                    yield book
                    book.write()
                    self._next_token_us = book.next_token_us()
            except OSError as error:  # or a worker would take it for an outcome that cannot be recorded
                raise EngineUnavailable(f"{type(self._store).__name__}: {error}") from error

    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        answer = await super().exchange(outcomes, wants, **terms)
        self._looked = self._store.changes()
        return answer

    def has_changed(self) -> bool:
        if not self._is_open:
            return False
        has_token = self._next_token_us is not None and self._next_token_us <= self._clock.now_us()
        return has_token or self._store.changes() != self._looked

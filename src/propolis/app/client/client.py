"""The client of an app: one engine, opened when it is first needed, for synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from propolis.app.client.blocking import Background, check_can_wait
from propolis.app.client.puts import Coalescer, IdempotentPuts, Puts, bundles
from propolis.app.client.room import Room
from propolis.core.batch import CALLBACKS, Batch
from propolis.core.clock import Clock
from propolis.core.envelope import Envelope
from propolis.core.protocols import Durability, Engine, Looks, Receipt, Remote, Transactional
from propolis.engines import durability_of, make_engine, piece_of, require, target_of
from propolis.engines.address import Address, masked
from propolis.engines.shared.guarded_lock import GuardedLock
from propolis.errors import BadSetting

T = TypeVar("T")


Stamp = Callable[[Envelope], Envelope]  # what puts its mark on a job before that is put
Sending = Callable[[], AbstractContextManager[Stamp]]  # around a put, in the context of whoever makes it


class DeclaredTask(Protocol):
    """A task, as far as whoever puts a job of it has to know."""

    def asks_for(self, kind: type) -> bool: ...


class Client:
    """An engine by its URL, and all that is put through it.

    Nothing is opened before it is needed.  After a fork it opens an engine of its own.
    """

    def __init__(
        self, url: str, *, durability: Durability | str | None = None, clock: Clock | None = None
    ) -> None:
        target_of(Address(url))  # a URL that names no engine fails here, not at the first job
        self.url = url
        self.tasks: Mapping[str, DeclaredTask] = {}  # of its app, by name
        self.looks = False  # whoever uses it only looks: storage is not created
        self.needs: dict[type, str] = {}  # pieces of the contract, and how this app says so
        self.actor: str | None = None  # who pauses and blocks; None: the user of this process
        self.sending: Sending | None = None  # an integration that traces what is put
        self._floor = durability_of(durability)
        self._clock = clock
        self._lock = GuardedLock()
        self._pid = os.getpid()
        self._engine: Engine | None = None
        self._opened = False
        self._lent = False  # to a test
        self._opening: Future[None] | None = None  # set while somebody does so, in this thread:
        self._opener = 0
        self._remote = self._in_order = False  # asked once: isinstance() of a protocol takes long
        self._over_a_wire = IdempotentPuts()
        self._background: Background | None = None
        self._coalescers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Coalescer]
        self._coalescers = weakref.WeakKeyDictionary()
        self._rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Room]
        self._rooms = weakref.WeakKeyDictionary()
        _clients.add(self)

    def after_fork(self) -> None:
        """In a child: another thread, which is not here, may have held the lock."""
        self._lock = GuardedLock()

    @property
    def engine(self) -> Engine:
        """The engine, not necessarily opened yet."""
        engine = self._engine
        if engine is not None and self._pid == os.getpid():  # each put comes by here
            return engine
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._engine, self._opened, self._background = os.getpid(), None, False, None
                self._opening = None
                self._coalescers = weakref.WeakKeyDictionary()
            if self._engine is None:
                self._engine = make_engine(self.url, clock=self._clock)
            return self._engine

    async def ready(self) -> Engine:
        """The engine, opened and strong enough."""
        while True:
            engine = self.engine
            if self._opened:
                return engine
            with self._lock:
                opening, others = Future[None](), self._opening
                if others is None:
                    self._opening, self._opener = opening, threading.get_ident()
            if others is None:
                await self._open(engine, opening)
            else:  # they may be in another thread; and if they are stopped, the turn is ours
                await asyncio.shield(asyncio.wrap_future(others))

    async def _open(self, engine: Engine, opening: Future[None]) -> None:
        """Open it for all that wait for it: nobody uses an engine that is half open."""
        try:
            for piece, use in self.needs.items():
                piece_of(engine, piece, url=self.url, use=f"this app needs {use}")
            await (engine.open_to_look() if self.looks and isinstance(engine, Looks) else engine.open())
            require(engine, self._floor)
            self._remote = isinstance(engine, Remote) and engine.remote
            self._in_order = isinstance(engine, Remote) and engine.in_order
            with self._lock:
                self._opened = self._engine is engine  # and was not closed meanwhile
            if not self._opened:
                await engine.close()
        except Exception as error:
            opening.set_exception(error)
            raise
        finally:
            self._opening = None
            if not opening.done():
                opening.set_result(None)

    async def piece(self, piece: Callable[..., T]) -> T:
        """The engine, opened, for the verbs of a piece of the contract; `BadSetting` where it lacks it."""
        return piece_of(await self.ready(), piece, url=self.url)

    async def aput(self, job: Envelope, *, wait: float | None = None) -> Receipt:
        """Put one job, together with whatever else is being put at this moment.

        Where its queue is full it may wait so many seconds for room.
        """
        if wait is not None:
            [receipt] = await self._room().put(self._put_one, [job], wait)
            return receipt
        await self.ready()
        loop = asyncio.get_running_loop()
        coalescer = self._coalescers.get(loop)
        if coalescer is None:
            coalescer = self._coalescers[loop] = Coalescer(self._put)
        if self.sending is None:
            return await coalescer.add(job)
        with self.sending() as stamp:
            return await coalescer.add(stamp(job))

    async def _put_one(self, jobs: list[Envelope]) -> list[Receipt]:
        return [await self.aput(job) for job in jobs]

    def _room(self) -> Room:
        """Of this event loop."""
        return self._rooms.setdefault(asyncio.get_running_loop(), Room())

    async def aput_in(self, tx: object, jobs: Iterable[Envelope]) -> list[Receipt]:
        """Put jobs inside a transaction of the caller's own, where the engine can do that."""
        engine = self._transactional(await self.ready())
        receipts: list[Receipt] = []
        with self._stamped(jobs) as stamped:
            for bundle in bundles(stamped):
                receipts += await engine.put_in(tx, bundle)
        return receipts

    def put_in(self, tx: object, jobs: Iterable[Envelope]) -> list[Receipt]:
        """The same in the caller's own thread: its connection may belong there."""
        check_can_wait()
        engine = self._transactional(self.engine)
        if not self._opened:
            self.wait(self.ready())
        receipts: list[Receipt] = []
        with self._stamped(jobs) as stamped:
            for bundle in bundles(stamped):
                receipts += engine.put_in_now(tx, bundle)
        return receipts

    def _transactional(self, engine: Engine) -> Transactional:
        if not isinstance(engine, Transactional):
            raise BadSetting(f"{masked(self.url)} has no transactions to join: leave tx= out")
        return engine

    @property
    def ahead(self) -> int:
        """How many puts may be on their way behind the first: one, where the engine keeps their order."""
        return 1 if self._in_order else 0

    async def aput_many(self, jobs: Iterable[Envelope], *, wait: float | None = None) -> list[Receipt]:
        """In bundles.  Where the engine keeps their order, the next is made ready while the last is put.

        Those that may wait for room, so many seconds for each job, go bundle after bundle.
        """
        with self._stamped(jobs) as stamped:
            if wait is None:
                return await self._aput_many(stamped)
            receipts: list[Receipt] = []
            for bundle in bundles(stamped):
                receipts += await self._room().put(self._put, bundle, wait)
            return receipts

    @contextmanager
    def _stamped(self, jobs: Iterable[Envelope]) -> Iterator[Iterable[Envelope]]:
        if self.sending is None:
            yield jobs
        else:
            with self.sending() as stamp:
                yield map(stamp, jobs)

    def stamped(self, jobs: list[Envelope]) -> list[Envelope]:
        """Jobs that are put by other ways, such as members of a batch."""
        with self._stamped(jobs) as stamped:
            return list(stamped)

    def stamped_batch(self, batch: Batch) -> Batch:
        """With callbacks that are stamped, as all that is put."""
        if self.sending is None:
            return batch
        names = [name for name in CALLBACKS if getattr(batch, name) is not None]
        callbacks = self.stamped([getattr(batch, name) for name in names])
        return replace(batch, **dict(zip(names, callbacks, strict=True)))

    async def _aput_many(self, jobs: Iterable[Envelope]) -> list[Receipt]:
        await self.ready()
        receipts: list[Receipt] = []
        puts = Puts[list[Receipt]]()
        try:
            for bundle in bundles(jobs):
                for answer in await puts.make(partial(self._put, bundle), ahead=self.ahead):
                    receipts += answer
            for answer in await puts.end():
                receipts += answer
        finally:
            await puts.stop()  # what makes the jobs has failed
        return receipts

    async def _put(self, jobs: list[Envelope]) -> list[Receipt]:
        engine = await self.ready()
        if self._remote:
            return await self._over_a_wire.put(engine, jobs)
        return await engine.put(jobs)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for a synchronous caller; raises at once where that could never end."""
        try:
            background = self._background_thread()
        except BaseException:
            coroutine.close()
            raise
        return background.wait(coroutine)

    def _background_thread(self) -> Background:
        check_can_wait()
        self.engine  # noqa: B018  # notices a fork, after which the old thread is not there
        if self._opening is not None and self._opener == threading.get_ident():
            raise BadSetting(
                "the engine is being opened by the event loop of this thread, which cannot go on while you "
                "wait: in a coroutine use the verbs that begin with a, as in await task.aenqueue(…)"
            )
        with self._lock:
            self._background = self._background or Background()
            return self._background

    @contextmanager
    def lent_to(self, engine: Engine) -> Iterator[None]:
        """Everything goes to this engine, which is open; afterwards to the client's own again."""
        with self._lock:
            if self._lent:
                raise BadSetting("this app is being tested already: leave the first test() before the next")
            own = self.url, self._engine, self._opened
            # The URL too: a fork must not find its way to the real jobs.
            self.url, self._engine, self._opened, self._lent = "memory://", engine, True, True
        try:
            yield
        finally:
            with self._lock:
                self.url, self._engine, self._opened = own
                self._lent = False

    async def aclose(self) -> None:
        """Let go of the engine; used again, it opens another one.  The engine of a test is the test's."""
        background = await self._close_engine()
        if background is not None:
            await asyncio.to_thread(background.stop)

    def close(self) -> None:
        background = asyncio.run(self._close_engine())
        if background is not None:  # here: no new thread begins once the program ends
            background.stop()

    async def _close_engine(self) -> Background | None:
        if self._lent:
            return None
        with self._lock:
            engine, self._engine, self._opened = self._engine, None, False
            background, self._background = self._background, None
        if engine is not None:
            await engine.close()
        return background


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _clients:
        client.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""The way in: one engine, opened when first needed, used from synchronous and asynchronous code alike."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from skep.address import Address, masked
from skep.broker import Durability, Engine, Receipt, Remote, Transactional
from skep.clock import Clock
from skep.engines import make_engine, require, target_of
from skep.errors import BadSetting, EngineError, EngineUnavailable, OutcomeUnknown
from skep.job import Job, new_id

T = TypeVar("T")

MOST_PER_PUT = 1000
REPEAT_AFTER = (0.1, 0.5, 2.0)  # seconds, about, before a put whose answer was lost is made again
SPENT_AT_ONCE = 100
WINDS_UP_WITHIN = 2.0  # seconds, when the program ends


class Coalescer:
    """Enqueues that happen at the same time become one put.

    Nothing waits for a timer: while one bundle is on its way the next one gathers.  Every caller waits for
    the acknowledgement of its own job, and gets its own error.
    """

    def __init__(self, put: Callable[[list[Job]], Awaitable[list[Receipt]]]) -> None:
        self._put = put
        self._pending: list[tuple[Job, asyncio.Future[Receipt]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, job: Job) -> Receipt:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        self._pending.append((job, future))
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        try:
            while self._pending:
                bundle, self._pending = self._pending[:MOST_PER_PUT], self._pending[MOST_PER_PUT:]
                await self._put_bundle(bundle)
        finally:
            self._flushing = None
            for _, future in self._pending:  # only when this task was cancelled: nobody is left waiting
                future.cancel()

    async def _put_bundle(self, bundle: list[tuple[Job, asyncio.Future[Receipt]]]) -> None:
        try:
            receipts = await self._put([job for job, _ in bundle])
        except (OutcomeUnknown, EngineUnavailable) as error:  # nobody's fault; and the jobs may have been put
            for _, future in bundle:
                _answer(future, error)
        except Exception as error:
            if len(bundle) == 1:
                _answer(bundle[0][1], error)
                return
            for one in bundle:  # nothing was put: find out whose fault it was
                await self._put_bundle([one])
        else:
            for (_, future), receipt in zip(bundle, receipts, strict=True):
                _answer(future, receipt)


class Puts(Generic[T]):
    """What one caller puts, piece after piece.  A piece that was not acknowledged is kept, and put again."""

    def __init__(self) -> None:
        self._left: deque[Callable[[], Coroutine[Any, Any, T]]] = deque()
        self._under_way: deque[asyncio.Task[T]] = deque()  # the first of those, in this loop:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __bool__(self) -> bool:
        return bool(self._left)

    async def make(self, put: Callable[[], Coroutine[Any, Any, T]], *, ahead: int) -> list[T]:
        """Put what is left and this; of so many the answers are not waited for."""
        self._left.append(put)
        return await self._answers(ahead)

    async def end(self) -> list[T]:
        """Until everything is answered."""
        return await self._answers(0)

    async def stop(self) -> None:
        """Wait for no more answers."""
        under_way, self._under_way = self._under_way, deque()  # also if this is cancelled
        if self._loop is asyncio.get_running_loop():
            for put in under_way:
                put.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _answers(self, ahead: int) -> list[T]:
        answers: list[T] = []
        if self._loop is not asyncio.get_running_loop():  # the app was closed, and the old one with it
            self._under_way.clear()
            self._loop = asyncio.get_running_loop()
        try:
            self._send(ahead + 1)
            while len(self._left) > ahead:
                answers.append(await self._under_way[0])
                self._under_way.popleft()
                self._left.popleft()
                self._send(ahead + 1)
        except BaseException:
            await self.stop()
            raise
        return answers

    def _send(self, most: int) -> None:
        for put in islice(self._left, len(self._under_way), most):
            self._under_way.append(asyncio.create_task(put()))


def bundles(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """As many as one put may have, as they are made."""
    left = iter(jobs)
    while bundle := list(islice(left, MOST_PER_PUT)):
        yield bundle


def _answer(future: asyncio.Future[Receipt], answer: Receipt | BaseException) -> None:
    if future.done():  # its caller was cancelled; the job stands
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


async def surely(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call that may be repeated, again and again while its answer is lost.

    `OutcomeUnknown` if it stays so, also where another call fails for another reason: the first may have come
    through.
    """
    unknown: OutcomeUnknown | None = None
    for pause in (*REPEAT_AFTER, None):
        try:
            return await call()
        except OutcomeUnknown as error:
            unknown = error
        except Exception as error:
            if unknown is None:  # and nothing was changed
                raise
            if not isinstance(error, EngineUnavailable):
                raise unknown from error
            unknown.__context__ = error
        if pause is not None:
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    assert unknown is not None
    raise unknown


class PutsOverAWire:
    """Each put has a token, and is made again with the same one where its answer was lost: that makes no
    second job.

    What is answered at once is never repeated, so its token is spent.  The engine is told so, of many at a
    time: or else it would know the tokens of a whole day.
    """

    def __init__(self) -> None:
        self._spent: list[str] = []
        self._forgetting: set[asyncio.Task[None]] = set()

    async def put(self, engine: Engine, jobs: list[Job]) -> list[Receipt]:
        token, calls = new_id(), 0

        async def put() -> list[Receipt]:
            nonlocal calls
            calls += 1
            return await engine.put(jobs, token=token)

        receipts = await surely(put)
        if calls > 1:  # and the first may still be on its way
            return _first_receipts(jobs, receipts)
        self._spent.append(token)
        if len(self._spent) >= SPENT_AT_ONCE:
            spent, self._spent = self._spent, []
            forgetting = asyncio.get_running_loop().create_task(_forget(engine, spent))  # nobody waits for it
            self._forgetting.add(forgetting)
            forgetting.add_done_callback(self._forgetting.discard)
        return receipts


async def _forget(engine: Engine, tokens: list[str]) -> None:
    if isinstance(engine, Remote):  # a test may have lent another one meanwhile
        with suppress(EngineError):  # then they are known for their day
            await engine.forget_tokens(tokens)


def _first_receipts(jobs: list[Job], receipts: list[Receipt]) -> list[Receipt]:
    """Of a repeated put, which says of everything that it is there: what the first said, as far as we know.

    Whether a chosen id was new is not known any more.
    """
    return [
        Receipt(receipt.id, receipt.created or (receipt.id == job.id and not job.chosen))
        for job, receipt in zip(jobs, receipts, strict=True)
    ]


class Background:
    """One event loop in a thread, for callers that have none."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="skep-background", daemon=True)
        self._thread.start()
        _backgrounds.add(self)
        atexit.register(self._at_exit)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_wind_up())

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except CancelledError as error:
            raise OutcomeUnknown("the app was closed by another thread before there was an answer") from error

    def stop(self) -> None:
        atexit.unregister(self._at_exit)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _at_exit(self) -> None:
        """Who ends without `close()` lets go of its connections all the same."""
        if self._pid == os.getpid():  # or else it is the parent's, whose thread is not here
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WINDS_UP_WITHIN)

    def leave_to_the_parent(self) -> None:
        """In a child: what runs in this loop is never torn down here, also not when the child ends.

        Tasks that are destroyed clean up, and would say goodbye on connections that are still the parent's.
        """
        everything = [self._loop, *asyncio.all_tasks(self._loop)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(everything))


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()
_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _after_fork() -> None:
    for background in _backgrounds:
        background.leave_to_the_parent()
    for producer in _producers:
        producer.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def _wind_up() -> None:
    """What still runs in this loop, such as an engine that lets go of its connections, comes to its end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if not task.cancelling():  # a second time would disturb what cleans up
            task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Producer:
    """An engine by its URL, with what all its users share.

    After a fork it opens an engine of its own.
    """

    def __init__(self, url: str, *, durability: Durability | None = None, clock: Clock | None = None) -> None:
        target_of(Address(url))  # a URL that names no engine fails here, not at the first job
        self.url = url
        self.state = SimpleNamespace()
        self._floor = durability
        self._clock = clock
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._engine: Engine | None = None
        self._opened = False
        self._opening: Future[None] | None = None  # set while somebody does so, in this thread:
        self._opener = 0
        self._remote = self._in_order = False  # asked once: isinstance() of a protocol takes long
        self._over_a_wire = PutsOverAWire()
        self._background: Background | None = None
        self._coalescers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Coalescer]
        self._coalescers = weakref.WeakKeyDictionary()
        _producers.add(self)

    def after_fork(self) -> None:
        """In a child: another thread, which is not here, may have held the lock."""
        self._lock = threading.Lock()

    @property
    def engine(self) -> Engine:
        """The engine, not necessarily opened yet."""
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
        """For all who wait for it: nobody uses an engine that is half open."""
        try:
            await engine.open()
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

    async def aput(self, job: Job) -> Receipt:
        """Put one job, together with whatever else is being put at this moment."""
        await self.ready()
        loop = asyncio.get_running_loop()
        coalescer = self._coalescers.get(loop)
        if coalescer is None:
            coalescer = self._coalescers[loop] = Coalescer(self._put)
        return await coalescer.add(job)

    async def aput_in(self, tx: object, jobs: Iterable[Job]) -> list[Receipt]:
        """Put jobs inside a transaction of the caller's own, where the engine can do that."""
        engine = self._transactional(await self.ready())
        receipts: list[Receipt] = []
        for bundle in bundles(jobs):
            receipts += await engine.put_in(tx, bundle)
        return receipts

    def put_in(self, tx: object, jobs: Iterable[Job]) -> list[Receipt]:
        """The same in the caller's own thread: its connection may belong there."""
        engine = self._transactional(self.engine)
        if not self._opened:
            self.wait(self.ready())
        receipts: list[Receipt] = []
        for bundle in bundles(jobs):
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

    async def aput_many(self, jobs: Iterable[Job]) -> list[Receipt]:
        """In bundles.  Where the engine keeps their order, the next is made ready while the last is put."""
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

    async def _put(self, jobs: list[Job]) -> list[Receipt]:
        engine = await self.ready()
        if self._remote:
            return await self._over_a_wire.put(engine, jobs)
        return await engine.put(jobs)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for a synchronous caller."""
        try:
            self.engine  # noqa: B018  # notices a fork, after which the old thread is not there
        except BaseException:
            coroutine.close()
            raise
        if self._opening is not None and self._opener == threading.get_ident():
            coroutine.close()
            raise BadSetting(
                "the engine is being opened by the event loop of this thread, which cannot go on while you "
                "wait: in a coroutine use the verbs that begin with a, as in await task.aenqueue(…)"
            )
        with self._lock:
            if self._background is None:
                self._background = Background()
        return self._background.wait(coroutine)

    async def aclose(self) -> None:
        """Let go of the engine; using the app again opens it again."""
        with self._lock:
            engine, self._engine, self._opened = self._engine, None, False
            background, self._background = self._background, None
        if engine is not None:
            await engine.close()
        if background is not None:
            await asyncio.to_thread(background.stop)

    def close(self) -> None:
        asyncio.run(self.aclose())

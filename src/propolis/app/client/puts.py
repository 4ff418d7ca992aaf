"""How jobs are put: together, piece after piece, and again where the answer was lost."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, TypeVar

from propolis.core.envelope import Envelope
from propolis.core.ids import new_id
from propolis.core.protocols import Engine, Receipt, Remote
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown

T = TypeVar("T")

MAX_PER_PUT = 1000
REPEAT_AFTER = (0.1, 0.5, 2.0)  # seconds, about, before a put whose answer was lost is made again
SPENT_AT_ONCE = 100


class Coalescer:
    """Enqueues that happen at the same time become one put.

    Nothing waits for a timer: while one bundle is on its way the next one gathers.  Every caller waits for
    the acknowledgement of its own job, and gets its own error.
    """

    def __init__(self, put: Callable[[list[Envelope]], Awaitable[list[Receipt]]]) -> None:
        self._put = put
        self._pending: list[tuple[Envelope, asyncio.Future[Receipt]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, job: Envelope) -> Receipt:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Receipt] = loop.create_future()
        self._pending.append((job, future))
        if self._flushing is None:
            self._flushing = loop.create_task(self._flush())
        return await future

    async def _flush(self) -> None:
        try:
            while self._pending:
                bundle, self._pending = self._pending[:MAX_PER_PUT], self._pending[MAX_PER_PUT:]
                await self._put_bundle(bundle)
        finally:
            self._flushing = None
            for _, future in self._pending:  # only when this task was cancelled: nobody is left waiting
                future.cancel()

    async def _put_bundle(self, bundle: list[tuple[Envelope, asyncio.Future[Receipt]]]) -> None:
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

    def _send(self, limit: int) -> None:
        for put in islice(self._left, len(self._under_way), limit):
            self._under_way.append(asyncio.create_task(put()))


def bundles(jobs: Iterable[Envelope]) -> Iterator[list[Envelope]]:
    """As many as one put may have, as they are made."""
    left = iter(jobs)
    while bundle := list(islice(left, MAX_PER_PUT)):
        yield bundle


def _answer(future: asyncio.Future[Receipt], answer: Receipt | BaseException) -> None:
    if future.done():  # its caller was cancelled; the job stands
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


async def retry_until_answered(call: Callable[[], Awaitable[T]]) -> T:
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


class IdempotentPuts:
    """Each put has a token, and is made again with the same one where its answer was lost: that makes no
    second job.

    What is answered at once is never repeated, so its token is spent.  The engine gets to know spent tokens,
    many at a time: or else it would remember the tokens of a whole day.
    """

    def __init__(self) -> None:
        self._spent: list[str] = []
        self._forgetting: set[asyncio.Task[None]] = set()

    async def put(self, engine: Engine, jobs: list[Envelope]) -> list[Receipt]:
        token, calls = new_id(), 0

        async def put() -> list[Receipt]:
            nonlocal calls
            calls += 1
            return await engine.put(jobs, token=token)

        receipts = await retry_until_answered(put)
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


def _first_receipts(jobs: list[Envelope], receipts: list[Receipt]) -> list[Receipt]:
    """The receipts of the first of two equal puts, as far as they are known.

    Those of the second put call every job an old one.  Whether a chosen id was new is not known any more.
    """
    return [
        Receipt(receipt.id, receipt.created or (receipt.id == job.id and not job.chosen))
        for job, receipt in zip(jobs, receipts, strict=True)
    ]

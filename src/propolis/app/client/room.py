"""Waiting for room in a full queue: back-pressure for whoever puts more than is run."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt
from propolis.errors import QueueFull

T = TypeVar("T")

FIRST_PAUSE = 0.02  # seconds, about, until it is tried again; then 1.5 times more,
LAST_PAUSE = 0.5  # up to this

Put = Callable[[list[Envelope]], Awaitable[list[Receipt]]]


class Room:
    """Where those of one event loop wait for room: in line, so that one of them at a time asks for it."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of those who wait

    async def put(self, put: Put, jobs: list[Envelope], seconds: float) -> list[Receipt]:
        """Put these jobs, which are for one queue; `QueueFull` where none of them finds room for so long.

        What does not fit whole goes in pieces, in its order.
        """
        receipts: list[Receipt] = []
        left = [jobs]
        while left:
            piece = left.pop()
            try:
                receipts += await self._put_piece(put, piece, seconds)
            except QueueFull:
                if len(piece) == 1:
                    raise
                half = len(piece) // 2
                left += [piece[half:], piece[:half]]
        return receipts

    async def _put_piece(self, put: Put, piece: list[Envelope], seconds: float) -> list[Receipt]:
        """One job waits; of several it is to be known at once that they do not fit."""
        queue = piece[0].queue
        line = self._lines.get(queue)
        deadline = self._clock() + seconds
        if line is None:  # nobody waits here
            try:
                return await put(piece)
            except QueueFull:
                if len(piece) > 1:
                    raise
            line = self._lines.setdefault(queue, asyncio.Lock())
        try:
            async with asyncio.timeout(seconds):
                await line.acquire()
        except TimeoutError:  # its turn does not come: room may have come all the same
            return await put(piece)
        try:
            return await self._put_in_turn(put, piece, deadline)
        finally:
            line.release()

    async def _put_in_turn(self, put: Put, piece: list[Envelope], deadline: float) -> list[Receipt]:
        pause = FIRST_PAUSE
        while True:
            try:
                return await put(piece)
            except QueueFull:
                left = deadline - self._clock()
                if left <= 0 or len(piece) > 1:
                    raise
            await self._sleep(min(left, pause * random.uniform(0.8, 1.2)))
            pause = min(pause * 1.5, LAST_PAUSE)

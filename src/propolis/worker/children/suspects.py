"""Suspects: jobs of which an earlier run ended in silence, or took its process with it."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Protocol

from propolis.app.client.client import Client
from propolis.core.protocols import Note
from propolis.errors import ChildNotStarted, LeaseLost
from propolis.worker.attempt import Attempt, Slot
from propolis.worker.children.processes import ChildPool, clock_stopped

log = logging.getLogger("propolis.worker")

SOLITARY_FROM = 7  # losses: then whatever runs beside it may be to blame, or die of it
COME_BACK = (1.0, 3.0)  # seconds until a suspect asks again for a place, at random


class PutOff(Exception):
    """There is no place for a suspect just now."""

    @property
    def delay(self) -> timedelta:
        return timedelta(seconds=random.uniform(*COME_BACK))


class HasSolitude(Protocol):
    """Whoever can have one job run alone: the pump."""

    @property
    def solitary(self) -> bool:
        """Does it do so already?"""
        ...

    def alone(self) -> AbstractAsyncContextManager[None]:
        """Lease nothing, and let all others end first."""
        ...


class Suspects:
    """Sees to it that a suspect harms nobody but itself, and that nothing else is blamed on it.

    That it begins is noted, and the answer awaited, before it does: whoever dies before has not died of it.
    """

    def __init__(self, client: Client, children: ChildPool, floor: HasSolitude, *, apart: bool) -> None:
        self._client = client
        self._children = children
        self._floor = floor
        self._apart = apart

    @asynccontextmanager
    async def place_for(self, attempt: Attempt, slot: Slot) -> AsyncIterator[None]:
        """Where it may run, for as long as it does.  Raises `PutOff` or, when it is too late, `LeaseLost`."""
        lease = attempt.job.lease
        async with AsyncExitStack() as stack:
            with clock_stopped(slot):
                if self._apart:
                    await self._take_place(attempt, stack)
                if await self._client.engine.note([Note(lease, began=True)]):
                    raise LeaseLost(lease.id)
            yield

    async def _take_place(self, attempt: Attempt, stack: AsyncExitStack) -> None:
        task = attempt.task
        many_losses = attempt.job.lease.losses >= SOLITARY_FROM
        if task.options.isolate is not None:
            alone = many_losses
        elif not self._children.suspicious:
            alone = True
        elif not stack.enter_context(self._children.place()):
            raise PutOff
        else:
            attempt.in_child = await self._children.can_be_made() and await self._begin(attempt, stack)
            alone = many_losses or not attempt.in_child
        if alone:
            if self._floor.solitary:
                raise PutOff
            await stack.enter_async_context(self._floor.alone())

    async def _begin(self, attempt: Attempt, stack: AsyncExitStack) -> bool:
        """The transaction in a child, if its task asks for one: only there it can be settled too."""
        if not attempt.task.transactional:
            return True
        try:
            attempt.lent = await stack.enter_async_context(self._children.transaction())
        except ChildNotStarted as error:
            log.warning("%s has no child, so it runs alone in this process: %s", attempt.job, error)
            return False
        return True

"""How one event loop keeps a connection to one Redis server, and makes it anew when it breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from propolis.engines.redis.client.connection import Connection, Future, pack
from propolis.engines.redis.client.dialler import Dialler
from propolis.engines.redis.client.errors import AnswerLost, NotSent, ServerError
from propolis.engines.redis.client.target import Layout, Place, Target
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown

_chance = random.Random()  # not the one of the program, which may be seeded or watched

FIRST_PAUSE = 0.02  # seconds before a broken connection is made anew; doubled each time, and jittered
LAST_PAUSE = 1.0

# WAIT is about what its own connection has written.  A call that is repeated on a new one, and finds its work
# done already, writes nothing: any replica would do, also one that has nothing of it.  So each call whose
# copies count writes this as well.  (Taking something away first makes room where memory is full.)
_MARK = b"redis.call('UNLINK', KEYS[1]) redis.call('SET', KEYS[1], '', 'PX', 1000)"


class KeptConnection:
    """The connection of one event loop to one place, made anew whenever it breaks.

    While it is broken, all callers wait for the next attempt and share its end: so a call fails within a
    moment, and a thousand callers make no more attempts than one.
    """

    def __init__(self, dialler: Dialler, find: Callable[[], Awaitable[Place]]) -> None:
        self._dialler = dialler
        self._find = find
        self.place: Place | None = None  # the last to which there was a connection
        self._connection: Connection | None = None
        self._attempt: asyncio.Task[Connection] | None = None
        self._failures = 0
        self._closed = False

    @property
    def idle(self) -> bool:
        return self._attempt is None and (self._connection is None or self._connection.idle)

    async def ask(
        self, packed: bytes, key: bytes, *, reads: bool = False, before: bytes | None = None
    ) -> Any:
        """The reply, which may be a `ServerError`.  What is sent `before`, in one breath, has no reply here.

        The key is one of those that are written to, or is where they all begin.

        `EngineUnavailable`: it was never sent.  `OutcomeUnknown`: it was, and the answer is lost; what only
        reads is asked once more first.
        """
        target = self._dialler.target
        copies = 0 if reads else target.copies
        chances = 2 if reads else 1
        while True:
            connection = self._connection
            if connection is None or not connection.alive:
                connection = await self._connected()
            try:
                if connection.crowded:
                    await connection.room()
                reply = _send(connection, packed, before, alone=not copies)
                if not copies:
                    answer = await reply
                else:
                    # Two keys: a slot that moves must refuse it too.
                    mark = _send(
                        connection, pack("EVAL", _MARK, 2, key + b"copied", key + b"nothing"), before
                    )
                    answer = await _confirmed(connection, reply, mark, target)
            except NotSent as error:
                if connection.alive:
                    raise EngineUnavailable(
                        f"{target.shown} is too slow: {error}: nothing was changed"
                    ) from error
            except AnswerLost as error:
                chances -= 1
                if not chances:
                    raise self._lost(error, reads) from error
            else:
                if type(answer) is ServerError and answer.code == "READONLY":
                    connection.abort("it is a replica")  # the next attempt finds the master
                return answer

    def _lost(self, error: Exception, reads: bool) -> EngineError:
        shown = self._dialler.target.shown
        if reads:
            return EngineUnavailable(f"{shown} did not answer: {error}")
        return OutcomeUnknown(f"{shown}: the answer was lost ({error})")

    async def connect(self) -> None:
        """Now rather than with the first call."""
        if self._connection is None or not self._connection.alive:
            await self._connected()

    async def _connected(self) -> Connection:
        if self._closed:
            raise EngineUnavailable(f"{self._dialler.target.shown} was closed meanwhile: nothing was changed")
        if self._attempt is None:
            self._attempt = asyncio.get_running_loop().create_task(
                self._dial(), name="propolis-redis-connect"
            )
            self._attempt.add_done_callback(_heed)
        return await asyncio.shield(self._attempt)

    async def _dial(self) -> Connection:
        try:
            if self._connection is not None or self._failures:
                pause = min(LAST_PAUSE, FIRST_PAUSE * 2**self._failures)
                await asyncio.sleep(pause * _chance.uniform(0.5, 1))
            place = await self._find()
            connection = await self._dialler.dial(place)
            self._failures = 0
            self._connection, self.place = connection, place
            return connection
        except EngineError:
            self._failures = min(self._failures + 1, 10)
            raise
        finally:
            self._attempt = None

    def leave(self, why: str) -> None:
        """The next call finds its way anew; what is on its way is lost."""
        if self._connection is not None:
            self._connection.abort(why)

    async def close(self) -> None:
        self._closed = True
        if (attempt := self._attempt) is not None:
            attempt.cancel()
            await asyncio.wait({attempt})
        if self._connection is not None:  # the attempt may just have succeeded
            await self._connection.close()


def _send(connection: Connection, packed: bytes, before: bytes | None, *, alone: bool = False) -> Future:
    if before is not None:
        connection.send(before)
    return connection.send(packed, alone=alone)


async def _confirmed(connection: Connection, reply: Future, mark: Future, target: Target) -> Any:
    """The reply, once enough replicas have the mark behind it, and so all that was done before."""
    copies = target.copies
    question = connection.copied(copies, target.copied_within)
    answer = await reply
    if type(answer) is ServerError:
        return answer
    try:
        marked, found = await mark, await asyncio.shield(question)
    except NotSent as error:
        raise AnswerLost(str(error)) from error
    for confirmation in (marked, found):
        if type(confirmation) is ServerError:
            raise OutcomeUnknown(f"{target.shown}: it is not known whether a replica has it: {confirmation}")
    if found < copies:
        if target.layout is not Layout.SINGLE:
            # It may have come back as a master that nobody follows any more: ask anew who the master is.
            connection.abort("its replicas do not confirm")
        raise OutcomeUnknown(
            f"{target.shown}: {found} of {copies} replicas confirmed it within {target.copied_within} s: "
            f"it is done here, and lost if this server is"
        )
    return answer


def _heed(task: asyncio.Task[Connection]) -> None:
    if not task.cancelled():
        task.exception()  # those who waited for it have heard it

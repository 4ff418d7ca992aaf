"""How one event loop keeps a connection to the server that has the keys, and finds it again when it moves."""

from __future__ import annotations

import asyncio
import inspect
import random
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from skep.brokers.redis_connection import Connection, Future, Part, connect, pack
from skep.brokers.redis_errors import AnswerLost, NotSent, ServerError, explained, said
from skep.brokers.redis_target import Layout, Login, Place, Target
from skep.errors import EngineError, EngineUnavailable, OutcomeUnknown

_chance = random.Random()  # not the one of the program, which may be seeded or watched

LOST = (OSError, TimeoutError, AnswerLost, NotSent)

FIRST_PAUSE = 0.02  # seconds before a broken connection is made anew; doubled each time, and jittered
LAST_PAUSE = 1.0
_NAME = ("CLIENT", "SETNAME", "skep")

# WAIT is about what its own connection has written.  A call that is repeated on a new one, and finds its work
# done already, writes nothing: any replica would do, also one that has nothing of it.  So each call whose
# copies count writes this as well.  (Taking something away first makes room where memory is full.)
_MARK = b"redis.call('UNLINK', KEYS[1]) redis.call('SET', KEYS[1], '', 'PX', 1000)"


class Credentials(Protocol):
    """Who gives the user and the password of each new connection, where they change: any credential
    provider of redis-py, for example."""

    def get_credentials(self) -> tuple[str, ...] | Awaitable[tuple[str, ...]]: ...


class Dialler:
    """Makes connections, one attempt at a time, and says in our words why it cannot."""

    def __init__(self, target: Target, credentials: Credentials | None = None) -> None:
        self.target = target
        self._credentials = credentials
        self._tls = None if target.tls is None else target.tls.context()

    async def dial(self, place: Place, *, heard: Callable[[bytes], None] | None = None) -> Connection:
        """`EngineUnavailable` if the server is not there, and `EngineError` if it refuses us."""
        login = await self._login()
        greeting: list[tuple[Part, ...]] = [] if (auth := login.command()) is None else [auth]
        if self.target.db:
            greeting.append(("SELECT", self.target.db))
        if self.target.layout is Layout.SENTINEL:
            greeting.append(("ROLE",))
        greeting.append(_NAME)
        connection, replies = await self.reach(place, greeting, heard)
        try:
            for command, reply in zip(greeting, replies, strict=True):
                self._check(command, reply)
        except EngineError as error:
            connection.abort(str(error))
            raise
        return connection

    async def reach(
        self,
        place: Place,
        greeting: Sequence[tuple[Part, ...]],
        heard: Callable[[bytes], None] | None = None,
    ) -> tuple[Connection, list[Any]]:
        """A connection and the answers to the greeting, whatever they are."""
        target = self.target
        try:
            return await connect(
                place,
                greeting=greeting,
                tls=self._tls,
                within=target.connect_within,
                patience=target.patience,
                in_flight=target.in_flight,
                heard=heard,
            )
        except ssl.SSLCertVerificationError as error:
            raise EngineError(
                f"{target.shown} shows a certificate that cannot be trusted ({error.verify_message}): "
                f"name its authority by ssl_ca_certs"
            ) from error
        except ServerError as error:
            raise explained(error, target.shown) from error
        except LOST as error:
            shown = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
            raise EngineUnavailable(
                f"{target.shown} cannot be reached at {shown} ({said(error)}): nothing was changed"
            ) from error

    async def _login(self) -> Login:
        if self._credentials is None:
            return self.target.login
        given = self._credentials.get_credentials()
        parts = await given if inspect.isawaitable(given) else given
        return Login(parts[0], parts[1]) if len(parts) == 2 else Login(None, parts[0])

    def _check(self, command: tuple[Part, ...], reply: Any) -> None:
        if command is _NAME:  # a proxy may not know it, and nothing depends on it
            if isinstance(reply, ServerError) and "max number of clients" in str(reply):
                raise explained(reply, self.target.shown)
        elif isinstance(reply, ServerError):
            raise explained(reply, self.target.shown)
        elif command == ("ROLE",) and reply[0] != b"master":
            raise EngineUnavailable(f"{self.target.shown}: the sentinels name a server that is no master yet")


class Lane:
    """The connection of one event loop to one place, made anew whenever it breaks.

    While it is broken, whoever comes waits for the next attempt and shares its end: so a call fails within a
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
        """The reply, which may be a `ServerError`.  What is to be sent `before`, in one breath, has no say.

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
                    mark = _send(connection, pack("EVAL", _MARK, 1, key + b"copied"), before)
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
                    connection.abort("it is a replica")  # and whoever is the master now is found by dialling
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
            self._attempt = asyncio.get_running_loop().create_task(self._dial(), name="skep-redis-connect")
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
    """The reply, once enough replicas have the mark behind it, and so all that it tells of."""
    copies = target.copies
    question = connection.copied(copies, target.copied_within)
    answer = await reply
    if type(answer) is ServerError:
        return answer
    try:
        marked, found = await mark, await asyncio.shield(question)
    except NotSent as error:
        raise AnswerLost(str(error)) from error
    for told in (marked, found):
        if type(told) is ServerError:
            raise OutcomeUnknown(f"{target.shown}: it is not known whether a replica has it: {told}")
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
        task.exception()  # whoever waited for it has heard it


class Lanes(Protocol):
    """All the connections of one event loop, wherever the keys are."""

    async def connect(self) -> None: ...

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        """`Lane.ask` where this key is."""
        ...

    async def everywhere(self, packed: bytes) -> list[Any]:
        """The replies of all masters."""
        ...

    async def dial(self, key: bytes, *, heard: Callable[[bytes], None] | None = None) -> Connection:
        """One more connection to where this key is, for the caller alone."""
        ...

    async def close(self) -> None: ...


class OneLane:
    """Where one server has all the keys."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._lane = Lane(dialler, self._find)

    async def connect(self) -> None:
        await self._lane.connect()

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        return await self._lane.ask(packed, key, reads=reads)

    async def everywhere(self, packed: bytes) -> list[Any]:
        return [await self._lane.ask(packed, b"", reads=True)]

    async def dial(self, key: bytes, *, heard: Callable[[bytes], None] | None = None) -> Connection:  # noqa: ARG002
        return await self._dialler.dial(await self._find(), heard=heard)

    async def close(self) -> None:
        await self._lane.close()

    async def _find(self) -> Place:
        return self._dialler.target.places[0]

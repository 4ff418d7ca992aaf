"""How a connection to a Redis server is made, and why it cannot be made."""

from __future__ import annotations

import encodings.idna  # noqa: F401  # now: the first name is resolved in a thread, which a fork may interrupt
import inspect
import ssl
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from propolis.engines.address import hidden
from propolis.engines.redis.client.connection import Connection, HearsMessages, Part, connect
from propolis.engines.redis.client.errors import (
    AnswerLost,
    NotSent,
    ServerError,
    discreet,
    error_text,
    explained,
    passwords_in,
)
from propolis.engines.redis.client.target import Layout, Login, Place, Target
from propolis.errors import EngineError, EngineUnavailable

LOST = (OSError, TimeoutError, AnswerLost, NotSent)

_NAME = ("CLIENT", "SETNAME", "propolis")


class Credentials(Protocol):
    """Gives the user and the password of each new connection, where they change.

    Any credential provider of redis-py is one.
    """

    def get_credentials(self) -> tuple[str, ...] | Awaitable[tuple[str, ...]]: ...


class Dialler:
    """Makes connections, one attempt at a time, and explains in our words why it cannot."""

    def __init__(self, target: Target, credentials: Credentials | None = None) -> None:
        self.target = target
        self._credentials = credentials
        self._tls = None if target.tls is None else target.tls.context()

    async def dial(self, place: Place, *, heard: HearsMessages | None = None) -> Connection:
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
        heard: HearsMessages | None = None,
    ) -> tuple[Connection, list[Any]]:
        """A connection and the answers to the greeting, whatever they are."""
        target = self.target
        try:
            connection, replies = await connect(
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
            safe = discreet(error, greeting)
            raise explained(safe, target.shown) from safe
        except LOST as error:
            shown = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
            why = hidden(error_text(error), passwords_in(greeting))
            raise EngineUnavailable(
                f"{target.shown} cannot be reached at {shown} ({why}): nothing was changed"
            ) from (error if why == error_text(error) else None)
        return connection, [
            discreet(reply, greeting) if isinstance(reply, ServerError) else reply for reply in replies
        ]

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

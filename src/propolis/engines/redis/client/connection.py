"""One socket to one Redis server: commands go out in bundles, replies come back in order.

Everything that is sent in one turn of the event loop leaves in one write; only a command that finds nothing
else on its way may leave at once.  There is one timer for all that is on its way, not one for each: replies
come in order, so the oldest command is the first to be late.
The protocol is RESP2, whose replies are bytes, integers, lists and None on every server and behind any proxy.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import hiredis

from propolis.engines.redis.client.errors import AnswerLost, NotSent, ServerError, error_text
from propolis.engines.redis.client.target import Place

Part = bytes | str | int
Future = asyncio.Future[Any]

MAX_UNWRITTEN = 1 << 20  # bytes that the system did not take yet, before callers wait
GRACE = 0.25  # seconds in which a loop that was busy elsewhere reads what has arrived meanwhile
CLOSE_WITHIN = 2.0
_NOTHING = object()
_NEWS = (b"message", b"smessage")


def pack(*parts: Part) -> bytes:
    return cast("bytes", hiredis.pack_command(parts))  # type: ignore[arg-type]  # its type says: one part


class HearsMessages(Protocol):
    """Is called for each message on a channel that its connection listens to, in the loop of that."""

    def __call__(self, channel: bytes, /) -> None: ...


class Connection(asyncio.Protocol):
    """Use it in the loop that made it, by `connect`.

    A command ends with its reply (a `ServerError` is one, and is not raised), or by `AnswerLost`, or by
    `NotSent`.  A caller that no longer waits for a reply just goes: the reply is dropped when it comes.
    """

    def __init__(
        self,
        shown: str,
        *,
        patience: float,
        in_flight: int,
        heard: HearsMessages | None = None,
    ) -> None:
        self.shown = shown
        self.why = "it was closed"
        self.last_words: Any = None
        self.alive = False
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._in_flight = in_flight
        self._heard = heard
        self._reader = hiredis.Reader(
            replyError=ServerError, protocolError=hiredis.ProtocolError, notEnoughData=_NOTHING
        )
        self._pending: deque[tuple[Future, float]] = deque()
        self._unsent: list[bytes] = []
        self._copied: Future | None = None
        self._copy_command = b""
        self._flushing = False
        self._paused = False
        self._queue: deque[Future] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._late: Future | None = None
        self._transport: asyncio.Transport | None = None
        self._gone = self._loop.create_future()

    # --- sending -------------------------------------------------------------------------

    @property
    def crowded(self) -> bool:
        """Whether to wait for `room` before sending."""
        return self._full() or bool(self._queue)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way."""
        return not self._pending

    async def room(self) -> None:
        """Until there is room for one more command.  First come, first served; `NotSent` after patience."""
        try:
            async with asyncio.timeout(self._patience):
                await self._stand_in_line()
        except TimeoutError:
            raise NotSent(f"{self._in_flight} commands or {MAX_UNWRITTEN} bytes are on their way") from None

    async def _stand_in_line(self) -> None:
        called = False
        while self.alive and (self._full() or (self._queue and not called)):
            waiter = self._loop.create_future()
            if called:  # and somebody was quicker
                self._queue.appendleft(waiter)
            else:
                self._queue.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._let_in()
                raise
            called = True

    def send(self, packed: bytes, *, patience: float | None = None, alone: bool = False) -> Future:
        """The reply to come.  Returns at once; the bytes leave at the end of this turn of the loop.

        `alone`: if nothing else is on its way they need not wait for that.
        """
        loop = self._loop
        future = loop.create_future()
        if not self.alive:
            future.set_exception(NotSent(self.why))
            return future
        deadline = loop.time() + (self._patience if patience is None else patience)
        self._pending.append((future, deadline))
        self._unsent.append(packed)
        if alone and len(self._pending) == 1:
            self._flush()
        elif not self._flushing:
            self._flushing = True
            loop.call_soon(self._flush)
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._check_deadline)
        return future

    def copied(self, copies: int, within: float) -> Future:
        """How many replicas have all that was sent until the end of this turn.

        One question serves all that leaves in the same write; `copies` and `within` are the same for all.
        """
        if self._copied is None:
            self._copied = self._loop.create_future()
            self._copy_command = pack("WAIT", copies, max(1, round(within * 1000)))
        return self._copied

    def _flush(self) -> None:
        self._flushing = False
        if self._paused or not self._unsent or self._transport is None:
            return
        if self._copied is not None:
            deadline = self._loop.time() + self._patience
            self._pending.append((self._copied, deadline))
            self._unsent.append(self._copy_command)
            self._copied = None
        unsent, self._unsent = self._unsent, []
        self._transport.write(b"".join(unsent))

    def _full(self) -> bool:
        return self._paused or len(self._pending) >= self._in_flight

    def _let_in(self) -> None:
        free = self._in_flight - len(self._pending)
        while self._queue and free > 0 and not self._paused:
            waiter = self._queue.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._pending:
            return
        oldest, deadline = self._pending[0]
        if deadline > self._loop.time():
            self._timer = self._loop.call_at(deadline, self._check_deadline)
        elif self._late is not oldest:
            # The loop may have been elsewhere: what has arrived is read first.
            self._late = oldest
            self._timer = self._loop.call_later(GRACE, self._check_deadline)
        else:
            self.abort("it did not answer in time")

    # --- what the transport calls --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(MAX_UNWRITTEN)
        line: socket.socket = transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # what stands between forgets the silent
        self.alive = True

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        pending = self._pending
        try:
            while (reply := reader.gets()) is not _NOTHING:
                if self._heard is not None and _is_news(reply):
                    self._heard(reply[1])
                elif len(pending) > len(self._unsent):
                    future, _ = pending.popleft()
                    if not future.done():
                        future.set_result(reply)
                else:
                    self.last_words = reply
                    self.abort(f"it sent without being asked: {reply!r:.200}")
                    return
        except hiredis.ProtocolError as error:
            self.abort(f"it does not speak the protocol: {error}")
            return
        if self._queue:
            self._let_in()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()
        self._let_in()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error_text(error) if error is not None else "it closed the connection")
        if not self._gone.done():
            self._gone.set_result(None)

    # --- the end -------------------------------------------------------------------------

    def abort(self, why: str) -> None:
        """Nothing more is sent or read."""
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Returns when the socket is closed."""
        self.abort("it was closed")
        if self._transport is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN):
                    await asyncio.shield(self._gone)

    async def gone_or(self, event: asyncio.Event) -> None:
        """Returns when the connection has ended, on either side, or the event has come."""
        other = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({self._gone, other}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            other.cancel()

    def _end(self, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self.why = why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        sent = len(self._pending) - len(self._unsent)
        for number, (future, _) in enumerate(self._pending):
            _fail(future, AnswerLost(why) if number < sent else NotSent(why))
        if self._copied is not None:
            _fail(self._copied, NotSent(why))
        self._pending.clear()
        self._unsent.clear()
        for waiter in self._queue:
            _fail(waiter, NotSent(why))
        self._queue.clear()


def _fail(future: Future, error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # those who wait hear it; nobody has to


def _is_news(reply: Any) -> bool:
    return isinstance(reply, list) and bool(reply) and reply[0] in _NEWS


async def connect(
    place: Place,
    *,
    greeting: Sequence[tuple[Part, ...]],
    tls: ssl.SSLContext | None,
    within: float,
    patience: float,
    in_flight: int,
    heard: HearsMessages | None = None,
) -> tuple[Connection, list[Any]]:
    """A connection on which the greeting has been answered, and the answers.

    `OSError`, `TimeoutError`, `AnswerLost` or `NotSent` if there is none; `ServerError` if it sends us away.
    """
    loop = asyncio.get_running_loop()
    shown = place if isinstance(place, str) else f"{place[0]}:{place[1]}"

    def make() -> Connection:
        return Connection(shown, patience=patience, in_flight=in_flight, heard=heard)

    connection: Connection | None = None
    try:
        async with asyncio.timeout(within):
            if isinstance(place, str):
                _, connection = await loop.create_unix_connection(make, place)
            else:
                _, connection = await loop.create_connection(make, *place, ssl=tls)
            replies = [connection.send(pack(*command)) for command in greeting]
            return connection, [await reply for reply in replies]
    except BaseException as error:
        if connection is not None:
            connection.abort("it was given up while connecting")
            if isinstance(connection.last_words, ServerError) and isinstance(error, Exception):
                raise connection.last_words from None
        raise

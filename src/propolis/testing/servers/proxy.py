"""A TCP proxy on loopback that does to connections what networks do to them."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Self

_CHUNK = 65536


class Proxy:
    """Stands before a server on loopback; use it as a context of the running loop.

    With `tls` its own side is encrypted, for servers that cannot do that themselves.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self.accepted = 0
        self._behind = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._swallow = False
        self._slice: int | None = None
        self._corrupt = False
        self._swallowed = asyncio.Event()
        self._lose_answer_to = b""
        self._to_lose = 0
        self._hole_after: bytes | None = None
        self.lost = 0  # answers that `lose_answer_to` has kept
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        self._flowing.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.reset()  # also those whose tasks had not begun
        await asyncio.sleep(0)  # after which they are closed

    def black_hole(self) -> None:
        """Connections stay, and new ones are accepted, but nothing comes through any more."""
        self._flowing.clear()

    def black_hole_after(self, asked: bytes) -> None:
        """Once: from the moment at which a request that contains `asked` has passed."""
        self._hole_after = asked

    def restore(self) -> None:
        """What was held back arrives now, as it does when packets are sent again; no hole is ahead."""
        self._hole_after = None
        self._flowing.set()

    def reset(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()

    def swallow_an_answer(self) -> None:
        """Let the next command reach the server, and break its connection instead of answering it."""
        self._swallow = True
        self._swallowed.clear()

    async def swallowed(self) -> None:
        await self._swallowed.wait()

    def lose_answer_to(self, asked: bytes, *, times: int = 1) -> None:
        """Let the next requests that contain `asked` reach the server, and break before each answer."""
        self._lose_answer_to = asked
        self._to_lose = times

    def slice(self, size: int | None) -> None:
        """Pass on no more than so many bytes at once."""
        self._slice = size

    def corrupt_an_answer(self) -> None:
        """Change the first byte of the next answer."""
        self._corrupt = True

    async def refuse(self) -> None:
        """Break every connection and accept no other."""
        if self._server is not None:
            self._server.close()
        self.reset()

    async def accept(self) -> None:
        """Again, on the same port."""
        await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind = await asyncio.open_connection("127.0.0.1", self._behind)
        except BaseException as error:
            self._writers.discard(writer)
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        self._writers.add(behind[1])
        doomed = asyncio.Event()  # what comes back on this connection next is lost
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(reader, behind[1], doomed))
                group.create_task(self._pass_answers(behind[0], writer, doomed))
        except* OSError:
            pass
        finally:
            self._writers -= {writer, behind[1]}
            writer.transport.abort()
            behind[1].transport.abort()
            for one in (writer, behind[1]):
                with suppress(OSError):
                    await one.wait_closed()

    async def _pass_requests(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await source.read(self._slice or _CHUNK):
            await self._flowing.wait()
            if self._to_lose and self._lose_answer_to in data:
                self._to_lose -= 1
                doomed.set()
            to.write(data)
            if self._hole_after is not None and self._hole_after in data:
                self._hole_after = None
                self.black_hole()
            await to.drain()
        raise ConnectionResetError

    async def _pass_answers(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await source.read(self._slice or _CHUNK):
            await self._flowing.wait()
            if doomed.is_set():
                self.lost += 1
                raise ConnectionResetError
            if self._swallow:
                self._swallow = False
                self._swallowed.set()
                raise ConnectionResetError
            if self._corrupt:
                self._corrupt = False
                data = b"!" + data[1:]
            to.write(data)
            await to.drain()
        raise ConnectionResetError

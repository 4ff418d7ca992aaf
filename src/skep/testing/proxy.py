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

    def black_hole(self) -> None:
        """Connections stay, and new ones are accepted, but nothing comes through any more."""
        self._flowing.clear()

    def restore(self) -> None:
        """What was held back arrives now, as it does when packets are sent again."""
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
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind = await asyncio.open_connection("127.0.0.1", self._behind)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        self._writers |= {writer, behind[1]}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, behind[1], answers=False))
                group.create_task(self._pass_on(behind[0], writer, answers=True))
        except* OSError:
            pass
        finally:
            self._writers -= {writer, behind[1]}
            writer.transport.abort()
            behind[1].transport.abort()
            for one in (writer, behind[1]):
                with suppress(OSError):
                    await one.wait_closed()

    async def _pass_on(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        while data := await source.read(self._slice or _CHUNK):
            await self._flowing.wait()
            if answers and self._swallow:
                self._swallow = False
                self._swallowed.set()
                raise ConnectionResetError
            if answers and self._corrupt:
                self._corrupt = False
                data = b"!" + data[1:]
            to.write(data)
            await to.drain()
        raise ConnectionResetError

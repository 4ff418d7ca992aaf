"""A wire that can be cut: a TCP proxy on loopback that injects faults between a client and a server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self


class Proxy:
    """`async with Proxy(port) as proxy:` forwards `proxy.port` to `port`, until it is told otherwise."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._lose_answer_to = b""
        self._to_lose = 0
        self._block_after: bytes | None = None
        self._connections: set[_Wire] = set()
        self.port = 0
        self.lost = 0  # answers that never arrived

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        self._flowing.set()
        self.reset()

    def block(self) -> None:
        """Nothing passes any more, in either direction, and nobody is told: a black hole."""
        self._flowing.clear()

    def block_after(self, asked: bytes) -> None:
        """Once: a black hole from the moment at which a request that contains `asked` has passed."""
        self._block_after = asked

    def unblock(self) -> None:
        self._flowing.set()

    def reset(self) -> None:
        """Break all connections."""
        for wire in list(self._connections):
            wire.reset()

    def lose_answer_to(self, asked: bytes, *, times: int = 1) -> None:
        """Let the next requests that contain `asked` reach the server, and break before each answer."""
        self._lose_answer_to = asked
        self._to_lose = times

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        wire = _Wire(writer, there[1])
        self._connections.add(wire)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward_requests(wire, reader, there[1]))
                group.create_task(self._forward_answers(wire, there[0], writer))
        except* (OSError, _Broken):
            pass
        finally:
            wire.reset()
            self._connections.discard(wire)

    async def _forward_requests(
        self, wire: _Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if self._to_lose and self._lose_answer_to in data:
                self._to_lose -= 1
                wire.loses_answer = True
            writer.write(data)
            if self._block_after is not None and self._block_after in data:
                self._block_after = None
                self.block()
            await writer.drain()
        raise _Broken

    async def _forward_answers(
        self, wire: _Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if wire.loses_answer:
                self.lost += 1
                raise _Broken
            writer.write(data)
            await writer.drain()
        raise _Broken


class _Broken(Exception):
    """One side has gone: so must the other."""


class _Wire:
    """One connection of a client, and the one that stands for it at the server."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self._writers = writers
        self.loses_answer = False

    def reset(self) -> None:
        for writer in self._writers:
            with suppress(RuntimeError):  # the loop has gone
                writer.transport.abort()

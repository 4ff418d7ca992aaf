"""Which server a command goes to: the one that has its key."""

from __future__ import annotations

from typing import Any, Protocol

from propolis.engines.redis.client.connection import Connection, HearsMessages
from propolis.engines.redis.client.dialler import Dialler
from propolis.engines.redis.client.kept_connection import KeptConnection
from propolis.engines.redis.client.target import Place


class Router(Protocol):
    """All the connections of one event loop, wherever the keys are."""

    async def connect(self) -> None: ...

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        """`KeptConnection.ask` where this key is."""
        ...

    async def everywhere(self, packed: bytes) -> list[Any]:
        """The replies of all masters."""
        ...

    async def dial(self, key: bytes, *, heard: HearsMessages | None = None) -> Connection:
        """One more connection to where this key is, for the caller alone."""
        ...

    async def close(self) -> None: ...


class SingleRouter:
    """Where one server has all the keys."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._kept = KeptConnection(dialler, self._find)

    async def connect(self) -> None:
        await self._kept.connect()

    async def ask(self, packed: bytes, key: bytes, *, reads: bool) -> Any:
        return await self._kept.ask(packed, key, reads=reads)

    async def everywhere(self, packed: bytes) -> list[Any]:
        return [await self._kept.ask(packed, b"", reads=True)]

    async def dial(self, key: bytes, *, heard: HearsMessages | None = None) -> Connection:  # noqa: ARG002
        return await self._dialler.dial(await self._find(), heard=heard)

    async def close(self) -> None:
        await self._kept.close()

    async def _find(self) -> Place:
        return self._dialler.target.places[0]

"""Who sweeps when, in a time that jumps from one sweep to the next."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock


class Sweepers:
    """A fleet that comes back when the engine asks for it."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        self._engine = engine
        self._clock = clock
        self._now = 0.0
        self._back: dict[str, float] = {}

    async def one(self, name: str) -> float:
        """Sweeps now, and learns when to come back."""
        again_in = (await self._engine.sweep(by=name)).again_in
        assert again_in is not None
        self._back[name] = self._now + again_in.total_seconds()
        return again_in.total_seconds()

    async def start(self, names: Iterable[str]) -> None:
        """All that were there are gone, and these begin."""
        self._back.clear()
        for name in names:
            await self.one(name)

    def die(self, names: Iterable[str]) -> None:
        """These do not come back."""
        for name in names:
            del self._back[name]

    async def pauses(self, seconds: float) -> list[float]:
        """Between one sweep and the next."""
        found = []
        end = self._now + seconds
        while (at := min(self._back.values())) < end:
            found.append(at - self._now)
            self._clock.advance(timedelta(seconds=at - self._now))
            self._now = at
            await self.one(min(self._back, key=self._back.__getitem__))
        return found

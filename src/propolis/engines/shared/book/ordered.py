"""Keys in their order, in this process."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)  # what can be compared

_PIECE = 512


class Ordered(Generic[K]):
    """Keys that differ, in pieces, so that no step moves or walks over all of them."""

    def __init__(self) -> None:
        self._pieces: list[list[K]] = []
        self._lasts: list[K] = []

    def add(self, key: K) -> None:
        if not self._pieces:
            self._pieces, self._lasts = [[key]], [key]
            return
        at = min(bisect_left(self._lasts, key), len(self._lasts) - 1)
        piece = self._pieces[at]
        insort(piece, key)
        if len(piece) > 2 * _PIECE:
            self._pieces[at : at + 1] = [piece[:_PIECE], piece[_PIECE:]]
            self._lasts.insert(at, piece[_PIECE - 1])
            at += 1
        self._lasts[at] = piece[-1]

    def remove(self, key: K) -> None:
        at = bisect_left(self._lasts, key)
        piece = self._pieces[at]
        del piece[bisect_left(piece, key)]
        if piece:
            self._lasts[at] = piece[-1]
        else:
            del self._pieces[at], self._lasts[at]

    def onwards(self, start: K) -> Iterator[K]:
        """From this key on; nothing may change meanwhile."""
        at = bisect_left(self._lasts, start)
        if at < len(self._pieces):
            first = self._pieces[at]
            yield from (first[n] for n in range(bisect_left(first, start), len(first)))
            for n in range(at + 1, len(self._pieces)):
                yield from self._pieces[n]

    def backwards(self, end: K) -> Iterator[K]:
        """Those before this key, the last one first; nothing may change meanwhile."""
        at = bisect_left(self._lasts, end)
        if at < len(self._pieces):
            last = self._pieces[at]
            yield from (last[n] for n in range(bisect_left(last, end) - 1, -1, -1))
        for n in range(at - 1, -1, -1):
            yield from reversed(self._pieces[n])

    def last(self) -> K | None:
        return self._lasts[-1] if self._lasts else None

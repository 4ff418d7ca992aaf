"""What the book needs of a store: keys in order, and transactions.  Written by whoever brings one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import islice, takewhile
from typing import Any, Protocol, TypeVar

import msgspec

from propolis.core.protocols import Durability
from propolis.engines.shared.book.ordered import Ordered

T = TypeVar("T")

_ZERO = 1 << 60  # added to a number in a key, so that negative ones come before the others


class Table(Protocol):
    """The store inside of one transaction.

    Keys are texts of any length, in the order of their code points, which is that of their UTF-8 bytes.
    Values are JSON.
    """

    def get(self, key: str) -> bytes | None: ...

    def set(self, key: str, value: bytes) -> None: ...

    def delete(self, key: str) -> None:
        """A key that is not there is fine."""
        ...

    def range(self, start: str, end: str, limit: int, *, backwards: bool = False) -> list[tuple[str, bytes]]:
        """The first pairs with `start` <= key < `end`; backwards, the last ones, the very last first."""
        ...


class Store(Protocol):
    """Where a book is kept.  Several handles, and processes, may have the same one open."""

    @property
    def durability(self) -> Durability: ...

    def open(self) -> None: ...

    def close(self) -> None: ...

    def changes(self) -> object:
        """Something that differs after each commit, whoever made it; it costs next to nothing."""
        ...

    def transaction(self) -> AbstractContextManager[Table]:
        """All of it is committed in the end, or nothing if it raises; one at a time, whoever begins it.

        `OSError` where the store cannot be read or written: then nothing is changed, and it is tried again.
        """
        ...


class HeldTable:
    """A table in this process.  Also of values that are no bytes, if nobody decodes them."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._order = Ordered[str]()

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def set(self, key: str, value: object) -> None:
        if key not in self._values:
            self._order.add(key)
        self._values[key] = value

    def delete(self, key: str) -> None:
        if self._values.pop(key, None) is not None:
            self._order.remove(key)

    def range(self, start: str, end: str, limit: int, *, backwards: bool = False) -> list[tuple[str, Any]]:
        if backwards:
            names = takewhile(lambda name: name >= start, self._order.backwards(end))
        else:
            names = takewhile(lambda name: name < end, self._order.onwards(start))
        return [(name, self._values[name]) for name in islice(names, limit)]


def key(*parts: str | int) -> str:
    """Parts in their order, numbers by their size.  No part but the last contains NUL."""
    return "\0".join([part if isinstance(part, str) else f"{part + _ZERO:016x}" for part in parts])


def number_in(found: str, part: int) -> int:
    """The number that is this part of a key."""
    return int(found.split("\0")[part], 16) - _ZERO


class Pages:
    """A table for one call: documents are decoded once, and what changed is written at the end.

    Bare keys, which are read in ranges, are written at once.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._documents: dict[str, Any] = {}
        self._changed: set[str] = set()

    def get(self, name: str, kind: type[T]) -> T | None:
        """The same object each time."""
        if name not in self._documents:
            raw = self.table.get(name)
            self._documents[name] = None if raw is None else msgspec.json.decode(raw, type=kind)
        found: T | None = self._documents[name]
        return found

    def put(self, name: str, document: object | None) -> None:
        """None removes it."""
        self._documents[name] = document
        self._changed.add(name)

    def mark(self, name: str, value: str = "") -> None:
        self.table.set(name, msgspec.json.encode(value))

    def write(self) -> None:
        for name in self._changed:
            document = self._documents[name]
            if document is None:
                self.table.delete(name)
            else:
                self.table.set(name, msgspec.json.encode(document))

    def first(self, limit: int, *prefix: str | int) -> list[tuple[str, str]]:
        """The first marks that begin with these parts, and their values."""
        begin = key(*prefix)
        return self.between(begin + "\0", begin + "\1", limit)

    def until(self, now_us: int, limit: int, *prefix: str | int) -> list[tuple[str, str]]:
        """Those of `first` whose next part is a time that has come."""
        return self.between(key(*prefix) + "\0", key(*prefix, now_us + 1), limit)

    def between(self, start: str, end: str, limit: int) -> list[tuple[str, str]]:
        return self.listed(str, start, end, limit)

    def listed(
        self, kind: type[T], start: str, end: str, limit: int, *, backwards: bool = False
    ) -> list[tuple[str, T]]:
        """Documents in the order of their keys, without those that this call has changed."""
        found = self.table.range(start, end, limit, backwards=backwards) if limit > 0 else []
        return [(name, msgspec.json.decode(value, type=kind)) for name, value in found]

    def has(self, *prefix: str | int) -> bool:
        begin = key(*prefix)
        return bool(self.table.range(begin + "\0", begin + "\1", 1))

    def names(self, *prefix: str | int) -> list[str]:
        """The different next parts of the marks that begin with these, each found by one look."""
        found: list[str] = []
        begin = key(*prefix)
        start = begin + "\0"
        while rows := self.between(start, begin + "\1", 1):
            found.append(rows[0][0].split("\0")[len(prefix)])
            start = f"{begin}\0{found[-1]}\1"
        return found


class LivePages(Pages):
    """A table of documents that are never written: they stay what they are, in this process."""

    def __init__(self) -> None:
        super().__init__(HeldTable())

    def get(self, name: str, kind: type[T]) -> T | None:  # noqa: ARG002  # it is of that kind
        found: T | None = self.table.get(name)  # type: ignore[assignment]  # a held table has any
        return found

    def put(self, name: str, document: object | None) -> None:
        if document is None:
            self.table.delete(name)
        else:
            self.table.set(name, document)  # type: ignore[arg-type]  # as above

    def mark(self, name: str, value: str = "") -> None:
        self.put(name, value)

    def listed(
        self,
        kind: type[T],  # noqa: ARG002  # as above
        start: str,
        end: str,
        limit: int,
        *,
        backwards: bool = False,
    ) -> list[tuple[str, T]]:
        found: list[tuple[str, Any]] = self.table.range(start, end, max(0, limit), backwards=backwards)
        return found

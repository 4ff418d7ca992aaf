"""An engine in one file, as you might write one: a store of your own under the book of propolis.

`propolis.contract.StoreEngine` keeps the whole contract over anything that holds keys in order and has
transactions (`propolis.contract.Store`).  Here that is a text file: each transaction appends one line of JSON
with what it changed, and whoever comes next reads the lines that are new.  When the file has become much
longer than what it says, it is written anew.

The engine is right when the suite of the contract passes on it, which takes these lines:

    class TestJson(EngineContract):
        @pytest.fixture
        def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
            return lambda: json_engine(tmp_path / "jobs.json", clock=clock, retention=retention)

`EngineContract`, `FakeClock` and `OpenEngine` come from `propolis.testing.engines`; the example itself is
tested in tests/contract/test_examples.py.  All of it is held in memory, so it is not for large queues.
"""

from __future__ import annotations

import fcntl
import os
from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from propolis.contract import RETENTION, Clock, Durability, Retention, StoreEngine

MAX_LINES = 1000  # as many may be in the file for nothing, and as many as there are keys

GONE = b"null"  # the value of a key that was deleted

Changes = list[tuple[str, msgspec.Raw]]


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner can read."""
    return os.open(path, flags, 0o600)


class JsonStore:
    """Keys and values in a text file; `table` is what the lines that were read so far say."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table = Table()

    @property
    def durability(self) -> Durability:
        return Durability.PROCESS

    def open(self) -> None:
        self._file = self._opened()

    def close(self) -> None:
        self._file.close()
        self._table = Table()

    def changes(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_ino, found.st_size

    @contextmanager
    def transaction(self) -> Iterator[Table]:
        with self._locked() as file:
            self._table.read(file)
            try:
                yield self._table
                self._table.append(file)
            except BaseException:
                self._table.undo()
                raise
            if self._table.lines > MAX_LINES + len(self._table.values):
                self._write_anew()

    def _opened(self) -> BinaryIO:
        return open(self._path, "a+b", buffering=0, opener=private)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file, while no other handle or process has it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        while os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino:  # somebody wrote it anew
            self._file.close()
            self._file, self._table = self._opened(), Table()
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield self._file
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write_anew(self) -> None:
        whole: Changes = [(name, msgspec.Raw(value)) for name, value in self._table.values.items()]
        new = self._path.with_name(f"{self._path.name}.new")
        with open(new, "wb", opener=private) as file:
            file.write(msgspec.json.encode(whole) + b"\n")
        new.rename(self._path)


class Table:
    """The lines of the file as a dictionary, its keys in order, and what the transaction has changed."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lines = 0
        self._order: list[str] = []
        self._read_to = 0
        self._before: dict[str, bytes | None] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._before.setdefault(key, self.values.get(key))
        self._put(key, value)

    def delete(self, key: str) -> None:
        if key in self.values:
            self._before.setdefault(key, self.values[key])
            self._put(key, None)

    def range(self, start: str, end: str, limit: int, *, backwards: bool = False) -> list[tuple[str, bytes]]:
        first, last = bisect_left(self._order, start), bisect_left(self._order, end)
        keys = self._order[max(first, last - limit) : last] if backwards else self._order[first:last][:limit]
        return [(key, self.values[key]) for key in (reversed(keys) if backwards else keys)]

    def _put(self, key: str, value: bytes | None) -> None:
        if value is None:
            if self.values.pop(key, None) is not None:
                del self._order[bisect_left(self._order, key)]
            return
        if key not in self.values:
            insort(self._order, key)
        self.values[key] = value

    def undo(self) -> None:
        for key, value in self._before.items():
            self._put(key, value)
        self._before.clear()

    def read(self, file: BinaryIO) -> None:
        """What others have appended.  A line without an end was never finished, and is cut off."""
        file.seek(self._read_to)
        new, end, rest = file.read().rpartition(b"\n")
        for line in (new + end).splitlines():
            self.lines += 1
            for key, raw in msgspec.json.decode(line, type=Changes):
                value = bytes(raw)
                self._put(key, None if value == GONE else value)
        self._read_to += len(new + end)
        if rest:
            file.truncate(self._read_to)

    def append(self, file: BinaryIO) -> None:
        if not self._before:
            return
        changes: Changes = [(key, msgspec.Raw(self.values.get(key, GONE))) for key in self._before]
        line = msgspec.json.encode(changes) + b"\n"
        if file.write(line) < len(line):  # whoever reads next cuts off what there is of it
            raise OSError(f"there was no room for {len(line)} bytes")
        self._read_to += len(line)
        self.lines += 1
        self._before.clear()


def json_engine(path: Path, *, clock: Clock | None = None, retention: Retention = RETENTION) -> StoreEngine:
    return StoreEngine(JsonStore(path), clock=clock, retention=retention)

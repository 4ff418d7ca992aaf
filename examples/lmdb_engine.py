"""A second engine over the book of propolis, to show that the first is no accident: LMDB.

LMDB keeps keys in order, has transactions, and serves any number of processes of one machine.  It needs the
package `lmdb`.  The store differs from that of json_engine.py in two things: one process opens a file once,
however many handles it has; and keys have at most 511 bytes, so a value is a list of all pairs whose keys
begin alike, nearly always one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import lmdb
import msgspec

from propolis.contract import RETENTION, Clock, Durability, Retention, StoreEngine

MOST = 16 * 1024**3  # bytes: how much of the address space, and of the disk at most, is set aside
BEGINNING = 500  # bytes of a key that LMDB sees

Bucket = list[tuple[bytes, bytes]]  # the rest of each key, and its value, in their order


class SharedFile:
    """A file as it is open in this process, for all handles."""

    open_files: ClassVar[WeakValueDictionary[tuple[Path, bool], SharedFile]] = WeakValueDictionary()

    def __init__(self, path: Path, *, sync: bool) -> None:
        self.environment = lmdb.open(str(path), map_size=MOST, subdir=False, sync=sync, mode=0o600)

    @classmethod
    def at(cls, path: Path, *, sync: bool) -> SharedFile:
        found = cls.open_files.get((path, sync))
        if found is None:
            found = cls.open_files[path, sync] = cls(path, sync=sync)
        return found

    def __del__(self) -> None:
        self.environment.close()


class LmdbStore:
    def __init__(self, path: Path, *, sync: bool) -> None:
        self._path = path.absolute()
        self._sync = sync
        self._file: SharedFile | None = None

    @property
    def durability(self) -> Durability:
        return Durability.POWER if self._sync else Durability.PROCESS

    def open(self) -> None:
        self._file = SharedFile.at(self._path, sync=self._sync)

    def close(self) -> None:
        self._file = None  # closed with the last handle

    def _environment(self) -> lmdb.Environment:
        assert self._file is not None
        return self._file.environment

    def changes(self) -> int:
        last: int = self._environment().info()["last_txnid"]
        return last

    @contextmanager
    def transaction(self) -> Iterator[LmdbTable]:
        try:
            with self._environment().begin(write=True) as transaction:  # which raises: nothing is committed
                yield LmdbTable(transaction)
        except lmdb.Error as error:
            raise OSError(str(error)) from error


class LmdbTable:
    def __init__(self, transaction: lmdb.Transaction) -> None:
        self._transaction = transaction

    def get(self, key: str) -> bytes | None:
        beginning, rest = _split(key)
        return dict(self._bucket(beginning)).get(rest)

    def set(self, key: str, value: bytes) -> None:
        beginning, rest = _split(key)
        self._store(beginning, {**dict(self._bucket(beginning)), rest: value})

    def delete(self, key: str) -> None:
        beginning, rest = _split(key)
        kept = dict(self._bucket(beginning))
        if kept.pop(rest, None) is not None:
            self._store(beginning, kept)

    def _bucket(self, beginning: bytes) -> Bucket:
        return _decode(self._transaction.get(beginning))

    def _store(self, beginning: bytes, pairs: dict[bytes, bytes]) -> None:
        if pairs:
            self._transaction.put(beginning, msgspec.msgpack.encode(sorted(pairs.items())))
        else:
            self._transaction.delete(beginning)

    def range(self, start: str, end: str, limit: int, *, backwards: bool = False) -> list[tuple[str, bytes]]:
        first, last = start.encode(), end.encode()
        found: list[tuple[str, bytes]] = []
        for key, value in self._pairs_down(last) if backwards else self._pairs_up(first):
            if len(found) == limit or (key < first if backwards else key >= last):
                break
            if first <= key < last:
                found.append((key.decode(), value))
        return found

    def _pairs_up(self, start: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._transaction.cursor() as cursor:
            more = cursor.set_range(start[:BEGINNING])
            while more:
                for rest, value in _decode(cursor.value()):
                    yield bytes(cursor.key()) + rest, value
                more = cursor.next()

    def _pairs_down(self, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        with self._transaction.cursor() as cursor:
            more = cursor.set_range(end[:BEGINNING]) or cursor.last()
            while more:
                for rest, value in reversed(_decode(cursor.value())):
                    yield bytes(cursor.key()) + rest, value
                more = cursor.prev()


def _split(key: str) -> tuple[bytes, bytes]:
    encoded = key.encode()
    return encoded[:BEGINNING], encoded[BEGINNING:]


def _decode(value: bytes | memoryview | None) -> Bucket:
    return [] if value is None else msgspec.msgpack.decode(value, type=Bucket)


def lmdb_engine(
    path: Path, *, clock: Clock | None = None, retention: Retention = RETENTION, sync: bool = True
) -> StoreEngine:
    """`sync=False` commits without waiting for the disk."""
    return StoreEngine(LmdbStore(path, sync=sync), clock=clock, retention=retention)

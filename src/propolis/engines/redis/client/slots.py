"""Which slot of a cluster a key is in."""

from __future__ import annotations

from binascii import crc_hqx

SLOTS = 16384


def slot_of(key: bytes) -> int:
    """The slot of a key: of what stands between its first braces, if there is anything."""
    start = key.find(b"{")
    if start >= 0:
        end = key.find(b"}", start + 1)
        if end > start + 1:
            key = key[start + 1 : end]
    return crc_hqx(key, 0) % SLOTS

"""Lua programs for the server, each known by the hash of its text."""

from __future__ import annotations

import hashlib


class LuaScript:
    """One program.  The server is sent its hash, and its text only when it does not know the hash."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: bytes) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"LuaScript({self.name!r})"

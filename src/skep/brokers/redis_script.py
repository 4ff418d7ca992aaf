"""Lua programs for the server, each known by the hash of its text."""

from __future__ import annotations

import hashlib
from importlib.resources import files


class Script:
    """One program.  The server is sent its hash, and its text only when it says that it does not know it."""

    __slots__ = ("name", "sha", "text")

    def __init__(self, name: str, text: bytes) -> None:
        self.name = name
        self.text = text
        self.sha = hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

    def __repr__(self) -> str:
        return f"Script({self.name!r})"


def load_script(name: str) -> Script:
    """The program in lua/<name>.lua."""
    return Script(name, (files("skep.brokers") / "lua" / f"{name}.lua").read_bytes())

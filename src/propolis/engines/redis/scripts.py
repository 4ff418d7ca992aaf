"""The Lua scripts of the engine, each put together from the files in lua/ that its first line names."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.resources import files
from itertools import chain

from propolis.engines.redis.client.script import LuaScript

_PARTS = "-- with: "
_WORD = re.compile(r"\w+")
_COMMENT = re.compile(r"^ *--.*\n|  --.*$", re.MULTILINE)
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)
# What operators do, and what limits need, also where memory is full: a server refuses a script whose first
# write could need memory, and never stops one that has written already.  (Others begin so by themselves.)
_URGENT = {
    *("add_rule", "cancel", "delete", "delete_batch", "drop", "remove_rule", "replay", "reschedule", "seal"),
    *("terms_of_limit", "fill_pool", "lend", "replay_keyed", "sent_on", "start_sharing", "stop_sharing"),
    *("hand_over", "know_elsewhere", "own"),
}
_FIRST_WRITE = "redis.call('DEL', base .. 'nothing')"
_ADDED = {"base": "sharded", "batches": "travelling"}  # what follows these parts where an app has shards
_IN_ONE_SLOT = {"put_one"}  # parts that are left out there


def load_scripts() -> dict[str, LuaScript]:
    """Those for an app in one slot, by their names."""
    texts = _texts()
    return {
        name: LuaScript(name, _assembled([*_texts_of(name, _parts(whole), texts), whole]))
        for name, whole in texts.items()
        if whole.startswith(_PARTS) and "sharded" not in _parts(whole)
    }


def load_rights() -> LuaScript:
    """What tells which rights are missing."""
    return _alone("rights")


def load_layout() -> LuaScript:
    """What changes the layout of what is stored."""
    return _alone("layout")


def _alone(name: str) -> LuaScript:
    """A script without parts."""
    return LuaScript(name, (files("propolis.engines") / "redis" / "lua" / f"{name}.lua").read_bytes())


def load_sharded_scripts() -> dict[str, LuaScript]:
    """Those for an app with shards: each answers with what is to be sent on as well."""
    texts = _texts()
    scripts = {}
    for name, whole in texts.items():
        if whole.startswith(_PARTS):
            wrapped = ["local function verb()", whole, "end", texts["answering"]]
            parts = _texts_of(name, _sharded_parts(whole), texts)
            scripts[name] = LuaScript(name, _assembled([*parts, "\n".join(wrapped)]))
    return scripts


def _texts_of(name: str, parts: list[str], texts: dict[str, str]) -> list[str]:
    found: list[str] = []
    for part in parts:
        if part in _ADDED.values():  # in the function of the part that it follows: see `_assembled`
            found[-1] += texts[part]
        else:
            found.append(texts[part])
    if name in _URGENT:
        found.insert(1, _FIRST_WRITE)  # after base.lua
    return found


def _assembled(parts: list[str]) -> bytes:
    """One script: each part in a function inside that of the part before, without what is not needed.

    Each call of a script makes all of its functions, and Lua finds a variable of the same function that one
    of them uses by walking through all that are used so: a large part of the time of a small exchange.
    """
    pieces = [list(_pieces(part)) for part in parts]
    used: Counter[str] = Counter()
    for _, _, words in chain.from_iterable(pieces):
        used.update(words)
    unused: list[Counter[str]] = [Counter()]
    while unused:
        unused = [words for part in pieces for name, _, words in part if name and used[name] == 1]
        pieces = [[piece for piece in part if not piece[0] or used[piece[0]] > 1] for part in pieces]
        for words in unused:
            used.subtract(words)
    texts = ["".join(text for _, text, _ in part) for part in pieces]
    return ("\nreturn (function()\n".join(texts) + "\nend)()" * (len(texts) - 1)).encode()


@cache
def _pieces(part: str) -> tuple[tuple[str, str, Counter[str]], ...]:
    """The functions of a part with their names, and what is between them; each with the words in it.

    Words that are no names of ours are left out: of what is local, of fields and of Lua itself.
    """
    text, at = _COMMENT.sub("", part), 0
    found: list[tuple[str, str]] = []
    for function in _FUNCTION.finditer(text):
        found += [("", text[at : function.start()]), (function[1], function[0])]
        at = function.end()
    found.append(("", text[at:]))
    names = _names()
    return tuple(
        (name if name in names else "", piece, Counter(filter(names.__contains__, _WORD.findall(piece))))
        for name, piece in found
    )


@cache
def _names() -> frozenset[str]:
    return frozenset(it[1] for text in _texts().values() for it in _FUNCTION.finditer(text))


@cache
def _texts() -> dict[str, str]:
    folders = [
        files("propolis.engines") / "redis" / "lua" / kind for kind in ("verbs", "parts", "shards", "sharing")
    ]
    return {
        entry.name.removesuffix(".lua"): entry.read_text("utf-8")
        for folder in folders
        for entry in folder.iterdir()
        if entry.name.endswith(".lua")
    }


def _parts(script: str) -> list[str]:
    return script.partition("\n")[0].removeprefix(_PARTS).split()


def _sharded_parts(script: str) -> list[str]:
    own = _parts(script)
    found = []
    for part in own:
        if part not in _IN_ONE_SLOT:
            found.append(part)
        if part in _ADDED and _ADDED[part] not in own:
            found.append(_ADDED[part])
    return found

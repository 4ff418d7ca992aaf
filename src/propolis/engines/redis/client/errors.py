"""What goes wrong between us and a Redis server, in our words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from propolis.engines.address import hidden
from propolis.errors import (
    EngineError,
    EngineUnavailable,
    PropolisError,
    StorageBroken,
    StorageFull,
)

# Before Redis 7, an error of a command that a script called was wrapped in one of the script.
_IN_A_SCRIPT = re.compile(
    r"^ERR Error running script \(call to \w+\): (?:@user_script: ?\d+: )+-?(?=[A-Z]+ )"
)
# They are cut at some length, be it in the midst of a password.
_ARGUMENTS = re.compile(r",? with args beginning with.*", re.DOTALL)


class ServerError(Exception):
    """An error that the server answered: a code in capitals, and a detail."""

    def __init__(self, text: str) -> None:
        text = _IN_A_SCRIPT.sub("", text)
        super().__init__(text)
        self.code, _, self.detail = text.partition(" ")


class ScriptRefused(Exception):
    """The server raised an error that our own Lua wrote: a code that begins with our name, and a detail."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(code)
        self.code = code
        self.detail = detail


class NotSent(Exception):
    """The connection was gone before the command was handed to it: nothing can have changed."""


class AnswerLost(Exception):
    """The connection broke, or its time was up, after the command was sent and before it was answered."""


# For a moment, or until somebody mends it: and nothing was changed.
_NOT_NOW = {
    "BUSY": "a script has been running for too long there",
    "CLUSTERDOWN": "a part of the cluster has no master",
    "LOADING": "it is still reading its data",
    "MASTERDOWN": "it has lost its master",
    "NOREPLICAS": "too few replicas are connected to it",
    "READONLY": "it is a replica",
    "TRYAGAIN": "the keys are being moved",
}
_CREDENTIALS = ("NOAUTH", "WRONGPASS", "NOPERM")
_TOO_MANY = "max number of clients reached"


def explained(error: ServerError, shown: str) -> PropolisError | ScriptRefused:
    """What a server's error means for the caller."""
    code = error.code
    if code.startswith("PROPOLIS"):
        return ScriptRefused(code, error.detail)
    if code in _NOT_NOW:
        return EngineUnavailable(f"{shown}: {_NOT_NOW[code]} ({error}): nothing was changed")
    if _TOO_MANY in error.detail:
        return EngineUnavailable(f"{shown}: {error}: raise maxclients, or use fewer processes")
    if code == "OOM":
        return StorageFull(f"jobs at {shown} (maxmemory is reached)")
    if code == "MISCONF":
        return StorageBroken(f"{shown} cannot write to its disk and accepts nothing: {error}")
    if code in _CREDENTIALS:
        return EngineError(f"{shown} does not let us in: {error}: check the user, its password and its ACL")
    if code in ("MOVED", "ASK", "CROSSSLOT"):
        return EngineError(f"{shown} is a node of a cluster ({error}): write redis+cluster://")
    if code == "WRONGTYPE":
        return EngineError(f"{shown}: a key of ours holds something else: {error}: use another prefix")
    return EngineError(f"{shown}: {error}")


def discreet(reply: ServerError, greeting: Sequence[Sequence[object]]) -> ServerError:
    """The answer to a greeting, without a password: a server that does not know AUTH quotes what it got."""
    text = _ARGUMENTS.sub("", str(reply))
    return ServerError(hidden(text, passwords_in(greeting)))


def passwords_in(greeting: Sequence[Sequence[object]]) -> list[str]:
    return [str(command[-1]) for command in greeting if command[0] == "AUTH"]


def error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__

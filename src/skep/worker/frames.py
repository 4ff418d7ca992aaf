"""What a worker and its child processes say to each other: JSON with its length in front, never pickle."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import msgspec
from msgspec import Raw, Struct

from skep.job import Error, Lease, Progress
from skep.worker.origin import Origin

HEAD = 4  # bytes of the length
NOTHING = Raw(b"null")


# --- to the child ------------------------------------------------------------------------


class Start(Struct, frozen=True, tag="start"):
    """The first word: who you are."""

    origin: Origin
    log_level: int | None = None


class Run(Struct, frozen=True, tag="run"):
    lease: Lease
    memory_limit: int | None = None
    gathered: Raw = NOTHING


class Stopping(Struct, frozen=True, tag="stopping"):
    """The worker is shutting down: jobs that ask for it should know."""


class End(Struct, frozen=True, tag="end"):
    """No more jobs: shut down."""


Order = Start | Run | Stopping | End


# --- from the child ----------------------------------------------------------------------


class Ready(Struct, frozen=True, tag="ready"):
    tasks: tuple[str, ...]


class NotReady(Struct, frozen=True, tag="not-ready"):
    error: Error


class Told(Struct, frozen=True, tag="told"):
    """What the running job says meanwhile, any number of times."""

    progress: Progress | None = None
    lines: tuple[str, ...] = ()


class GoesOn(Struct, frozen=True, tag="goes-on"):
    """The running job has said that there is a next turn of it; told at once, since it may be killed."""

    turn: Raw
    always: bool


class Returned(Struct, frozen=True, tag="returned"):
    """It succeeded.  `unsendable` says why its value is not here."""

    value: Raw = Raw(b"null")
    unsendable: str | None = None
    emissions: tuple[Raw, ...] = ()


class Raised(Struct, frozen=True, tag="raised"):
    """It raised; `rule` is the place of the task's rule for such errors."""

    error: Error
    rule: int | None = None


class Retried(Struct, frozen=True, tag="retried"):
    reason: str
    after: timedelta | None


class Failed(Struct, frozen=True, tag="failed"):
    reason: str


class Snoozed(Struct, frozen=True, tag="snoozed"):
    after: timedelta


Answer = Ready | NotReady | Returned | Raised | Retried | Failed | Snoozed
Saying = Told | GoesOn
Reply = Saying | Answer

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def pack(frame: Order | Reply) -> bytes:
    body = msgspec.json.encode(frame)
    return len(body).to_bytes(HEAD) + body


class FrameBuffer:
    """Bytes as they come in, frames as they are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        while len(self._bytes) >= HEAD:
            end = HEAD + int.from_bytes(self._bytes[:HEAD])
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[HEAD:end])
            del self._bytes[:end]  # first, so that a frame that cannot be read is not met again
            yield body


def decode_order(body: bytes) -> Order:
    return _orders.decode(body)


def decode_reply(body: bytes) -> Reply:
    return _replies.decode(body)

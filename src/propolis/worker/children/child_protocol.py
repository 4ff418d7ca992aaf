"""The messages between a worker and its child processes: JSON with its length in front, never pickle."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import msgspec
from msgspec import Raw, Struct

from propolis.core.job import Done, Error, Lease, Progress
from propolis.worker.children.app_location import AppLocation
from propolis.worker.process.log_lines import LogSetup

HEAD = 4  # bytes of the length
NOTHING = Raw(b"null")


# --- to the child ------------------------------------------------------------------------


class Start(Struct, frozen=True, tag="start"):
    """The first order: which app to make."""

    location: AppLocation
    log: LogSetup | None = None
    environment: dict[str, str] = {}  # while the app is made; jobs have less of it


class BeginLent(Struct, frozen=True, tag="begin"):
    """Begin a transaction for the next job, on the engine that has given its lease."""

    url: str


class Run(Struct, frozen=True, tag="run"):
    lease: Lease
    memory_limit: int | None = None
    gathered: Raw = NOTHING


class Settle(Struct, frozen=True, tag="settle"):
    """The job that has returned ended so: record that in its transaction, and commit."""

    done: Done  # without its emissions
    emissions: tuple[Raw, ...] = ()


class SaveAnswered(Struct, frozen=True, tag="saved"):
    """What became of a checkpoint: `lost` with its lease, an error of the engine, or stored."""

    number: int
    lost: bool = False
    error: str | None = None


class Stopping(Struct, frozen=True, tag="stopping"):
    """The worker is shutting down: jobs that ask for it should know."""


class End(Struct, frozen=True, tag="end"):
    """No more jobs: shut down."""


Order = Start | BeginLent | Run | Settle | SaveAnswered | Stopping | End


# --- from the child ----------------------------------------------------------------------


class Ready(Struct, frozen=True, tag="ready"):
    tasks: tuple[str, ...]


class NotReady(Struct, frozen=True, tag="not-ready"):
    """The app cannot be made, or no transaction begun."""

    error: Error


class Begun(Struct, frozen=True, tag="begun"):
    """The transaction has begun."""


class Reported(Struct, frozen=True, tag="reported"):
    """Progress and log lines of the running job, any number of times."""

    progress: Progress | None = None
    lines: tuple[str, ...] = ()


class GoesOn(Struct, frozen=True, tag="goes-on"):
    """The running job has a next turn; sent at once, since the job may be killed."""

    turn: Raw
    always: bool


class Save(Struct, frozen=True, tag="save"):
    """A checkpoint of the running job, which waits for the answer with this number."""

    number: int
    checkpoint: bytes


class Returned(Struct, frozen=True, tag="returned"):
    """It succeeded.  `unsendable` is the reason why its value is not here.

    Its transaction, if it has one, is still open; after any other answer it is rolled back.
    """

    value: Raw = Raw(b"null")
    unsendable: str | None = None
    emissions: tuple[Raw, ...] = ()


class Raised(Struct, frozen=True, tag="raised"):
    """It raised; `rule` is the place of the task's rule for such errors, `misuse` says it was a `Misuse`."""

    error: Error
    rule: int | None = None
    misuse: bool = False


class RetryWanted(Struct, frozen=True, tag="retry"):
    reason: str
    after: timedelta | None


class DiscardWanted(Struct, frozen=True, tag="discard"):
    reason: str


class SnoozeWanted(Struct, frozen=True, tag="snooze"):
    after: timedelta


class Settled(Struct, frozen=True, tag="settled"):
    """It stands, with what the job has written; or nothing does, because its lease was lost."""

    stands: bool


Ending = Returned | Raised | RetryWanted | DiscardWanted | SnoozeWanted
Answer = Ready | NotReady | Begun | Ending | Settled
News = Reported | GoesOn | Save
Reply = News | Answer

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

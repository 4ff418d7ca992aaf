"""What the steps need of whoever stores jobs and batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Generic, TypeVar

from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import from_us
from propolis.core.envelope import Envelope
from propolis.core.job import Member
from propolis.core.protocols import Counts, Filter, Page, Rule, RuleKind, Scope
from propolis.engines.shared.book.entries import Entry, HeldBatch

E = TypeVar("E", bound=Entry)
B = TypeVar("B", bound=HeldBatch)

Place = tuple[int, int]  # a time, and the number of a job


class Keeping(ABC, Generic[E, B]):
    """What storage does for the steps."""

    now_us = 0

    @property
    def now(self) -> datetime:
        return from_us(self.now_us)

    # --- jobs ---

    @abstractmethod
    def entry(self, job_id: str) -> E | None: ...

    @abstractmethod
    def create(self, job: Envelope, body: bytes) -> E:
        """A new job, not yet placed; it holds its unique key and is counted as put."""

    @abstractmethod
    def place(self, entry: E, *, front: bool = False) -> None:
        """It waits: in its line if it is due, else for its time."""

    @abstractmethod
    def take(self, queue: str, want: int) -> Iterator[E]:
        """The next jobs to run, in their order; expired ones are ended, kept-back ones passed over."""

    @abstractmethod
    def park(self, entry: E) -> None:
        """It waits in the line of its queue and task for somebody who knows the task."""

    @abstractmethod
    def parked(self, queue: str, task: str) -> Iterable[E]:
        """That line, by priority and then by number: a bite of it at most."""

    @abstractmethod
    def parked_lines(self, most: int) -> tuple[tuple[str, str], ...]: ...

    @abstractmethod
    def started(self, entry: E) -> None:
        """It runs now, with a new fence."""

    @abstractmethod
    def stopped(self, entry: E) -> None:
        """It does not run any more."""

    @abstractmethod
    def changed(self, entry: E) -> None:
        """Something of it changed that moves it nowhere."""

    @abstractmethod
    def shelve(self, entry: E) -> None:
        """It has ended, and is kept until `keep_us`."""

    @abstractmethod
    def forget(self, entry: E) -> None: ...

    @abstractmethod
    def move(self, entry: E, queue: str) -> None: ...

    @abstractmethod
    def waiting(self, queue: str) -> int: ...

    @abstractmethod
    def running_in(self, scope: Scope, name: str) -> int: ...

    @abstractmethod
    def last_number(self) -> int:
        """That of the newest job."""

    @abstractmethod
    def of_queue(self, queue: str, most: int, upto: int) -> list[E]:
        """Some of those that do not run and whose numbers are not beyond one, in the order of the puts."""

    @abstractmethod
    def close_queue(self, queue: str) -> None:
        """Forget its name, unless something is left of it."""

    # --- names ---

    @abstractmethod
    def holder_of(self, key: str) -> str | None: ...

    @abstractmethod
    def hold_key(self, key: str, job_id: str | None) -> None: ...

    @abstractmethod
    def recall(self, kind: str, name: str) -> bytes | None:
        """What was remembered, until its time is over."""

    @abstractmethod
    def remember(self, kind: str, name: str, value: bytes, until_us: int) -> None: ...

    # --- rules ---

    @abstractmethod
    def rule(self, kind: RuleKind, scope: Scope, name: str) -> Rule | None:
        """It may be over."""

    @abstractmethod
    def rules(self, limit: int, after: Rule | None) -> list[Rule]:
        """Those that are not over."""

    @abstractmethod
    def rules_over(self, limit: int) -> list[Rule]: ...

    @abstractmethod
    def names_task_keys(self) -> bool:
        """Is there a rule on a task of one key?"""

    @abstractmethod
    def names_each_key(self) -> bool:
        """Is there a limit for each key of a task?"""

    @abstractmethod
    def prefixes(self) -> list[Rule]:
        """The limits on keys that begin with something, that are not over."""

    @abstractmethod
    def full_us(self, scope: Scope, name: str) -> int:
        """When the bucket of it is full; 0: none is kept."""

    @abstractmethod
    def set_full(self, scope: Scope, name: str, full_us: int) -> None: ...

    @abstractmethod
    def await_token(self, scope: Scope, name: str, at_us: int) -> None:
        """Somebody waits for what comes then."""

    @abstractmethod
    def awaits_tokens(self) -> bool:
        """Does anybody?"""

    @abstractmethod
    def next_token_us(self) -> int | None:
        """When the first one comes that somebody waits for."""

    @abstractmethod
    def follow_turns(self, after: str, limit: int) -> str | None:
        """Look anew when tokens come that are awaited, a bite; where to go on, if there are more."""

    @abstractmethod
    def set_rule(self, rule: Rule) -> None: ...

    @abstractmethod
    def remove_rule(self, rule: Rule) -> None: ...

    # --- batches ---

    @abstractmethod
    def batch_of(self, batch: str) -> B | None: ...

    @abstractmethod
    def create_batch(self, batch: Batch) -> B: ...

    @abstractmethod
    def set_member(self, held: B, member: Member) -> None:
        """Store a member, live or ended, and what changed of its batch."""

    @abstractmethod
    def changed_batch(self, held: B) -> None: ...

    @abstractmethod
    def forget_batch(self, held: B) -> None: ...

    @abstractmethod
    def waiting_members(self, held: B) -> tuple[list[E], bool]:
        """A bite of them, and whether there may be more."""

    # --- looks ---

    @abstractmethod
    def queues(self, limit: int, after: str | None) -> dict[str, Counts]: ...

    @abstractmethod
    def find(self, where: Filter, limit: int, after: int | None) -> Page: ...

    @abstractmethod
    def position(self, entry: E) -> int:
        """How many stand before it."""

    @abstractmethod
    def batches(self, limit: int, after: str | None) -> list[B]: ...

    @abstractmethod
    def status(self, held: B) -> BatchStatus: ...

    @abstractmethod
    def members(self, held: B, limit: int, after: int | None) -> list[Member]: ...

    # --- time ---

    @abstractmethod
    def ending_last(self) -> E | None:
        """Whichever of those that run is the last to lose its lease."""

    @abstractmethod
    def ending_first(self, after: Place, limit: int) -> list[E]:
        """Those that run, in the order in which their leases end, from behind this end and number on."""

    @abstractmethod
    def due_first(self, after: Place, limit: int) -> list[E]:
        """Those that wait for their time, in its order, from behind this time and number on."""

    @abstractmethod
    def promote(self, limit: int) -> int: ...

    @abstractmethod
    def lost(self, limit: int) -> list[E]:
        """Those whose leases nobody renewed, in the order of their leases."""

    @abstractmethod
    def expired(self, limit: int) -> list[E]: ...

    @abstractmethod
    def old_batches(self, limit: int) -> list[B]: ...

    @abstractmethod
    def forget_old(self, limit: int) -> int:
        """Ended jobs, records, ids and tokens whose time is over; gives the number of jobs and records."""

    @abstractmethod
    def next_us(self) -> int | None: ...

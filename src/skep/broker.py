"""The contract between jobs and storage, as protocols.

`Broker` moves jobs, `Ledger` looks at them and operates on them, `Hints` wakes whoever waits for
them.  An engine is a class that is all three.  Storage is described by what happens to jobs, so that
a dict can implement it as honestly as a database; T1…T14, B1, C1 and I1…I15 are the transitions and
invariants of the contract, and `skep.testing` holds every engine to them.

All verbs take and give bundles: a round trip or a commit per job is what makes queues slow.
Each call is atomic: it happens wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any, Protocol, Self, runtime_checkable

from msgspec import Struct

from skep.batch import Batch, BatchStatus, Member
from skep.errors import BadSetting
from skep.job import Done, Job, Lease, Outcome, Progress, Record, State
from skep.schedule import Schedule, ScheduleRecord

KNOWN_FOR = timedelta(days=1)  # how long put tokens and chosen ids are remembered, at least (I1)
LOG_LINES = 100  # the newest lines kept of a job's log
HISTORY_EVENTS = 100  # the newest events kept of a job's history


class Durability(IntEnum):
    """What an acknowledged put survives.  Each level includes those below it."""

    MEMORY = 0
    PROCESS = 1
    POWER = 2
    NODE = 3


# --- what the verbs give -----------------------------------------------------------------


class Receipt(Struct, frozen=True, gc=False):
    """What became of one job of a put.  If it was not created, `id` is that of the job in its place."""

    id: str
    created: bool


class Renewal(Struct, frozen=True):
    """The new end of a lease, or None where it is lost; and whether somebody wants the job stopped."""

    until: datetime | None
    cancel_requested: bool = False


class Exchange(Struct, frozen=True):
    """The leases that were no longer live when they were settled, and the new ones."""

    lost: list[Lease]
    leases: list[Lease]


class Note(Struct, frozen=True):
    """What a running job tells about itself."""

    lease: Lease
    progress: Progress | None = None
    lines: tuple[str, ...] = ()


class Swept(Struct, frozen=True):
    """What a sweep did, and how long until there will be something to do again (None: not that we know).

    `again_in` is when the one who swept should come back, where an engine shares its sweeping out among all
    that do it; None: whenever it likes, and when `next_in` has passed.

    `schedules_due` tells that an instant of some schedule has come and was not fired yet, so that nobody has
    to ask for them just to see.
    """

    promoted: int = 0
    reaped: int = 0
    expired: int = 0
    removed: int = 0
    next_in: timedelta | None = None
    again_in: timedelta | None = None
    schedules_due: bool = False


class Counts(Struct, frozen=True):
    """How many jobs of a queue are in each state.

    `ready` are visible now; `scheduled` are not yet due; `held` are kept back by a rule on their
    task or key.  `put` and `deleted` count since the queue was made, so that jobs = put - deleted (I8).
    """

    ready: int = 0
    scheduled: int = 0
    held: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    put: int = 0
    deleted: int = 0

    @property
    def waiting(self) -> int:
        return self.ready + self.scheduled + self.held

    @property
    def total(self) -> int:
        return self.waiting + self.running + self.done + self.dead + self.cancelled


# --- what an operator says ---------------------------------------------------------------


class RuleKind(StrEnum):
    """Pause is for users and block for administrators: independent of each other, the same effect.

    A limit lets at most n jobs run at once; a cap lets at most n jobs wait in a queue.
    """

    PAUSE = "pause"
    BLOCK = "block"
    LIMIT = "limit"
    CAP = "cap"


class Scope(StrEnum):
    QUEUE = "queue"
    TASK = "task"
    KEY = "key"


class Rule(Struct, frozen=True):
    """One rule; a second of the same kind, scope and name replaces it.  A cap applies to queues only."""

    kind: RuleKind
    scope: Scope
    name: str
    n: int = 0

    def __post_init__(self) -> None:
        if self.kind is RuleKind.CAP and self.scope is not Scope.QUEUE:
            raise BadSetting(f"a cap is for a queue, not for a {self.scope.value}: use a limit")
        if self.n < 0:
            raise BadSetting(f"a {self.kind.value} of {self.n} jobs cannot be kept: give 0 or more")


class Filter(Struct, frozen=True, kw_only=True):
    """Which jobs to list: those for which everything that is given is true."""

    queue: str | None = None
    task: str | None = None
    state: State | None = None
    reason: str | None = None
    batch: str | None = None
    scheduled: bool | None = None


class Page(Struct, frozen=True):
    """Some of what was asked for, oldest first, and where to go on (None: that was all)."""

    records: list[Record]
    after: int | None


# --- the protocols -----------------------------------------------------------------------


class Broker(Protocol):
    """Where jobs wait, and who holds them."""

    @property
    def durability(self) -> Durability:
        """What an acknowledged put survives, as read from the engine at open()."""
        ...

    async def open(self) -> Self:
        """Connect, create or migrate the storage, read the settings.  A second call does nothing."""
        ...

    async def close(self) -> None:
        """Let go of every resource.  A second call does nothing."""
        ...

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        """Add jobs (T1), in this order, each to the back of its queue; one receipt per job.

        A token names the call: repeated with the same one, it adds nothing.  A job whose id is known,
        or whose unique key is held, is not added, and its receipt names the job that is there.
        Raises `QueueFull`, `UnknownBatch` or `BatchSealed`, and then nothing was added.
        """
        ...

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        """Open a batch with its first members in one step.  Sealed and empty, it finishes at once.

        A batch that is already there keeps what it was opened with; the jobs are added to it by the rules
        of `put`, and it is sealed if that is asked for.  Only jobs that name the batch are its members.
        """
        ...

    async def seal(self, batch: str) -> bool:
        """No more members will come from outside; with none left, finish now.  False: already sealed."""
        ...

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        """Take due jobs (T2): at most `wants[queue]` from each queue, at most `limit` in all.

        Queues are served in the order of `wants`; inside a queue the higher priority first, then the
        oldest.  Scheduled jobs that have become due join the back of their queue first, in the
        order of their times.  A job that has expired ends as dead instead (T11).
        """
        ...

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        """Make each live lease end `span` from now (T3): longer or shorter than it would have."""
        ...

    async def note(self, notes: Sequence[Note]) -> None:
        """Record progress and log lines of running jobs; those of lost leases are dropped."""
        ...

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        """Record how each attempt ended and end its lease (T4–T7, T10, T12), with all that follows.

        Returns the leases that were no longer live: nothing was recorded for those.
        """
        ...

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        """`settle`, then `lease`, in one round trip and one commit."""
        ...

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        """Do what time asks for: promote due jobs, reap lost leases (T8), expire (T11), forget.

        Each kind of work at most `limit` times.  Anyone may call it, at any time, any number of times.  Who
        will do so again and again gives a name of its own: then an engine that serves many can tell it when.
        """
        ...


class Ledger(Protocol):
    """What an operator looks at and changes."""

    async def now(self) -> datetime:
        """The engine's clock."""
        ...

    async def queues(self) -> dict[str, Counts]:
        """Every queue that holds jobs or has held some, in the order of their names."""
        ...

    async def get(self, job_id: str) -> Record | None:
        """Everything known of a job, live or kept.  Looking changes nothing."""
        ...

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        """The jobs that match, in the order in which they were put."""
        ...

    async def position(self, job_id: str) -> int | None:
        """How many jobs of its queue would be leased before this one; None if it is not ready and due."""
        ...

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        """End waiting jobs at once; ask for running ones to be stopped (T9).  False: unknown or ended."""
        ...

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        """Make a waiting job due at another time; False if it is not waiting."""
        ...

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        """Give dead jobs a new life at the back of their queue (T13).  False: not dead, or key taken."""
        ...

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        """Forget ended jobs (T14).  False: unknown, or not ended."""
        ...

    async def drop(self, queue: str) -> int:
        """Forget a queue: its waiting jobs are cancelled, ended ones deleted, running ones finish.

        Returns how many jobs went; 0 for a queue that does not exist.
        """
        ...

    async def add_rule(self, rule: Rule) -> bool:
        """False if exactly this rule is already there."""
        ...

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        """False if there is none.  Jobs that were kept back run again, in their old order."""
        ...

    async def rules(self) -> list[Rule]: ...

    async def batch(self, batch: str) -> BatchStatus | None: ...

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        """In the order of their ids."""
        ...

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        """The members in the order of their numbers, with the results of those that left one."""
        ...

    async def delete_batch(self, batch: str) -> bool:
        """Forget a batch and its waiting members; running ones finish; no callback.  False: unknown."""
        ...

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        """Store a schedule under its name.  While its timing is unchanged it keeps its own next instant."""
        ...

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        """All schedules by name; with `due`, those that are not paused and whose instant has come."""
        ...

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        """False if there is no such schedule, or it is so already."""
        ...

    async def remove_schedule(self, name: str) -> bool: ...

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        """Settle one instant of a schedule (C1): put its job, if any, and go on to the next instant.

        True for exactly one caller; False if the instant is not the schedule's next one, is not
        due, or the schedule is paused or gone.
        """
        ...


class Hints(Protocol):
    """A wake-up for whoever waits.  Never the truth: it may come for nothing, and it may not come."""

    @property
    def hears(self) -> bool:
        """Whether hints of others are known to arrive: then it is enough to look by oneself now and then."""
        ...

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Return early, with True, when one of these queues may have got something to lease."""
        ...


class Engine(Broker, Ledger, Hints, Protocol):
    """Everything that stands behind an app."""


@runtime_checkable
class Transactional(Protocol):
    """An engine whose storage can also hold the caller's own rows."""

    async def put_in(self, tx: Any, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        """Put inside the caller's transaction: the jobs appear if and only if it commits.

        `BadSetting` for what is no connection to this engine's storage, or is in no transaction.
        """
        ...

    def put_in_now(self, tx: Any, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        """The same in the caller's own thread, where most connections have to stay; the engine is open."""
        ...


@runtime_checkable
class Watched(Protocol):
    """An engine that knows what an operator should see to before it hurts."""

    async def complaints(self) -> list[str]:
        """A sentence for each, with what to do about it."""
        ...


@runtime_checkable
class Remote(Protocol):
    """An engine behind a wire: an answer can be lost, so puts carry a token and are repeated with it."""

    @property
    def remote(self) -> bool: ...

    @property
    def in_order(self) -> bool:
        """Do calls take effect in the order in which they are made, also if none waits for the last?"""
        ...

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        """Nobody will repeat the puts of these tokens: they need not be known for the rest of their day."""
        ...


class Lent(Protocol):
    """A transaction of the engine's own, while it is lent to a running job."""

    @property
    def connection(self) -> Any: ...

    async def settle(self, lease: Lease, outcome: Outcome) -> bool:
        """Record how the attempt ended and commit, with all that was written here.

        False: the lease was no longer live, and nothing is committed.  `OutcomeUnknown` when the answer was
        lost: another settle of this lease tells, since it is refused if this one stands.  Anything else that
        is raised means that the commit was refused.
        """
        ...


@runtime_checkable
class LendsTransactions(Protocol):
    """An engine whose leases can end in a transaction that the job itself has written in."""

    def transaction(self) -> AbstractAsyncContextManager[Lent]:
        """Begin one; on leaving, what was not settled is rolled back.  Their number is bounded.

        `EngineUnavailable` if it cannot begin.
        """
        ...


async def pop(
    broker: Broker, queue: str, *, limit: int = 1, span: timedelta = timedelta(seconds=15)
) -> list[Lease]:
    """Take jobs at most once: each is settled before the caller sees it, so no crash brings it back."""
    leases = await broker.lease({queue: limit}, span=span, holder="pop")
    lost = await broker.settle([(lease, Done()) for lease in leases])
    gone = {(lease.id, lease.fence) for lease in lost}
    return [lease for lease in leases if (lease.id, lease.fence) not in gone]

"""The contract between jobs and storage, as protocols.

An engine is the `Core` and as many of the other pieces as it can keep; whoever needs one asks with
`isinstance`.  Storage is described by what happens to jobs, so that
a dict can implement it as honestly as a database; T1…T14, B1, C1 and I1…I15 are the transitions and
invariants of the contract, and `propolis.testing` holds every engine to them.

All verbs take and give bundles: a round trip or a commit per job is what makes queues slow.
Each call is atomic: it happens wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any, Protocol, Required, Self, TypedDict, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from propolis.core.batch import Batch, BatchStatus
from propolis.core.envelope import Envelope
from propolis.core.job import Done, JobInfo, Lease, Member, Outcome, Progress, State
from propolis.core.records import KEEP_BYTES, KEEP_ENTRIES, KEEP_FOR, FeedPage, Read, Swap, Swapped
from propolis.errors import BadSetting

KNOWN_FOR = timedelta(days=1)  # how long put tokens and chosen ids are remembered, at least (I1)
LOG_LINES = 100  # the newest lines kept of a job's log
MAX_CHECKPOINT = 64 * 1024  # bytes of what a run saves for the next
MAX_OUTCOME = 32 * 2**20  # bytes of a result and of all that is put in the same step
HISTORY_EVENTS = 100  # the newest events kept of a job's history
BITE = 1000  # jobs that one call removes, sets aside or passes over; whoever has more to do comes back
COUNTED = 10_000  # jobs of one state of one queue that a look counts
MAX_BY = 200  # characters of who set a rule
MAX_WHY = 1000  # characters of why
LONGEST_RULE = timedelta(days=36_525)
UNBOUNDED = 2**31 - 1  # the `n` of a limit that is only a rate
MAX_PREFIXES = 100  # limits on keys that begin with something: a call may read all of them
MAX_BURST = 1_000_000
SLOWEST_RATE = timedelta(days=366)
PARKED_LINES = 100  # lines of parked jobs that a sweep names
REMOVALS = "removal"  # the kind of records in which a `drop` or a `delete_batch` tells how far it is


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
    """The new end of a lease, or None where it is lost; and whether somebody wants the job stopped.

    `later`: somebody holds it just now, so it has no new end, and is as live as before.
    """

    until: datetime | None
    cancel_requested: bool = False
    later: bool = False


class Exchange(Struct, frozen=True):
    """The leases that were no longer live when they were settled, and the new ones.

    `later` are those whose outcomes want what somebody's open transaction holds: nothing was recorded for
    them, they are as live as before, and their outcomes are to be given again.
    """

    lost: list[Lease]
    leases: list[Lease]
    later: list[Lease] = []


class Note(Struct, frozen=True):
    """What a running job reports about itself, in one step (T3b); what is not given stays as it was.

    `began` means that its own code is about to run, and is forgotten with the lease.  The `checkpoint` comes
    back with the next lease.  `puts` follow the rules of `put`; their ids are chosen and derived, so that a
    note which is repeated makes no second job.
    """

    lease: Lease
    progress: Progress | None = None
    lines: tuple[str, ...] = ()
    began: bool = False
    checkpoint: bytes | None = None
    puts: tuple[Envelope, ...] = ()


class Swept(Struct, frozen=True):
    """What a sweep did, and how long until there will be something to do again (None: not that we know).

    `again_in` is when whoever swept should come back, where an engine shares its sweeping out among all
    that do it; None: whenever it likes, and when `next_in` has passed.

    `ended` are the ids of the jobs that it brought to their end, by reaping and by expiring.

    `records_due` are the kinds of records of which some are due, in the order of their names.

    `parked` are the queues and tasks in whose lines jobs are parked, at most `PARKED_LINES`, in their order.

    `nothing_ready`: it saw no job that waits to be leased, so whoever hears of what comes need not look.
    """

    promoted: int = 0
    reaped: int = 0
    expired: int = 0
    removed: int = 0
    next_in: timedelta | None = None
    again_in: timedelta | None = None
    records_due: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    parked: tuple[tuple[str, str], ...] = ()
    nothing_ready: bool = False


class Counts(Struct, frozen=True):
    """How many jobs of a queue are in each state.

    `ready` are visible now; `scheduled` are not yet due; `held` are kept back by a rule on their
    task or key; `parked` wait for somebody who knows their task.  `put` and `deleted` count since the queue
    was made, so that jobs = put - deleted (I8).  `more`: a look counts no further than `COUNTED`, and some
    of these are greater.
    """

    ready: int = 0
    scheduled: int = 0
    held: int = 0
    parked: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    put: int = 0
    deleted: int = 0
    more: bool = False

    @property
    def waiting(self) -> int:
        return self.ready + self.scheduled + self.held + self.parked

    @property
    def total(self) -> int:
        return self.waiting + self.running + self.done + self.dead + self.cancelled


# --- what an operator asks for -----------------------------------------------------------


class RuleKind(StrEnum):
    """Pause is for users and block for administrators: independent of each other, the same effect.

    A limit lets at most n jobs run at once, and start as often as its rate allows; a cap lets at most n jobs
    wait in a queue.
    """

    PAUSE = "pause"
    BLOCK = "block"
    LIMIT = "limit"
    CAP = "cap"


class Scope(StrEnum):
    """What a rule is for.  `TASK_KEY`: one task with one key; its name is that of `task_key`."""

    QUEUE = "queue"
    TASK = "task"
    KEY = "key"
    TASK_KEY = "task_key"


LIMIT_SCOPES = frozenset({Scope.QUEUE, Scope.TASK, Scope.KEY})
EACH = "*"  # ends the name of a limit on each key that begins so, or on each key of a task


def task_key(task: str, key: str) -> str:
    """The name of a rule on one task with one key; no name of a task has a space."""
    return f"{task} {key}"


def task_and_key(name: str) -> tuple[str, str]:
    """What `task_key` made one name of."""
    task, _, key = name.partition(" ")
    return task, key


class Rule(Struct, frozen=True):
    """One rule; a second of the same kind, scope and name replaces it.  A cap applies to queues only.

    `by` says who set it and `why`.  From `until` on it does not hold, and is not there any more; where it is
    given how long it `lasts`, the engine counts that from its own now, and answers with `until`.  `at` is
    when it was set, by the engine's clock, whatever is given.

    A limit may be a rate as well: a start each so often (`every`), of which so many are saved up (`burst`).
    The name of a limit on a key may end with `*`: then it is for each key that begins with what is before it
    (`prefix`), and its name of the scope `TASK_KEY`, `task_key(task, "*")`, is for each key of a task.
    """

    kind: RuleKind
    scope: Scope
    name: str
    n: int = 0
    by: str = ""
    why: str = ""
    at: datetime | None = None
    until: datetime | None = None
    lasts: timedelta | None = None
    every: timedelta | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        if self.kind is RuleKind.CAP and self.scope is not Scope.QUEUE:
            raise BadSetting(f"a cap is for a queue, not for a {self.scope.value}: use a limit")
        if self.scope in (Scope.KEY, Scope.TASK_KEY):
            self._check_key()
        if self.every is not None or self.burst != 1:
            self._check_rate()
        if self.n < 0:
            raise BadSetting(f"a {self.kind.value} of {self.n} jobs cannot be kept: give 0 or more")
        for what, text, most in (("by", self.by, MAX_BY), ("why", self.why, MAX_WHY)):
            if len(text) > most or "\0" in text:
                raise BadSetting(f"a rule's {what} has at most {most} characters, none of them NUL")
        if self.lasts is not None and not timedelta(0) < self.lasts <= LONGEST_RULE:
            raise BadSetting(
                f"a rule cannot last for {self.lasts}: give more than nothing, at most 100 years"
            )
        if self.lasts is not None and self.until is not None:
            raise BadSetting("give either until when a rule holds, or for how long")
        if self.until is not None and self.until.tzinfo is None:
            raise BadSetting(f"until {self.until} in which time zone?  Give an aware datetime")

    def set_at(self, now: datetime) -> Rule:
        """As it is kept, if it is set now."""
        return replace(self, at=now, until=self.until if self.lasts is None else now + self.lasts, lasts=None)

    def is_over(self, now: datetime) -> bool:
        return self.until is not None and self.until <= now

    @property
    def prefix(self) -> str | None:
        """What the keys begin with that it is for; None where it is for no such keys."""
        is_prefix = self.kind is RuleKind.LIMIT and self.scope is Scope.KEY and self.name.endswith(EACH)
        return self.name.removesuffix(EACH) if is_prefix else None

    def _check_key(self) -> None:
        task, key = task_and_key(self.name) if self.scope is Scope.TASK_KEY else ("", self.name)
        if self.scope is Scope.TASK_KEY and not (task and key):
            raise BadSetting(f"{self.name!r} names no task of one key: make the name by task_key(task, key)")
        if self.kind is RuleKind.LIMIT:
            if task and key != EACH:
                raise BadSetting(
                    "a limit on a task of one key cannot be kept: limit the task, the key, or each key of "
                    "the task, or pause both"
                )
        elif key.endswith(EACH):
            raise BadSetting(
                f"a {self.kind.value} on many keys ({key!r}) cannot be kept: name the exact keys, or the task"
            )

    def _check_rate(self) -> None:
        if self.kind is not RuleKind.LIMIT:
            raise BadSetting(f"a {self.kind.value} has no rate: give it to a limit")
        if self.every is None:
            raise BadSetting(f"a burst of {self.burst} of which rate?  Give `every` as well")
        if not timedelta(microseconds=1) <= self.every <= SLOWEST_RATE:
            raise BadSetting(f"a start each {self.every} cannot be kept: give 1 µs to 366 days")
        if not 1 <= self.burst <= MAX_BURST:
            raise BadSetting(f"a burst of {self.burst} cannot be kept: give 1 to {MAX_BURST}")
        if self.burst > LONGEST_RULE // self.every:
            raise BadSetting(f"a burst of {self.burst}, each after {self.every}, takes more than 100 years")


class Tokens(Struct, frozen=True):
    """How many starts a rate allows at once, and how long until there is one (nothing, where there is)."""

    free: int
    next_in: timedelta


class Filter(Struct, frozen=True, kw_only=True):
    """Which jobs to list: those for which everything that is given is true."""

    queue: str | None = None
    task: str | None = None
    state: State | None = None
    reason: str | None = None
    batch: str | None = None
    scheduled: bool | None = None


class Page(Struct, frozen=True):
    """Some of what was asked for, and where to go on (None: that was all).

    It may be short, or empty, though there is more: each call reads a bite.  `after` means something only to
    the engine that gave it.
    """

    jobs: list[JobInfo]
    after: int | None


class LeaseTerms(TypedDict, total=False):
    """How jobs are leased: what `Core.lease` and `Core.exchange` take, for whoever passes it on."""

    span: Required[timedelta]
    holder: Required[str]
    limit: int | None
    tasks: Sequence[str]


# --- the protocols -----------------------------------------------------------------------


class Core(Protocol):
    """Where jobs wait, and where leases are kept."""

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

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        """Add jobs (T1), in this order, each to the back of its queue; one receipt per job.

        A token names the call: repeated with the same one, it adds nothing.  A job whose id is known,
        or whose unique key is held, is not added, and its receipt names the job that is there.
        Raises `QueueFull`, `UnknownBatch` or `BatchSealed`, and then nothing was added.
        """
        ...

    async def lease(
        self,
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
        tasks: Sequence[str] = (),
    ) -> list[Lease]:
        """Take due jobs (T2): at most `wants[queue]` from each queue, at most `limit` in all.

        Queues are served in the order of `wants`; inside a queue the higher priority first, then the
        oldest.  Scheduled jobs that have become due join the back of their queue first, in the
        order of their times.  A job that has expired ends as dead instead (T11).

        Parked jobs are taken only if their task is one of `tasks` (T12b): line by line, before the others of
        their queue.
        """
        ...

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        """Make each live lease end `span` from now (T3): longer or shorter than it would have."""
        ...

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        """Record what running jobs report (T3b), each note in one step, while its lease is live.

        Returns the leases that were no longer live: nothing was recorded for those.  Raises as `put` does if
        a job cannot be put, and then nothing was recorded for any of them.
        """
        ...

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        """Record how each attempt ended and end its lease (T4–T8b, T10–T12b), with all that follows.

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
        tasks: Sequence[str] = (),
    ) -> Exchange:
        """`settle`, then `lease`, in one round trip and one commit."""
        ...

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        """Do what time asks for: promote due jobs, reap lost leases (T8), expire (T11), forget.

        Each kind of work at most `limit` times.  Anyone may call it, at any time, any number of times.
        Whoever will do so again and again gives a name: then an engine that serves many can answer when to
        come back.
        """
        ...

    @property
    def hears(self) -> bool:
        """Whether hints of others are known to arrive: then it is enough to ask now and then."""
        ...

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        """Return early, with True, when one of these queues may have got something to lease.

        Never the truth: it may return for nothing, and a hint may not come.
        """
        ...


@runtime_checkable
class Batches(Protocol):
    """An engine in which many jobs have one end."""

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        """Open a batch with its first members in one step.  Sealed and empty, it finishes at once.

        A batch that is already there keeps what it was opened with; the jobs are added to it by the rules
        of `put`, and it is sealed if that is asked for.  Only jobs that name the batch are its members.
        """
        ...

    async def seal(self, batch: str) -> bool:
        """No more members will come from outside; with none left, finish now.  False: already sealed."""
        ...

    async def batch(self, batch: str) -> BatchStatus | None: ...

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        """In the order of their ids."""
        ...

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        """The members in the order of their numbers, with the results of those that left one."""
        ...

    async def delete_batch(self, batch: str) -> bool:
        """Forget a batch and its waiting members; running ones finish; no callback.  False: unknown.

        Where it has many, they are never leased again, and sweeps remove them, a bite each.
        """
        ...


@runtime_checkable
class Rules(Protocol):
    """An engine whose leasing obeys pauses and blocks, and its puts the caps of queues."""

    async def add_rule(self, rule: Rule) -> bool:
        """False if one of this kind, scope and name was there: it is replaced, with all that it says."""
        ...

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        """False if there is none, or it was over.  Jobs that were kept back run again, in their old order."""
        ...

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        """Those that are not over, in the order of their kinds, scopes and names, after `after`."""
        ...


@runtime_checkable
class Limits(Rules, Protocol):
    """An engine that also keeps rules of the kind `LIMIT`, in these scopes."""

    limits: frozenset[Scope]


@runtime_checkable
class Rates(Limits, Protocol):
    """An engine whose limits may also be rates, and for each key: of a prefix, and of a task.

    Others are given no limit with `every`, or with a name that ends with `*`.
    """

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        """What is left of the rate of a limit: for the queue, the task or the key of this name.

        It holds for that name, which is a key where the limit is for each key.  `BadSetting` for a limit
        that has no rate.
        """
        ...


@runtime_checkable
class Inspects(Protocol):
    """An engine that shows what it holds."""

    async def now(self) -> datetime:
        """The engine's clock."""
        ...

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        """The queues that hold jobs or have held some, in the order of their names, after one of them."""
        ...

    async def get(self, job_id: str) -> JobInfo | None:
        """Everything known of a job, live or kept.  Looking changes nothing."""
        ...

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        """The jobs that match, in the order in which they were put, `limit` of them at most.

        An engine that has no such order at hand keeps it as long as it has no more jobs than a call reads.
        Where there are more, whoever goes on to the end is still shown each job that matches all the time.
        """
        ...

    async def position(self, job_id: str) -> int | None:
        """How many jobs of its queue would be leased before this one; None if it is not ready and due.

        An engine may count no further than `COUNTED`.
        """
        ...


@runtime_checkable
class Operates(Protocol):
    """An engine in which an operator changes what became of jobs."""

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

        Returns how many jobs went; 0 for a queue that does not exist.  Where there are many, the others are
        never leased again, and sweeps remove them, a bite each; a record of the kind `REMOVALS` tells how
        far they are.
        """
        ...


class Engine(Core, Batches, Rates, Inspects, Operates, Protocol):
    """What stands behind an app that uses all of it; one that uses less asks for less (`App(needs=…)`)."""


@runtime_checkable
class Records(Protocol):
    """An engine that keeps small named values with versions: see `core.records`."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        """Each swap wholly or not at all (R1), each with its own answer: a version, or why it was refused.

        A token names the call: repeated with the same one it changes nothing and answers the same.  Raises
        `BadSetting` or `RecordTooLarge`, and then nothing was changed.
        """
        ...

    async def records(
        self,
        kind: str,
        *,
        names: Sequence[str] | None = None,
        after: str | None = None,
        due: bool = False,
        newest: bool = False,
        limit: int = 1000,
    ) -> Read:
        """The records of a kind: those of these names, those that are due, or all, in the order of names.

        Names are ordered by their bytes, `newest` backwards; those that are due by (`at`, name).
        """
        ...


@runtime_checkable
class Feeds(Protocol):
    """An engine that keeps bounded logs which others follow: see `core.records`."""

    dropped: int  # entries that this handle dropped, or that nobody confirmed

    async def publish(
        self,
        feed: str,
        entries: Sequence[bytes],
        *,
        keep: int = KEEP_ENTRIES,
        keep_bytes: int = KEEP_BYTES,
        keep_for: timedelta = KEEP_FOR,
    ) -> int | None:
        """Append entries, all or none; the number of the last one, or None where they were dropped.

        They are dropped, and counted, rather than waited for: nothing is raised where the storage is busy,
        full or not there.  The oldest are forgotten beyond `keep` and `keep_bytes`, a few in each call, and
        the whole feed where nobody wrote to it for `keep_for`.  Raises `BadSetting` or `RecordTooLarge`.
        """
        ...

    async def follow(
        self, after: Mapping[str, int | None], *, limit: int = 1000, wait: float = 0.0
    ) -> dict[str, FeedPage]:
        """Of each feed the entries after that number, `limit` at most; 0: from the first that is there.

        Numbers grow in the order in which entries become visible, and none comes back: whoever goes on after
        the last one has missed nothing unless `gap` says so.  None asks only for the number of the last one.
        Where there is nothing new in any of them, it returns after `wait` seconds, or as soon as there is.
        """
        ...


@runtime_checkable
class Transactional(Protocol):
    """An engine whose storage can also hold the caller's own rows."""

    async def put_in(self, tx: Any, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        """Put inside the caller's transaction: the jobs appear if and only if it commits.

        `BadSetting` for what is no connection to this engine's storage, or is in no transaction.
        """
        ...

    def put_in_now(self, tx: Any, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        """The same in the caller's own thread, where most connections have to stay; the engine is open."""
        ...


@runtime_checkable
class Scripted(Protocol):
    """An engine whose storage is made by SQL, which an operator may want to run by hand."""

    def script(self) -> str:
        """All that makes the storage, as one script.  The engine is not open, and touches nothing."""
        ...


@runtime_checkable
class Installs(Protocol):
    """An engine whose storage has parts that not every open adds or removes."""

    async def install(self, *, prune: bool = False) -> list[str]:
        """Create the storage or bring it up to date, and `prune` what old code needed.  Gives what was done.

        The engine is not open, before or after.
        """
        ...


@runtime_checkable
class Looks(Protocol):
    """An engine with storage that somebody may want to look at, and no more."""

    async def open_to_look(self) -> Self:
        """`open`, but nothing is created, migrated or set; `StorageNotReady` if nothing is there."""
        ...


@runtime_checkable
class Watched(Protocol):
    """An engine that knows what an operator should see to before it hurts."""

    async def complaints(self) -> list[str]:
        """A sentence for each, with what to do about it."""
        ...


@runtime_checkable
class KnowsOldest(Protocol):
    """An engine whose `find` has no order where there is much, and that still knows what stands first."""

    async def oldest(self, queues: Sequence[str]) -> dict[str, datetime]:
        """When the first ready job of each of these queues was put; those without one are left out.

        Of what was sent back to wait once more it may not know.
        """
        ...


@runtime_checkable
class Repairs(Protocol):
    """An engine that can find what is not as it should be in its own storage, and mend it."""

    async def repair(self, *, mend: bool) -> list[str]:
        """A sentence for each fault: a job that stands nowhere, a place without a job, a counter that differs
        from a recount, a unique key or a batch whose jobs are gone.

        It reads everything, and nobody waits for that.  Without `mend` nothing is changed; with it all is
        mended, bite by bite.
        """
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
        lost: another settle of this lease shows it, since it is refused if this one stands.  Anything else
        that is raised means that the commit was refused.
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
    engine: Core, queue: str, *, limit: int = 1, span: timedelta = timedelta(seconds=15)
) -> list[Lease]:
    """Take jobs at most once: each is settled before the caller sees it, so no crash brings it back."""
    leases = await engine.lease({queue: limit}, span=span, holder="pop")
    lost = await engine.settle([(lease, Done()) for lease in leases])
    gone = {(lease.id, lease.fence) for lease in lost}
    return [lease for lease in leases if (lease.id, lease.fence) not in gone]

"""The PostgreSQL engine: a schema of tables and functions, any number of workers, no other process.

Tables and functions are in sql/postgres/, the statements that call them in sql/postgres.sql.  Each verb is
one statement: one round trip and one commit, whatever follows from it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self
from urllib.parse import urlencode, urlsplit, urlunsplit

import asyncpg
import msgspec

from skep import wire
from skep.address import Address, masked
from skep.batch import Batch, BatchStatus, Member, batch_state
from skep.broker import (
    Counts,
    Durability,
    Exchange,
    Filter,
    Note,
    Page,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
)
from skep.brokers.postgres_callers import Caller, caller_of
from skep.brokers.postgres_hints import Notifications, soonest
from skep.brokers.postgres_lending import LentTransaction, lending
from skep.brokers.postgres_link import Connection, PostgresLink, Refused, Row
from skep.brokers.postgres_schema import SCHEMA, in_schema, prelude, quoted, recorded
from skep.brokers.statements import load_migrations, load_statements
from skep.brokers.waiting import Waiters
from skep.clock import Clock, from_us, span_until, span_us, to_us
from skep.duration import Duration, duration
from skep.errors import (
    BadSetting,
    BatchSealed,
    EngineError,
    EngineUnavailable,
    QueueFull,
    SchemaTooNew,
    SkepError,
    UnknownBatch,
)
from skep.job import (
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Event,
    Job,
    Lease,
    Outcome,
    Progress,
    Record,
    Release,
    Retry,
    Snooze,
    State,
    storable,
)
from skep.life import NOTE_MAX, RETENTION, Retention
from skep.schedule import Schedule, ScheduleRecord

log = logging.getLogger("skep.postgres")

OLDEST_SERVER = 140000
OLD_TRANSACTION = 60.0  # seconds after which one that keeps VACUUM waiting is told about
FLOOR_FOR = 1.0  # seconds until a claim looks at everything again
FEW = 10  # jobs that are put one by one in the transaction of a caller: the server then plans less
TRANSACTIONS = 10  # connections lent to running jobs, per event loop
_MIGRATE_RETRIES = 20

_ISOLATION, _READ_COMMITTED = "default_transaction_isolation", "read committed"
_STATEMENTS = load_statements("postgres")
_SCHEMA_NAME = re.compile(r"[^\x00]{1,50}")  # the name of its channel, 63 bytes at most, is longer

_json = msgspec.json.Encoder()
_error = msgspec.json.Decoder(Error)
_progress = msgspec.json.Decoder(Progress)
_batch = msgspec.json.Decoder(Batch)
_schedule = msgspec.json.Decoder(Schedule)
_DONE = Done()


class PostgresBroker:
    """All of `Broker`, `Ledger` and `Hints` in one schema of a PostgreSQL database, 14 or newer.

    The time is the server's; a clock is for tests.  `listen` is another URL for the connection that waits for
    notifications, where `url` leads through a pooler that cannot pass them on.  `transactions` is how many
    connections are lent to running jobs.
    """

    def __init__(
        self,
        url: str,
        *,
        schema: str = SCHEMA,
        clock: Clock | None = None,
        retention: Retention = RETENTION,
        patience: Duration = "30s",
        listen: str | None = None,
        prepare: bool | None = None,
        transactions: int = TRANSACTIONS,
    ) -> None:
        if transactions < 1:
            raise BadSetting(f"transactions={transactions}: at least one connection is lent to jobs")
        if not _SCHEMA_NAME.fullmatch(schema) or len(schema.encode()) > 50:
            raise BadSetting(f"schema={schema!r}: give a name of 1 to 50 bytes")
        if schema == "$user":  # which a search path takes for the name of whoever is there
            raise BadSetting("schema='$user' means another schema to every user: give a name of its own")
        seconds = duration(patience).total_seconds()
        self._link = PostgresLink(url, shown=masked(url), patience=seconds, prepare=prepare)
        self._listen_link = PostgresLink(
            listen or url, shown=masked(listen or url), patience=seconds, prepare=False
        )
        self._lending_link = PostgresLink(
            url, shown=masked(url), patience=seconds, prepare=prepare, most=transactions
        )
        self._schema = schema
        self._sql = {name: in_schema(text, schema) for name, text in _STATEMENTS.items()}
        self._clock = clock
        self._retention = retention
        self._durability = Durability.PROCESS
        self._installation = ""
        self._waiters = Waiters()
        self._floors = _Floors()
        self._kept_back: set[str] = set()  # queues in which a limit does so, at the last look
        self._hints = Notifications(self._link, self._listen_link, self._sql, f"skep:{schema}", self._waiters)
        dead, cancelled = span_us(retention.dead_for), span_us(retention.cancelled_for)
        self._keeps = (dead, cancelled)

    @property
    def remote(self) -> bool:
        return True

    @property
    def in_order(self) -> bool:
        return False  # each call has a connection of its own

    @property
    def durability(self) -> Durability:
        return self._durability

    async def open(self) -> Self:
        if not self._link.open():
            return self
        self._listen_link.open()
        self._lending_link.open()
        try:
            if await self._link.look_for_pooler():
                log.info("%s is behind a pooler: statements are not prepared", self._link.shown)
            self._lending_link.named = self._link.named
            settings = {row["name"]: row["setting"] for row in await self._link.read(self._sql["settings"])}
            if int(settings["server_version_num"]) < OLDEST_SERVER:
                raise EngineError("this PostgreSQL is too old: skep needs 14 or newer")
            self._durability = _durability(settings)
            if settings[_ISOLATION] != _READ_COMMITTED:  # in a verb each statement must see what came before
                await self._link.insist(_ISOLATION, _READ_COMMITTED)
            await self._migrate()
            [row] = await self._read("installation")
            self._installation = str(row[0])
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        self._waiters.wake()
        await self._hints.close()
        await self._listen_link.close()
        await self._lending_link.close()
        await self._link.close()

    async def _migrate(self) -> None:
        """Bring the schema up to date; of several that do so at once, the others wait and find it done."""
        migrations = load_migrations("postgres")
        newest = migrations[-1][0]
        for turn in range(_MIGRATE_RETRIES):
            found = await self._installed()
            if found > newest:
                raise SchemaTooNew(found, newest)
            if found == newest:
                return
            try:
                await self._link.run(partial(self._install, found))
            except EngineError as error:
                if turn + 1 == _MIGRATE_RETRIES or not isinstance(error.__cause__, _LOST_RACES):
                    raise
                await asyncio.sleep(random.uniform(0.01, 0.05))

    async def _installed(self) -> int:
        """The number of the newest migration that is there; 0 where there is nothing yet."""
        [row] = await self._read("installed", f"{quoted(self._schema)}.migration")
        if not row[0]:
            return 0
        [row] = await self._read("newest")
        return int(row[0])

    async def _install(self, found: int, connection: Connection) -> None:
        await connection.execute(prelude(self._schema))
        for number, _, script in load_migrations("postgres"):
            if number > found:
                await connection.execute(f"{script}\n{recorded(number)}")

    def _at(self) -> int | None:
        return None if self._clock is None else self._clock.now_us()

    async def _write(self, statement: str, *args: object) -> list[Row]:
        try:
            return await self._link.write(self._sql[statement], *args)
        except Refused as refused:
            raise _refusal(refused) from refused

    async def _read(self, statement: str, *args: object) -> list[Row]:
        return await self._link.read(self._sql[statement], *args)

    async def _answer(self, statement: str, *args: object) -> Any:
        rows = await self._write(statement, *args)
        return rows[0][0] if rows else None

    # --- Broker --------------------------------------------------------------------------

    async def put(self, jobs: Sequence[Job], *, token: str | None = None) -> list[Receipt]:
        if not jobs and token is None:
            self._link.check_usable()
            return []
        return await self._put(jobs, token, None, seal=False)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Job] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self._put(jobs, token, batch, seal=seal)

    async def _put(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is None and len(jobs) == 1 and _is_plain(jobs[0]):
            return [await self._put_one(jobs[0], token)]
        args = self._put_args(jobs, token, batch, seal=seal)
        news = soonest((job.queue, self._seconds_until_due(job)) for job in jobs)
        if said := self._hints.along(news):
            rows = await self._write("put_and_tell", *args, self._hints.channel, said)
            self._hints.wake(news)
        else:
            rows = await self._write("put", *args)
            self._hints.tell(news)
        return _receipts(jobs, rows)

    async def _put_one(self, job: Job, token: str | None) -> Receipt:
        """As most jobs are: plain, and alone."""
        body = wire.encode(job)
        args = (self._at(), job.id, job.task, job.queue, job.priority, job.max_crashes, body, token)
        news = {job.queue: 0.0}
        if said := self._hints.along(news):
            [row] = await self._write("put_one_and_tell", *args, self._hints.channel, *said)
            self._hints.wake(news)
        else:
            [row] = await self._write("put_one", *args)
            self._hints.tell(news)
        return Receipt(job.id, row[0])

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        await self._write("forget_tokens", tokens)

    def _seconds_until_due(self, job: Job) -> float:
        """By our own clock, since it is only for a hint."""
        if job.due_at is None:
            return job.delay_ms / 1000
        now_us = time.time_ns() // 1000 if self._clock is None else self._clock.now_us()
        return max(0.0, (to_us(job.due_at) - now_us) / 1_000_000)

    async def put_in(
        self,
        tx: Any,
        jobs: Sequence[Job],
        *,
        token: str | None = None,
        batch: Batch | None = None,
        seal: bool = True,
    ) -> list[Receipt]:
        """Put inside the caller's own transaction: the jobs appear if and only if it commits.

        Idle workers are notified at the commit where the caller's library tells of it (sessions of
        SQLAlchemy, Django), otherwise by the next sweep.  A notification inside of the transaction would make
        its commit wait for all others that notify.
        """
        caller = caller_of(tx)
        call = self._call(caller, jobs, token, batch, seal=seal)
        try:
            rows = await caller.afetch(self._sql["put_called"], call)
        except Refused as refused:
            raise _refusal(refused) from refused
        return self._put_by(caller, jobs, rows)

    def put_in_now(
        self,
        tx: Any,
        jobs: Sequence[Job],
        *,
        token: str | None = None,
        batch: Batch | None = None,
        seal: bool = True,
    ) -> list[Receipt]:
        """The same for synchronous code, in its own thread."""
        caller = caller_of(tx)
        call = self._call(caller, jobs, token, batch, seal=seal)
        try:
            rows = caller.fetch(self._sql["put_called"], call)
        except Refused as refused:
            raise _refusal(refused) from refused
        return self._put_by(caller, jobs, rows)

    def _call(
        self, caller: Caller, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> str:
        """A put as one text."""
        self._link.check_usable()
        return _text(
            {
                "installation": self._installation,
                "at": self._at(),
                "drafts": [_draft(job) for job in jobs],
                "facts": self._facts_of_call(jobs),
                "told": caller.tells,
                "token": token,
                "batch": None if batch is None else _batch_draft(batch),
                "seal": seal,
                "dead_us": self._keeps[0],
                "cancelled_us": self._keeps[1],
            }
        )

    def _facts_of_call(self, jobs: Sequence[Job]) -> dict[str, object] | None:
        """A few jobs go one by one: in a session that has not put before, planning for sets costs more."""
        if len(jobs) <= FEW:
            return {**_facts_of_all(jobs), "alike": True}
        return None if all(map(_is_plain, jobs)) else _facts_of_all(jobs)

    def _put_by(self, caller: Caller, jobs: Sequence[Job], rows: Sequence[Row]) -> list[Receipt]:
        receipts = _receipts(jobs, rows)
        new = [job for job, receipt in zip(jobs, receipts, strict=True) if receipt.created]
        if news := soonest((job.queue, self._seconds_until_due(job)) for job in new):
            caller.after_commit(partial(self._announce, news))
        return receipts

    def _announce(self, news: Mapping[str, float]) -> None:
        """Something was committed, in whatever thread this is."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._link.call_soon(self._hints.tell, news)
        else:
            self._hints.tell(news)

    def _put_args(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> tuple[object, ...]:
        return (
            self._at(),
            [job.id for job in jobs],
            [job.task for job in jobs],
            [job.queue for job in jobs],
            [job.priority for job in jobs],
            [job.max_crashes for job in jobs],
            wire.encode_all(jobs),
            _facts_of_put(jobs),
            token,
            None if batch is None else _text(_batch_draft(batch)),
            seal,
            *self._keeps,
        )

    def transaction(self) -> AbstractAsyncContextManager[LentTransaction]:
        """On connections that nothing else uses, so that jobs and the engine never wait for one another."""
        return lending(self._lending_link, self._settle_lent, self._committed_lent)

    async def _settle_lent(self, connection: Connection, lease: Lease, outcome: Outcome) -> bool:
        return bool(
            await connection.fetchval(
                self._sql["settle_lent"], self._at(), lease.fence, lease.id, _told(outcome), *self._keeps
            )
        )

    def _committed_lent(self, lease: Lease, outcome: Outcome) -> None:
        self._hints.tell(_news([(lease, outcome)]))

    async def seal(self, batch: str) -> bool:
        return bool(await self._answer("seal", self._at(), batch, *self._keeps))

    async def lease(
        self, wants: Mapping[str, int], *, span: timedelta, holder: str, limit: int | None = None
    ) -> list[Lease]:
        return (await self._exchange((), wants, span, holder, limit)).leases

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        if not outcomes:
            self._link.check_usable()
            return []
        return (await self._exchange(outcomes, {}, timedelta(0), "", None)).lost

    async def exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        *,
        span: timedelta,
        holder: str,
        limit: int | None = None,
    ) -> Exchange:
        return await self._exchange(outcomes, wants, span, holder, limit)

    async def _exchange(
        self,
        outcomes: Sequence[tuple[Lease, Outcome]],
        wants: Mapping[str, int],
        span: timedelta,
        holder: str,
        limit: int | None,
    ) -> Exchange:
        self._waiters.looked(wants)
        fences = [lease.fence for lease, _ in outcomes]
        # The common outcome needs no words, unless a lease is there twice: then their order counts.
        short = len(set(fences)) == len(fences)
        said = [None if short and outcome == _DONE else _told(outcome) for _, outcome in outcomes]
        ranks, places = self._floors.of(wants)
        span_in_us = span_us(span)
        header, *rows = await self._write(
            "exchange",
            self._at(),
            fences or None,
            [lease.id for lease, _ in outcomes],
            said if any(said) else None,
            list(wants),
            list(wants.values()),
            ranks,
            places,
            sum(wants.values()) if limit is None else limit,
            span_in_us,
            holder,
            *self._keeps,
        )
        if any(said):
            self._hints.tell(_news(outcomes))
        self._kept_back.difference_update(wants)
        if rows and rows[-1]["ids"] is None:
            self._kept_back.update(wants)
            del rows[-1]
        self._floors.learn(wants, rows, limit)
        until = from_us(header["now_us"] + span_in_us)
        return Exchange(
            [outcomes[n - 1][0] for n in header["lost"] or ()],
            [lease for row in rows for lease in _leases(row, until)],
        )

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        rows = await self._write(
            "renew",
            self._at(),
            [lease.fence for lease in leases],
            [lease.id for lease in leases],
            span_us(span),
        )
        renewed = {
            (leases[n - 1].id, leases[n - 1].fence): Renewal(from_us(until_us), asked)
            for n, until_us, asked in rows
        }
        lost = Renewal(None)
        return [renewed.get((lease.id, lease.fence), lost) for lease in leases]

    async def note(self, notes: Sequence[Note]) -> None:
        said = [
            {
                "fence": note.lease.fence,
                "id": note.lease.id,
                "progress": None if note.progress is None else storable(_text(note.progress)),
                "lines": [storable(line) for line in note.lines],
            }
            for note in notes
        ]
        await self._write("note", _text(said))

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        [row] = await self._write("sweep", self._at(), limit, *self._keeps, self._retention.dead_max, by)
        if row["look"]:
            await self._warn_of_old_transactions()
        now_us = row["now_us"]
        return Swept(
            row["promoted"],
            row["reaped"],
            row["expired"],
            row["removed"],
            span_until(row["next_us"], now_us),
            span_until(row["again_us"], now_us),
            row["schedules_due"],
        )

    async def _warn_of_old_transactions(self) -> None:
        try:
            for complaint in await self.complaints():
                log.warning("%s", complaint)
        except SkepError as error:  # the sweep has been made, and stands
            log.debug("nobody looked for old transactions: %s", error)

    async def complaints(self) -> list[str]:
        rows = await self._read("old_transactions", OLD_TRANSACTION)
        return [_complaint(**row) for row in rows]

    # --- Ledger --------------------------------------------------------------------------

    async def now(self) -> datetime:
        if self._clock is not None:
            return from_us(self._clock.now_us())
        [row] = await self._read("now")
        return from_us(row[0])

    async def queues(self) -> dict[str, Counts]:
        found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for queue, what, n in await self._read("queues", self._at()):
            found[queue][what] += n
        return {queue: _counts(found[queue]) for queue in sorted(found) if "put" in found[queue]}

    async def get(self, job_id: str) -> Record | None:
        for row in await self._read("get", job_id):
            return _record(row)
        return None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        rows = await self._read(
            "find",
            self._at(),
            after or 0,
            where.queue,
            where.task,
            where.batch,
            where.state,
            where.reason,
            where.scheduled,
            limit + 1,
        )
        page = rows[:limit]
        return Page([_record(row) for row in page], page[-1]["seq"] if page and len(rows) > limit else None)

    async def position(self, job_id: str) -> int | None:
        for row in await self._read("position", self._at(), job_id):
            return int(row[0])
        return None

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return _numbered(job_ids, await self._write("cancel", self._at(), list(job_ids), *self._keeps))

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return bool(await self._answer("reschedule", self._at(), job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return _numbered(job_ids, await self._write("replay", self._at(), list(job_ids)))

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return _numbered(job_ids, await self._write("delete", list(job_ids)))

    async def drop(self, queue: str) -> int:
        return int(await self._answer("drop", self._at(), queue, *self._keeps))

    async def add_rule(self, rule: Rule) -> bool:
        return bool(await self._answer("add_rule", rule.kind, rule.scope, rule.name, rule.n))

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return bool(await self._answer("remove_rule", kind, scope, name))

    async def rules(self) -> list[Rule]:
        return [
            Rule(RuleKind(kind), Scope(scope), name, n) for kind, scope, name, n in await self._read("rules")
        ]

    async def batch(self, batch: str) -> BatchStatus | None:
        for row in await self._read("batches", batch, None, 1):
            return _status(row)
        return None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        return [_status(row) for row in await self._read("batches", None, after, limit)]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        return [
            Member(number, job_id, State(state), result, reason)
            for number, job_id, state, result, reason in await self._read("members", batch, after, limit)
        ]

    async def delete_batch(self, batch: str) -> bool:
        return bool(await self._answer("delete_batch", self._at(), batch, *self._keeps))

    async def put_schedule(self, schedule: Schedule, next_at: datetime) -> None:
        await self._write(
            "put_schedule", schedule.name, _text(schedule), _text(schedule.timing), to_us(next_at)
        )

    async def schedules(self, *, due: bool = False) -> list[ScheduleRecord]:
        return [
            ScheduleRecord(
                schedule=_schedule.decode(row["body"]),
                next_at=from_us(row["next_us"]),
                last_at=_moment(row["last_us"]),
                paused=row["paused"],
            )
            for row in await self._read("schedules", self._at(), due)
        ]

    async def pause_schedule(self, name: str, paused: bool) -> bool:
        return bool(await self._answer("pause_schedule", name, paused))

    async def remove_schedule(self, name: str) -> bool:
        return bool(await self._answer("remove_schedule", name))

    async def fire(self, name: str, instant: datetime, job: Job | None, next_at: datetime) -> bool:
        draft = None if job is None else _text(_draft(job))
        return bool(await self._answer("fire", self._at(), name, to_us(instant), draft, to_us(next_at)))

    # --- Hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return self._hints.hears and not self._kept_back  # nobody tells that a limit leaves room again

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        self._link.check_usable()
        self._hints.listen(queues, self._at)
        return await self._waiters.wait(queues, timeout)


class _Floors:
    """Below which places of each queue there was nothing left when we last took something.

    Only a hint that keeps claims from walking over what is gone, and only for a moment: a job that was put
    in a long transaction has a place below the floor when it appears.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._since = 0.0

    def of(self, queues: Iterable[str]) -> tuple[list[int | None], list[int | None]]:
        now = time.monotonic()
        if now - self._since > FLOOR_FOR:
            self._known.clear()
            self._since = now
        floors = [self._known.get(queue, (None, None)) for queue in queues]
        return [rank for rank, _ in floors], [place for _, place in floors]

    def learn(self, wants: Mapping[str, int], rows: Sequence[Row], limit: int | None) -> None:
        """From the answer to a claim.  One that came back short has seen the end of the line: no floor."""
        taken: Counter[str] = Counter()
        for row in rows:
            queue, place = row["queue"], row["pos"]
            taken[queue] += len(row["ids"])
            if place > 0:
                self._known[queue] = (row["rank"], place)
        left = sum(wants.values()) if limit is None else limit
        for queue, want in wants.items():
            if taken[queue] < min(want, left):
                self._known.pop(queue, None)
            left -= taken[queue]


# --- what is sent ------------------------------------------------------------------------


def _is_plain(job: Job) -> bool:
    """Whether it can be put in arrays: due now, remembered by nobody, alone."""
    return job.batch is None and _is_simple(job)


def _is_simple(job: Job) -> bool:
    """Whether it has nothing special, but may be a member of a batch."""
    return not (
        job.delay_ms
        or job.chosen
        or job.due_at is not None
        or job.unique is not None
        or job.key is not None
        or job.expires_at is not None
        or job.expires_in_ms is not None
    )


def _counts(found: Counter[str]) -> Counts:
    """Those in line are what is left of all that were put, so that nobody has to count them (I8)."""
    elsewhere = found["scheduled"] + found["held"] + found["running"]
    ended = found["done"] + found["dead"] + found["cancelled"]
    del found["due"]  # they are as good as in line
    return Counts(**found, ready=found["put"] - found["deleted"] - elsewhere - ended)


def _facts_of_put(jobs: Sequence[Job]) -> str | None:
    """What arrays do not say of these jobs.  The pieces of a batch are put as quickly as plain jobs."""
    if not all(map(_is_simple, jobs)):
        return _text(_facts_of_all(jobs))
    batches, numbers = {job.batch for job in jobs}, [job.member for job in jobs]
    if batches <= {None}:
        return None
    if len(batches) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return _text({"batch": jobs[0].batch, "first": numbers[0]})
    return _text(_facts_of_all(jobs))


def _facts_of_all(jobs: Sequence[Job]) -> dict[str, object]:
    """What is not plain about some jobs, and whether two of them want the same id or key."""
    keys = [job.unique for job in jobs if job.unique is not None]
    alike = len(set(keys)) < len(keys) or len({job.id for job in jobs}) < len(jobs)
    return {"alike": alike, "each": [_facts(job) for job in jobs]}


def _facts(job: Job) -> dict[str, object]:
    """What is not plain about a job."""
    facts: dict[str, object] = {}
    if job.delay_ms:
        facts["delay_us"] = job.delay_ms * 1000
    if job.due_at is not None:
        facts["due_us"] = to_us(job.due_at)
    if job.expires_at is not None:
        facts["expires_us"] = to_us(job.expires_at)
    if job.expires_in_ms is not None:
        facts["expires_in_us"] = job.expires_in_ms * 1000
    if job.chosen:
        facts["chosen"] = True
    if job.unique is not None:
        facts["unique"], facts["unique_until"] = job.unique, job.unique_until
    if job.key is not None:
        facts["key"] = job.key
    if job.batch is not None:
        facts["batch"] = job.batch
    if job.member:
        facts["member"] = job.member
    return facts


def _draft(job: Job) -> dict[str, object]:
    """A job that follows from something else."""
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "body": b64encode(wire.encode(job)).decode(),
        "priority": job.priority,
        "max_crashes": job.max_crashes,
        **_facts(job),
    }


def _batch_draft(batch: Batch) -> dict[str, object]:
    calls = {
        "on_failed": batch.on_failed,
        "on_succeeded": batch.on_succeeded,
        "on_finished": batch.on_finished,
    }
    return {
        "id": batch.id,
        "body": _text(batch),
        "calls": {when: _draft(job) for when, job in calls.items() if job is not None},
        "linger_us": batch.linger_ms * 1000,
        "open_us": batch.open_for_ms * 1000,
        "parent": batch.parent,
        "member": batch.member,
    }


def _told(outcome: Outcome) -> str:
    match outcome:
        case Done(result=result, keep=keep, emit=emit):
            facts: dict[str, object] = {"kind": "done", "keep_us": None if keep is None else span_us(keep)}
            if result is not None:
                facts["result"] = b64encode(result).decode()
            if emit:
                facts["emit"] = _drafts(emit)
        case Retry(delay=delay, error=error, queue=queue):
            note = f"{error.type}: {error.message}"[:NOTE_MAX] if error else ""
            facts = {
                "kind": "retry",
                "delay_us": span_us(delay),
                "error": _error_text(error),
                "queue": queue,
                "note": storable(note),
            }
        case Dead(reason=reason, error=error, keep=keep, emit=emit):
            keep_us = None if keep is None else span_us(keep)
            facts = {
                "kind": "dead",
                "reason": storable(reason),
                "error": _error_text(error),
                "keep_us": keep_us,
            }
            if emit:
                facts["emit"] = _drafts(emit)
        case Snooze(delay=delay):
            facts = {"kind": "snooze", "delay_us": span_us(delay)}
        case Release():
            facts = {"kind": "release"}
        case Cancelled(error=error):
            facts = {"kind": "cancelled", "error": _error_text(error)}
        case Broken(error=error):
            facts = {"kind": "broken", "error": _error_text(error)}
    return _text(facts)


def _drafts(jobs: Sequence[Job]) -> list[object]:
    return [_draft(job) for job in jobs]


def _error_text(error: Error | None) -> str | None:
    return None if error is None else _text(error)


def _news(outcomes: Sequence[tuple[Lease, Outcome]]) -> dict[str, float]:
    """The queues to which these outcomes bring something, and in how many seconds."""
    news: list[tuple[str, float]] = []
    for lease, outcome in outcomes:
        match outcome:
            case Done(emit=emit) | Dead(emit=emit):
                news += [(job.queue, job.delay_ms / 1000) for job in emit]
            case Retry(delay=delay, queue=queue):
                news.append((queue or lease.queue, delay.total_seconds()))
            case Snooze(delay=delay):
                news.append((lease.queue, delay.total_seconds()))
            case Release():
                news.append((lease.queue, 0.0))
    return soonest(news)


def _text(value: Any) -> str:
    return _json.encode(value).decode()


# --- what is answered --------------------------------------------------------------------


def _receipts(jobs: Sequence[Job], refused: Sequence[Row]) -> list[Receipt]:
    receipts = [Receipt(job.id, True) for job in jobs]
    for n, there in refused:
        receipts[n - 1] = Receipt(there, False)
    return receipts


def _leases(row: Row, until: datetime) -> list[Lease]:
    """Those of one row of an answer, which are of one queue."""
    queue, number = row["queue"], row["number"]
    moments = {us: from_us(us) for us in set(row["puts_us"])}  # jobs that were put together share one
    if number is not None:
        batch = row["batches"][0] if row["batches"] else None
        return [
            Lease(job_id, fence, task, queue, body, 1, 0, 0, until, moments[put_us], batch)
            for fence, (job_id, task, body, put_us) in enumerate(
                zip(row["ids"], row["tasks"], row["bodies"], row["puts_us"], strict=True), number + 1
            )
        ]
    columns = ("ids", "fences", "tasks", "bodies", "attempts", "failures", "crashes", "puts_us", "batches")
    return [
        Lease(job_id, fence, task, queue, body, attempt, failures, crashes, until, moments[put_us], batch)
        for job_id, fence, task, body, attempt, failures, crashes, put_us, batch in zip(
            *(row[name] for name in columns), strict=True
        )
    ]


def _numbered(asked: Sequence[str], rows: Sequence[Row]) -> list[bool]:
    numbers = {row[0] for row in rows}
    return [n in numbers for n in range(1, len(asked) + 1)]


def _moment(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def _record(row: Row) -> Record:
    state = State(row["stands"])
    history = msgspec.json.decode(row["history"]) if row["history"] else ()
    return Record(
        id=row["id"],
        task=row["task"],
        queue=row["queue"],
        state=state,
        body=row["body"],
        priority=-row["rank"],
        put_at=from_us(row["put_us"]),
        due_at=from_us(row["due_us"]),
        expires_at=_moment(row["expires_us"]),
        attempts=row["attempts"],
        failures=row["failures"],
        crashes=row["crashes"],
        fence=row["fence"] or 0,
        holder=row["holder"],
        started_at=_moment(row["started_us"]),
        lease_until=_moment(row["until_us"]),
        cancel_requested=bool(row["cancel"]),
        ended_at=_moment(row["ended_us"]),
        keep_until=_moment(row["keep_us"]),
        reason=row["reason"],
        error=_error.decode(row["error"]) if row["error"] else None,
        result=row["result"],
        unique=row["unique_key"],
        key=row["limit_key"],
        batch=row["batch"],
        member=row["member"],
        progress=_progress.decode(row["progress"]) if row["progress"] else None,
        log=tuple(row["log"] or ()),
        history=tuple(Event(from_us(us), *rest) for us, *rest in history),
    )


def _status(row: Row) -> BatchStatus:
    total = row["live"] + row["done"] + row["dead"] + row["cancelled"]
    counts = {"done": row["done"], "dead": row["dead"], "cancelled": row["cancelled"]}
    return BatchStatus(
        id=row["id"],
        state=batch_state(sealed=row["sealed"], total=total, **counts),
        sealed=row["sealed"],
        total=total,
        enqueued=row["enqueued"],
        retrying=row["retrying"],
        running=row["running"],
        **counts,
        created_at=from_us(row["created_us"]),
        finished_at=_moment(row["finished_us"]),
        keep_until=_moment(row["keep_us"]),
        parent=row["parent"],
        note=_batch.decode(row["body"]).note,
    )


def _complaint(what: str, name: str, seconds: float, application: str, state: str) -> str:
    ending = f"ROLLBACK PREPARED '{name}'" if state == "prepared" else f"SELECT pg_terminate_backend({name})"
    return (
        f"a {what} is {seconds:.0f} s old ({application or 'no name'}, {state}) and keeps what is gone "
        f"from being removed, so that everything slows down: end it ({ending}), or set "
        f"idle_in_transaction_session_timeout"
    )


def _durability(settings: Mapping[str, str]) -> Durability:
    commit = settings["synchronous_commit"]
    if settings["fsync"] != "on" or commit == "off":
        return Durability.PROCESS
    copied = settings["synchronous_standby_names"] and commit != "local"
    return Durability.NODE if copied else Durability.POWER


_LOST_RACES = (
    asyncpg.UniqueViolationError,
    asyncpg.DuplicateSchemaError,
    asyncpg.DuplicateTableError,
    asyncpg.DuplicateObjectError,
    asyncpg.DeadlockDetectedError,
)


def _refusal(refused: Refused) -> SkepError:
    match refused.code:
        case "SK001":
            return UnknownBatch(refused.detail)
        case "SK002":
            return BatchSealed(refused.detail)
        case "SK003":
            facts = msgspec.json.decode(refused.detail)
            return QueueFull(facts["queue"], facts["limit"])
        case "SK004":
            return BadSetting(
                f"this connection leads to another installation of skep, in database {refused.detail!r}: "
                f"give one to the database that the app was made with"
            )
        case code:
            return EngineUnavailable(f"the database refused with {code}: {refused.detail}")


def from_url(address: Address, clock: Clock | None) -> PostgresBroker:
    """`postgresql://user@host/database?schema=skep`; what is not ours of the options goes to the driver."""
    ours = {name: address.options.pop(name) for name in OPTIONS if name in address.options}
    parts = urlsplit(address.url)
    url = urlunsplit(parts._replace(query=urlencode(address.options)))
    return PostgresBroker(
        url,
        clock=clock,
        schema=ours.get("schema", SCHEMA),
        patience=ours.get("patience", "30s"),
        listen=ours.get("listen"),
        prepare=None if "prepare" not in ours else ours["prepare"] not in ("0", "no", "false"),
        transactions=_number("transactions", ours.get("transactions", str(TRANSACTIONS))),
    )


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadSetting(f"{name}={text!r} is no whole number") from None


OPTIONS = ("schema", "patience", "listen", "prepare", "transactions")

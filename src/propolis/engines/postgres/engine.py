"""The PostgreSQL engine: a schema of tables and functions, any number of workers, no other process.

Tables are in sql/tables, functions in sql/functions, the statements that call them in sql/statements.sql.
Each verb is one statement: one round trip and one commit, whatever follows from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Self, TypeVar, Unpack

from msgspec.structs import astuple

from propolis.core import wire
from propolis.core.batch import Batch, BatchStatus
from propolis.core.clock import Clock, from_us, span_until, span_us, to_us
from propolis.core.duration import Duration, duration
from propolis.core.envelope import Envelope, is_plain
from propolis.core.job import JobInfo, Lease, Member, Outcome, State
from propolis.core.limits import rate_in, too_many_prefixes
from propolis.core.protocols import (
    COUNTED,
    KNOWN_FOR,
    LIMIT_SCOPES,
    MAX_PREFIXES,
    Counts,
    Durability,
    Exchange,
    Filter,
    LeaseTerms,
    Note,
    Page,
    Receipt,
    Renewal,
    Rule,
    RuleKind,
    Scope,
    Swept,
    Tokens,
)
from propolis.core.records import Read, ReadOptions, Swap, Swapped, check_read, check_swaps
from propolis.core.transitions import RETENTION, Retention
from propolis.engines.address import Address
from propolis.engines.postgres.answers import (
    batch_status,
    claimed,
    complaint_of,
    counts_of,
    durability_of,
    flags_of,
    holding_of,
    identity_of,
    job_info,
    named,
    page_of,
    place_of,
    refusal_of,
    renewal_of,
    sound_rules,
)
from propolis.engines.postgres.callers import Caller, caller_of
from propolis.engines.postgres.client import (
    LOCK_WITHIN,
    Connection,
    PostgresLink,
    Row,
    SchemaRefused,
    is_of_data,
    session_of,
)
from propolis.engines.postgres.drafts import (
    batch_draft,
    draft_of,
    extras_of_all,
    extras_of_put,
    news_of,
    note_draft,
    outcome_text,
    outcome_texts,
    rule_args,
    text_of,
)
from propolis.engines.postgres.feeds import PostgresFeeds
from propolis.engines.postgres.floors import Floors
from propolis.engines.postgres.hints import Notifications, seconds_until, seconds_until_over, soonest
from propolis.engines.postgres.lending import LentTransaction, lending
from propolis.engines.postgres.migration import Installer
from propolis.engines.postgres.records import answers_of, read_of, swaps_text
from propolis.engines.postgres.schema import SCHEMA, check_name, in_schema, script, set_of
from propolis.engines.shared.from_exchange import ClaimTerms, FromExchange, claim_of, written_down
from propolis.engines.shared.giving_back import all_given_back, gives_back
from propolis.engines.shared.receipts import all_created_but
from propolis.engines.shared.statements import load_statements
from propolis.engines.shared.waiters import Waiters
from propolis.errors import BadSetting, Busy, EngineError, PropolisError

log = logging.getLogger("propolis.postgres")
T = TypeVar("T")

OLDEST_SERVER = 140000
HELD_LONG = 5.0  # seconds after which whoever holds rows of ours is complained about
SWEEP_PATIENT_FOR = 1.0  # seconds until one has a connection of its own
OLD_TRANSACTION = 60.0  # seconds after which one that keeps VACUUM waiting is complained about
FEW = 10  # jobs that are put one by one in the transaction of a caller: the server then plans less
TRANSACTIONS = 10  # connections lent to running jobs, per event loop

_ISOLATION, _READ_COMMITTED = "default_transaction_isolation", "read committed"
_STATEMENTS = load_statements("postgres")


class PostgresEngine(FromExchange, PostgresFeeds):
    """The whole contract in one schema of a PostgreSQL database, 14 or newer.

    The time is the server's; a clock is for tests.  `listen` is another URL for the connection that waits for
    notifications, where `url` leads through a pooler that cannot pass them on.  `transactions` is how many
    connections are lent to running jobs.  With `migrate` an open also changes tables that are there.
    """

    limits = LIMIT_SCOPES

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
        migrate: bool = False,
    ) -> None:
        if transactions < 1:
            raise BadSetting(f"transactions={transactions}: at least one connection is lent to jobs")
        check_name(schema)
        seconds = duration(patience).total_seconds()
        self._link = PostgresLink(url, patience=seconds, prepare=prepare, lock_within=LOCK_WITHIN)
        self._listen_link = PostgresLink(listen or url, patience=seconds, prepare=False)
        self._lending_link = PostgresLink(
            url, patience=seconds, prepare=prepare, max_connections=transactions
        )
        self._schema = schema
        self._migrates = migrate
        self._sql: dict[str, str] = {}
        self._use(set_of(schema))
        self._clock = clock
        self._retention = retention
        self._durability = Durability.PROCESS
        self._installation = ""
        self._waiters = Waiters()
        self._floors = Floors()
        self._later: set[tuple[str, int, str]] = set()  # leases whose outcomes want what a stranger holds
        self._kept_back: set[str] = set()  # queues in which a limit does so, at the last claim
        self._hints = Notifications(self._link, self._listen_link, self._sql, self._waiters)
        self._installer = Installer(self._link, self._sql, schema)
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

    @property
    def function_set(self) -> str:
        """Which functions it calls: shown with each worker."""
        return set_of(self._schema)

    def script(self) -> str:
        return script(self._schema)

    async def open(self) -> Self:
        if self._link.open():
            await self._open(self._prepare)
        return self

    async def _prepare(self) -> None:
        await self._installer.install(migrates=self._migrates)
        await self._installer.check_rights()

    async def open_to_look(self) -> Self:
        if self._link.open():
            self._use(await self._open(self._installer.look))
        return self

    async def install(self, *, prune: bool = False) -> list[str]:
        self._link.open()
        done = await self._open(partial(self._installer.install, migrates=True, prune=prune))
        await self.close()
        return done

    def _use(self, functions: str) -> None:
        """The functions of this set, in every statement."""
        self._sql.update(
            {name: in_schema(text, self._schema, functions) for name, text in _STATEMENTS.items()}
        )

    async def _open(self, prepare: Callable[[], Awaitable[T]]) -> T:
        self._listen_link.open()
        self._lending_link.open()
        try:
            if await self._link.look_for_pooler():
                log.info("%s is behind a pooler: statements are not prepared", self._link.shown)
            self._lending_link.named = self._link.named
            settings = {row["name"]: row["setting"] for row in await self._link.read(self._sql["settings"])}
            if int(settings["server_version_num"]) < OLDEST_SERVER:
                raise EngineError("this PostgreSQL is too old: propolis needs 14 or newer")
            self._durability = durability_of(settings)
            if settings[_ISOLATION] != _READ_COMMITTED:  # in a verb each statement must see what came before
                await self._link.insist(_ISOLATION, _READ_COMMITTED)
            done = await prepare()
            [(self._installation, self._hints.channel)] = await self._read("installation")
        except BaseException:
            await self.close()
            raise
        return done

    async def close(self) -> None:
        await all_given_back(self)
        self._waiters.wake()
        self._hints.feed_waiters.wake_waiting()
        await self._hints.close()
        await self._listen_link.close()
        await self._lending_link.close()
        await self._link.close()

    def _at(self) -> int | None:
        return None if self._clock is None else self._clock.now_us()

    async def _write(self, statement: str, *args: object) -> list[Row]:
        try:
            return await self._link.write(self._sql[statement], *args)
        except SchemaRefused as refused:
            raise refusal_of(refused) from refused

    async def _read(self, statement: str, *args: object) -> list[Row]:
        return await self._link.read(self._sql[statement], *args)

    async def _answer(self, statement: str, *args: object) -> Any:
        rows = await self._write(statement, *args)
        return rows[0][0] if rows else None

    # --- jobs come in and go out ---------------------------------------------------------

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        if not jobs and token is None:
            self._link.check_usable()
            return []
        return await self._put(jobs, token, None, seal=False)

    async def put_batch(
        self, batch: Batch, jobs: Sequence[Envelope] = (), *, seal: bool = True, token: str | None = None
    ) -> list[Receipt]:
        return await self._put(jobs, token, batch, seal=seal)

    async def _put(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        if batch is None and len(jobs) == 1 and is_plain(jobs[0]):
            return [await self._put_one(jobs[0], token)]
        args = self._put_args(jobs, token, batch, seal=seal)
        news = soonest((job.queue, self._seconds_until_due(job)) for job in jobs)
        if payloads := self._hints.along(news):
            rows = await self._write("put_and_notify", *args, self._hints.channel, payloads)
            self._hints.wake(news)
        else:
            rows = await self._write("put", *args)
            self._hints.announce(news)
        return all_created_but(jobs, rows)

    async def _put_one(self, job: Envelope, token: str | None) -> Receipt:
        """As most jobs are: plain, and alone."""
        body = wire.encode(job)
        args = (self._at(), job.id, job.task, job.queue, job.priority, job.max_crashes, body, token)
        news = {job.queue: 0.0}
        if payloads := self._hints.along(news):
            [row] = await self._write("put_one_and_notify", *args, self._hints.channel, *payloads)
            self._hints.wake(news)
        else:
            [row] = await self._write("put_one", *args)
            self._hints.announce(news)
        return Receipt(job.id, row[0])

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        await self._write("forget_tokens", tokens)

    def _seconds_until_due(self, job: Envelope) -> float:
        """By our own clock, since it is only for a hint."""
        return job.delay_ms / 1000 if job.due_at is None else seconds_until(job.due_at, self._clock)

    async def put_in(
        self,
        tx: Any,
        jobs: Sequence[Envelope],
        *,
        token: str | None = None,
        batch: Batch | None = None,
        seal: bool = True,
    ) -> list[Receipt]:
        """Put inside the caller's own transaction: the jobs appear if and only if it commits.

        Idle workers are notified at the commit where the caller's library announces it (sessions of
        SQLAlchemy, Django), otherwise by the next sweep.  A notification inside of the transaction would make
        its commit wait for all others that notify.
        """
        caller = caller_of(tx)
        call = self._call(caller, jobs, token, batch, seal=seal)
        try:
            rows = await caller.afetch(self._sql["put_called"], call)
        except SchemaRefused as refused:
            raise refusal_of(refused) from refused
        except Busy as busy:
            found = await self._read("holders", self._schema, LOCK_WITHIN)
            raise Busy(self._link.shown, {row["pid"]: session_of(*row[:5]) for row in found}) from busy
        return self._put_by(caller, jobs, rows)

    def put_in_now(
        self,
        tx: Any,
        jobs: Sequence[Envelope],
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
        except SchemaRefused as refused:
            raise refusal_of(refused) from refused
        return self._put_by(caller, jobs, rows)

    def _call(
        self, caller: Caller, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> str:
        """A put as one text."""
        self._link.check_usable()
        return text_of(
            {
                "installation": self._installation,
                "at": self._at(),
                "drafts": [draft_of(job) for job in jobs],
                "extras": self._extras_of_call(jobs),
                "announced": caller.announces_commits,
                "token": token,
                "batch": None if batch is None else batch_draft(batch),
                "seal": seal,
                "dead_us": self._keeps[0],
                "cancelled_us": self._keeps[1],
            }
        )

    def _extras_of_call(self, jobs: Sequence[Envelope]) -> dict[str, object] | None:
        """A few jobs go one by one: in a session that has not put before, planning for sets costs more."""
        if len(jobs) <= FEW:
            return {**extras_of_all(jobs), "alike": True}
        return None if all(map(is_plain, jobs)) else extras_of_all(jobs)

    def _put_by(self, caller: Caller, jobs: Sequence[Envelope], rows: Sequence[Row]) -> list[Receipt]:
        receipts = all_created_but(jobs, rows)
        new = [job for job, receipt in zip(jobs, receipts, strict=True) if receipt.created]
        if news := soonest((job.queue, self._seconds_until_due(job)) for job in new):
            caller.after_commit(partial(self._announce, news))
        return receipts

    def _announce(self, news: Mapping[str, float]) -> None:
        """Something was committed, in whatever thread this is."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self._link.call_soon(self._hints.announce, news)
        else:
            self._hints.announce(news)

    def _put_args(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> tuple[object, ...]:
        return (
            self._at(),
            [job.id for job in jobs],
            [job.task for job in jobs],
            [job.queue for job in jobs],
            [job.priority for job in jobs],
            [job.max_crashes for job in jobs],
            wire.encode_all(jobs),
            extras_of_put(jobs),
            token,
            None if batch is None else text_of(batch_draft(batch)),
            seal,
            *self._keeps,
        )

    def transaction(self) -> AbstractAsyncContextManager[LentTransaction]:
        """On connections that nothing else uses, so that jobs and the engine never wait for one another."""
        return lending(self._lending_link, self._settle_lent, self._committed_lent)

    async def _settle_lent(self, connection: Connection, lease: Lease, outcome: Outcome) -> bool:
        return bool(
            await connection.fetchval(
                self._sql["settle_lent"],
                self._at(),
                lease.place,
                lease.id,
                lease.fence,
                lease.holder,
                outcome_text(outcome),
                *self._keeps,
            )
        )

    def _committed_lent(self, lease: Lease, outcome: Outcome) -> None:
        self._hints.announce(news_of([(lease, outcome)]))

    async def seal(self, batch: str) -> bool:
        return bool(await self._answer("seal", self._at(), batch, *self._keeps))

    @gives_back
    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        claim = claim_of(wants, terms)
        while True:
            try:
                return await self._now_or_apart(outcomes, claim)
            except EngineError as error:
                ids = [lease.id for lease, _ in outcomes]
                if not is_of_data(error.__cause__) or not await self._shelve_unsound(ids, list(wants)):
                    raise

    async def _shelve_unsound(self, ids: list[str], queues: list[str]) -> bool:
        """Whether there were jobs over which an exchange has failed (L7); what it did stands all the same."""
        try:
            shelved = await self._answer("shelve_unsound", self._at(), ids, queues, self._keeps[0])
        except EngineError as error:
            log.warning("jobs that may be damaged could not be shelved: %s", error)
            return False
        if shelved:
            log.error("jobs that hold numbers which no job can have are broken: %s", ", ".join(shelved))
        return bool(shelved)

    async def _now_or_apart(self, outcomes: Sequence[tuple[Lease, Outcome]], claim: ClaimTerms) -> Exchange:
        if not self._later or not any(identity_of(lease) in self._later for lease, _ in outcomes):
            try:
                return await self._exchange(outcomes, claim)
            except Busy as busy:
                if not outcomes:
                    raise
                log.warning("an outcome is recorded later: %s", busy)
        settled = await self._settle_apart(outcomes)
        try:
            leases = (await self._exchange((), claim)).leases if claim.wants else []
        except EngineError as error:  # what is settled stands
            log.warning("nothing was leased: %s", error)
            leases = []
        return Exchange(settled.lost, leases, settled.later)

    async def _settle_apart(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> Exchange:
        """One by one, those left alone that would wait for a stranger."""
        answer = await self._answer(
            "settle_apart",
            self._at(),
            *named([lease for lease, _ in outcomes]),
            await written_down(outcomes, lambda: outcome_texts(outcomes)),
            *self._keeps,
        )
        self._hints.announce(news_of(outcomes))
        settled = Exchange(
            [outcomes[n - 1][0] for n in answer if n > 0], [], [outcomes[-n - 1][0] for n in answer if n < 0]
        )
        self._later.difference_update(identity_of(lease) for lease, _ in outcomes)
        self._later.update(identity_of(lease) for lease in settled.later)
        return settled

    async def _exchange(self, outcomes: Sequence[tuple[Lease, Outcome]], claim: ClaimTerms) -> Exchange:
        wants, span, holder, limit, tasks = claim
        self._waiters.looked(wants)
        settled = [lease for lease, _ in outcomes]
        texts = await written_down(outcomes, lambda: outcome_texts(outcomes))
        span_in_us = span_us(span)
        header, *rows = await self._write(
            "exchange",
            self._at(),
            *named(settled),
            texts if any(texts) else None,
            list(wants),
            list(wants.values()),
            *self._floors.of(wants),
            list(tasks),
            limit,
            span_in_us,
            holder,
            *self._keeps,
        )
        if any(texts):
            self._hints.announce(news_of(outcomes))
        self._kept_back.difference_update(wants)
        if rows and rows[-1]["queue"] is None:
            self._kept_back.update(wants)
            if (token_us := rows.pop()["pos"]) is not None:
                seconds = (token_us - header["now_us"]) / 1_000_000
                self._hints.wake(dict.fromkeys(wants, seconds))
        self._floors.learn(wants, rows, limit, header["now_us"])
        until = from_us(header["now_us"] + span_in_us)
        leases, unreadable = claimed(rows, until, holder)
        if unreadable:
            await self._shelve_unsound(unreadable, [])
        return Exchange([settled[n - 1] for n in header["lost"] or ()], leases)

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        rows = await self._write(
            "renew",
            self._at(),
            *named(leases),
            span_us(span),
        )
        renewed = {identity_of(leases[n - 1]): renewal_of(until_us, asked) for n, until_us, asked in rows}
        lost = Renewal(None)
        return [renewed.get(identity_of(lease), lost) for lease in leases]

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        lost = await self._answer("note", self._at(), text_of([note_draft(note) for note in notes]))
        return [notes[n - 1].lease for n in sorted(lost)]

    async def sweep(self, *, limit: int = 1000, by: str | None = None) -> Swept:
        terms = (limit, *self._keeps, self._retention.dead_max, by)
        [row] = await self._link.write(self._sql["sweep"], self._at(), *terms, patient=SWEEP_PATIENT_FOR)
        if row["check_old"] or self._link.hindered:
            self._link.hindered = False
            await self._warn_of_old_transactions()
        now_us = row["now_us"]
        return Swept(
            row["promoted"],
            row["reaped"],
            row["expired"],
            row["removed"],
            span_until(row["next_us"], now_us),
            span_until(row["again_us"], now_us),
            tuple(row["records_due"]),
            ended=tuple(row["ended_ids"]),
            parked=tuple(zip(row["parked"][::2], row["parked"][1::2], strict=True)),
            nothing_ready=row["nothing_ready"],
        )

    async def _warn_of_old_transactions(self) -> None:
        try:
            for complaint in await self.complaints():
                log.warning("%s", complaint)
        except PropolisError as error:  # the sweep has been made, and stands
            log.debug("nobody searched for old transactions: %s", error)

    async def complaints(self) -> list[str]:
        holders = await self._read("holders", self._schema, HELD_LONG)
        rows = await self._read("old_transactions", OLD_TRANSACTION)
        return [*(holding_of(**row) for row in holders), *(complaint_of(**row) for row in rows)]

    async def repair(self, *, mend: bool) -> list[str]:
        return [row[0] for row in await self._write("repair", self._at(), mend, *self._keeps)]

    # --- what operators see and do -------------------------------------------------------

    async def now(self) -> datetime:
        if self._clock is not None:
            return from_us(self._clock.now_us())
        [row] = await self._read("now")
        return from_us(row[0])

    async def queues(self, *, limit: int = 1000, after: str | None = None) -> dict[str, Counts]:
        rows = await self._read("queues", self._at(), after, limit, COUNTED)
        return {row["queue"]: counts_of(row) for row in rows}

    async def get(self, job_id: str) -> JobInfo | None:
        for row in await self._read("get", job_id):
            return job_info(row)
        return None

    async def find(self, where: Filter, *, limit: int = 100, after: int | None = None) -> Page:
        if limit < 1:
            return Page([], None)
        filters = (where.queue, where.task, where.batch, where.state, where.reason, where.scheduled)
        place = astuple(place_of(after))
        return page_of(await self._read("find", self._at(), *place, *filters, limit, COUNTED))

    async def position(self, job_id: str) -> int | None:
        """At most `COUNTED`."""
        [(before,)] = await self._read("position", self._at(), job_id, COUNTED)
        return None if before is None else int(before)

    async def cancel(self, job_ids: Sequence[str]) -> list[bool]:
        return flags_of(job_ids, await self._write("cancel", self._at(), list(job_ids), *self._keeps))

    async def reschedule(self, job_id: str, due_at: datetime) -> bool:
        return bool(await self._answer("reschedule", self._at(), job_id, to_us(due_at)))

    async def replay(self, job_ids: Sequence[str]) -> list[bool]:
        return flags_of(job_ids, await self._write("replay", self._at(), list(job_ids)))

    async def delete(self, job_ids: Sequence[str]) -> list[bool]:
        return flags_of(job_ids, await self._write("delete", list(job_ids)))

    async def drop(self, queue: str) -> int:
        return int(await self._answer("drop", self._at(), queue, *self._keeps))

    async def add_rule(self, rule: Rule) -> bool:
        is_new = await self._answer("add_rule", self._at(), *rule_args(rule), MAX_PREFIXES)
        if is_new is None:
            raise too_many_prefixes(rule.name)
        if (seconds := seconds_until_over(rule, self._clock)) is not None:
            self._hints.announce({"": seconds})
        return bool(is_new)

    async def remove_rule(self, kind: RuleKind, scope: Scope, name: str) -> bool:
        return bool(await self._answer("remove_rule", self._at(), kind, scope, name))

    async def rules(self, *, limit: int = 1000, after: Rule | None = None) -> list[Rule]:
        place = (None, None, None) if after is None else (after.kind, after.scope, after.name)
        found: list[Rule] = []
        while (want := limit - len(found)) > 0:  # a page with fewer rules than were asked for is the last one
            rows = await self._read("rules", self._at(), want, *place)
            found += sound_rules(rows)
            if len(rows) < want:
                break
            place = tuple(rows[-1][name] for name in ("kind", "scope", "name"))
        return found

    async def tokens(self, rule: Rule, name: str) -> Tokens:
        rate, scope = rate_in(rule), Scope.KEY if rule.scope is Scope.TASK_KEY else rule.scope
        [(full_us, now_us)] = await self._read("tokens", self._at(), scope, name)
        return rate.tokens(full_us, now_us)

    async def batch(self, batch: str) -> BatchStatus | None:
        for row in await self._read("batches", batch, None, 1, COUNTED):
            return batch_status(row)
        return None

    async def batches(self, *, limit: int = 100, after: str | None = None) -> list[BatchStatus]:
        rows = await self._read("batches", None, after, limit, COUNTED)
        return [batch_status(row) for row in rows]

    async def members(self, batch: str, *, limit: int = 1000, after: int | None = None) -> list[Member]:
        return [
            Member(number, job_id, State(state), result, reason)
            for number, job_id, state, result, reason in await self._read("members", batch, after, limit)
        ]

    async def delete_batch(self, batch: str) -> bool:
        return bool(await self._answer("delete_batch", self._at(), batch, *self._keeps))

    # --- records -------------------------------------------------------------------------

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        check_swaps(swaps)
        answer = await self._answer("swap", self._at(), swaps_text(swaps), token, span_us(KNOWN_FOR))
        return answers_of(str(answer))

    async def records(self, kind: str, **which: Unpack[ReadOptions]) -> Read:
        names, after, due, newest, limit = check_read(kind, which)
        if names is not None:
            return read_of(kind, await self._read("records_named", self._at(), kind, list(names)), None)
        if due:
            return read_of(kind, await self._read("records_due", self._at(), kind, limit), None)
        statement, place = ("records_before", after) if newest else ("records_after", after or "")
        return read_of(kind, await self._read(statement, self._at(), kind, limit + 1, place), limit)

    # --- hints ---------------------------------------------------------------------------

    @property
    def hears(self) -> bool:
        return self._hints.hears and not self._kept_back  # nobody announces that a limit leaves room again

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        self._link.check_usable()
        self._hints.listen(queues, self._at)
        return await self._waiters.wait(queues, timeout)


def from_url(address: Address, clock: Clock | None) -> PostgresEngine:
    """`postgresql://user@host/database?schema=propolis`; options that are not ours go to the driver."""
    ours = address.options
    return PostgresEngine(
        address.without_options(*OPTIONS),
        clock=clock,
        schema=ours.get("schema", SCHEMA),
        patience=ours.get("patience", "30s"),
        listen=ours.get("listen"),
        prepare=None if "prepare" not in ours else ours["prepare"] not in ("0", "no", "false"),
        transactions=_number("transactions", ours.get("transactions", str(TRANSACTIONS))),
        migrate=_migrates(ours.get("migrate")),
    )


def _migrates(text: str | None) -> bool:
    if text not in (None, "auto"):
        raise BadSetting(f"migrate={text!r}: the only choice is 'auto'; without it `propolis init` migrates")
    return text is not None


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadSetting(f"{name}={text!r} is no whole number") from None


OPTIONS = ("schema", "patience", "listen", "prepare", "transactions", "migrate")

"""An engine and the model side by side: the same random calls to both, compared after every step.

`check_engine` is the entry.  A difference is raised as `Difference`, whose message says what differs
and lists the calls that lead to it, as few as Hypothesis could find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from msgspec import Raw
from msgspec.structs import asdict, replace

from propolis.core.batch import Batch, callback_id
from propolis.core.clock import MICROSECOND
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Cancelled,
    Dead,
    Done,
    JobInfo,
    Lease,
    Member,
    Outcome,
    Released,
    State,
)
from propolis.core.protocols import (
    Counts,
    Engine,
    Exchange,
    Filter,
    Note,
    Rule,
    RuleKind,
    Swept,
)
from propolis.errors import PropolisError
from propolis.testing.clock import FakeClock
from propolis.testing.engines.lives import live
from propolis.testing.engines.model.entries import ModelEntry, Refused
from propolis.testing.engines.model.model import NOW, Model
from propolis.testing.engines.samples import HOLDER
from propolis.testing.engines.small_world import (
    AGES,
    ALL,
    CALLBACK_QUEUE,
    DRAFT,
    DRAFTS,
    EVERYTHING,
    FILTERS,
    FOR_EVER_MS,
    KEYS,
    KNOWN_TASKS,
    LIMIT,
    LONG,
    PAYLOADS,
    PICK,
    QUEUES,
    RATES,
    RULES,
    SHAPE,
    SHORT,
    SPANS,
    STEPS,
    TASKS,
    TOKENS,
    TURNS,
    WANTS,
    BatchShape,
    Draft,
    Emits,
    Put,
)
from propolis.testing.value_texts import text_of

T = TypeVar("T")


class MadeCall(NamedTuple):
    """A call that was made, to be shown if it leads to a difference."""

    verb: str
    args: tuple[object, ...]
    options: dict[str, object]

    def __str__(self) -> str:
        options = [f"{name}={text_of(value)}" for name, value in self.options.items() if value is not None]
        return f"{self.verb}({', '.join([*map(text_of, self.args), *options])})"


class Difference(AssertionError):
    """The engine and the contract disagree: where, and the calls that show it."""


def check_engine(
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 200,
    steps: int = 50,
    seed: int | None = None,
    shrink: bool = True,
) -> None:
    """Hold an engine to the contract by `examples` random lives of `steps` steps each.

    `make` gives an engine on fresh storage, not yet open, that goes by the clock and keeps ended jobs
    for the default times.  Raises `Difference` for the first one found; without `shrink` at once,
    before looking for a shorter way to it.  A `seed` repeats the same lives.
    """

    live(lambda: EngineMachine(make), examples, steps, seed, shrink=shrink)


class EngineMachine(RuleBasedStateMachine):
    """The calls, and after each of them the comparison."""

    def __init__(self, make: Callable[[FakeClock], Engine]) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.model = Model(self.clock)
        self.calls: list[MadeCall] = []
        self.puts: list[Put] = []
        self.leases: list[Lease] = []
        self.batches: list[str] = []
        self.made = 0
        self.engine = make(self.clock)
        self.runner = asyncio.Runner()
        self._run(self.engine.open())

    def teardown(self) -> None:
        with self.runner:
            self._run(self.engine.close())

    # --- producers ---------------------------------------------------------------------------

    @initialize(drafts=st.lists(DRAFT, min_size=2, max_size=4), shape=SHAPE, token=st.sampled_from(TOKENS))
    def begin(self, drafts: list[Draft], shape: BatchShape, token: str | None) -> None:
        """Something to work with, whichever rules this life is allowed to use."""
        self._put(Put([self._job(draft) for draft in drafts], token))
        batch = self._batch(shape)
        self._put(Put(self._members(batch.id, drafts[:2]), "token-0", batch))
        self._lease(EVERYTHING, SHORT, 3)

    @rule(drafts=DRAFTS, token=st.sampled_from(TOKENS))
    def put(self, drafts: list[Draft], token: str | None) -> None:
        self._put(Put([self._job(draft) for draft in drafts], token))

    @rule(pick=PICK)
    def put_again(self, pick: int) -> None:
        """A call whose answer was lost is repeated."""
        self._put(_choose(pick // 2, self.puts[-12:])._replace(seal=pick % 2 == 0))

    @rule(shape=SHAPE, drafts=st.lists(DRAFT, max_size=3), sealed=st.booleans(), inside=PICK)
    def put_batch(self, shape: BatchShape, drafts: list[Draft], sealed: bool, inside: int) -> None:
        batch = self._batch(shape, self._some_parent(inside))
        self._put(Put(self._members(batch.id, drafts), None, batch, sealed))

    @rule(pick=PICK, drafts=st.lists(DRAFT, max_size=2))
    def grow_batch(self, pick: int, drafts: list[Draft]) -> None:
        if drafts:
            self._put(Put(self._members(self._some_batch(pick), drafts)))
        if not drafts or pick % 2:
            self._both("seal", self._some_batch(pick))

    # --- workers -----------------------------------------------------------------------------

    @rule(wants=st.sampled_from(WANTS), span=st.sampled_from(SPANS), limit=LIMIT, tasks=KNOWN_TASKS)
    def lease(
        self, wants: dict[str, int], span: timedelta, limit: int | None, tasks: tuple[str, ...]
    ) -> None:
        self._lease(wants, span, limit, tasks)

    @rule(turns=TURNS, empty_line_after=st.booleans())
    def settle(self, turns: list[tuple[int, Outcome | Emits]], empty_line_after: bool) -> None:
        if not self._running():
            self._lease(EVERYTHING, SHORT, 3)
        if self.leases:
            self._both("settle", self._outcomes(turns))
        if empty_line_after:
            self._empty_the_line()

    @precondition(lambda self: self.leases)
    @rule(
        turns=TURNS,
        wants=st.sampled_from(WANTS),
        span=st.sampled_from(SPANS),
        limit=LIMIT,
        tasks=KNOWN_TASKS,
    )
    def exchange(
        self,
        turns: list[tuple[int, Outcome | Emits]],
        wants: dict[str, int],
        span: timedelta,
        limit: int | None,
        tasks: tuple[str, ...],
    ) -> None:
        self._leave_no_doubt(wants, limit)
        outcomes = self._outcomes(turns)
        if self.model.keeps_back() and self.model.lets_expire(State.RUNNING):
            self._both("settle", outcomes)  # what comes back may be held, and has expired
            outcomes = []
            self._leave_no_doubt(wants, limit)
        answer = self._both("exchange", outcomes, wants, span=span, holder=HOLDER, limit=limit, tasks=tasks)
        self._learn(cast(Exchange, answer).leases)

    @precondition(lambda self: self.leases)
    @rule(picks=st.lists(PICK, min_size=1, max_size=2), span=st.sampled_from(SPANS), late=st.booleans())
    def renew(self, picks: list[int], span: timedelta, late: bool) -> None:
        """In time, or at the very moment at which it is too late."""
        leases = [self._some_lease(pick) for pick in picks]
        entry = self.model.entry(leases[0].id)
        if late and entry is not None and entry.lease_until is not None:
            self._arrive(entry.lease_until)
        else:
            self._advance(STEPS[0])
        self._both("renew", leases, span=span)

    # --- time --------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(pick=PICK, checkpoint=st.sampled_from([b"1", b"2", None]), drafts=st.lists(DRAFT, max_size=2))
    def note(self, pick: int, checkpoint: bytes | None, drafts: list[Draft]) -> None:
        lease, joined = self._some_lease(pick), [None, self._some_batch(pick // 3)][pick % 2]
        puts = self._emissions(lease, drafts, joined)
        self._both("note", [Note(lease, began=pick % 3 == 0, checkpoint=checkpoint, puts=puts)])

    @rule()
    def sweep(self) -> None:
        self._both("sweep")

    @rule(pick=PICK)
    def wait(self, pick: int) -> None:
        """A moment, or until something changes by itself, or until just before that."""
        moments = self._moments()[:3]
        if pick % 4 == 0 or not moments:
            self._advance(_choose(pick // 4, STEPS))
        else:
            self._arrive(_choose(pick // 16, moments) - (MICROSECOND if pick % 16 == 1 else NOW))

    @precondition(lambda self: self._running())
    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        """A lease is not renewed, and somebody notices."""
        until = _choose(pick, self._running()).lease_until
        assert until is not None
        self._arrive(until)
        self._both("sweep")

    # --- operators ---------------------------------------------------------------------------

    @rule(verb=st.sampled_from(["cancel", "cancel", "replay", "replay", "reschedule", "delete"]), pick=PICK)
    def change_job(self, verb: str, pick: int) -> None:
        match verb:
            case "cancel":
                self._both("cancel", [self._some_job(pick, State.READY, State.RUNNING)])
            case "replay":
                self._both("replay", [self._some_job(pick, State.DEAD)])
            case "delete":
                self._both("delete", [self._some_job(pick, State.DONE, State.DEAD, State.CANCELLED)])
            case "reschedule":
                due_at = self.clock.now + _choose(pick, [NOW, -SHORT, SHORT, LONG])
                self._both("reschedule", self._some_job(pick, State.READY), due_at)

    @rule(what=st.sampled_from(RULES), keep=st.booleans())
    def add_rule(self, what: Rule, keep: bool) -> None:
        """For a while, or until somebody removes it; and see what it lets through."""
        self._both("add_rule", what)
        if what.kind is RuleKind.CAP:
            self._put(Put([self._job(Draft(what.name, task, 0)) for task in TASKS]))
        else:
            self._lease(EVERYTHING, SHORT, None)
        if not keep:
            self._both("remove_rule", what.kind, what.scope, what.name)

    @rule(limits=st.lists(st.sampled_from(RATES), min_size=1, max_size=3), keep=st.booleans())
    def limit(self, limits: list[Rule], keep: bool) -> None:
        """Beside each other; and see what starts now, just before the next token comes, and then."""
        for what in limits:
            self._both("add_rule", what)
        drafts = [Draft(_choose(n, QUEUES), _choose(n // 2, TASKS), 0, name) for n, name in enumerate(KEYS)]
        self._put(Put([self._job(draft) for draft in drafts]))
        self._lease(EVERYTHING, LONG, None)
        if tokens_in := self.model.limits.tokens_in():
            for span in (min(tokens_in) - MICROSECOND, MICROSECOND):
                self._advance(span)
                self._lease(EVERYTHING, LONG, None)
        for what in () if keep else limits:
            self._both("remove_rule", what.kind, what.scope, what.name)

    @precondition(lambda self: self.model.rules)
    @rule(pick=PICK)
    def remove_rule(self, pick: int) -> None:
        what = _choose(pick, [*self.model.rules, *self.model.rules, RULES[0]])
        self._both("remove_rule", what.kind, what.scope, what.name)

    @rule(what=st.sampled_from(["grow old", "delete_batch", "drop"]), pick=PICK)
    def destroy(self, what: str, pick: int) -> None:
        match what:
            case "grow old":
                self._advance(_choose(pick, AGES))
                self._both("sweep")
            case "delete_batch":
                self._both("delete_batch", self._some_batch(pick))
            case "drop":
                self._both("drop", _choose(pick, [*QUEUES, CALLBACK_QUEUE, "none"]))

    # --- looking -----------------------------------------------------------------------------

    @rule(where=st.sampled_from(FILTERS), pick=PICK)
    def find(self, where: Filter, pick: int) -> None:
        expected = [info.id for info in self.model.infos(where)]
        self._compare(f"find({text_of(where)}), page by page", expected, self._run(self.feed_pages(where)))
        job_id = self._some_job(pick, *State)
        listed = self._run(self.engine.find(Filter(), limit=ALL)).jobs
        info = next((info for info in listed if info.id == job_id), None)
        self._compare(f"get({job_id!r}), where find gives it", info, self._run(self.engine.get(job_id)))
        if not self.model.lets_expire():
            self._both("position", self._some_job(pick, State.READY))

    async def feed_pages(self, where: Filter) -> list[str]:
        page = await self.engine.find(where, limit=3)
        found = [info.id for info in page.jobs]
        while page.after is not None:
            page = await self.engine.find(where, limit=3, after=page.after)
            found += [info.id for info in page.jobs]
        return found

    # --- the comparison ----------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        """I8, I9: what the engine shows is what the model shows."""
        seen, expected = self._run(self._seen()), self._expected()
        for what in expected | seen:
            self._compare(what, expected.get(what), seen.get(what))

    async def _seen(self) -> dict[str, object]:
        engine, now = self.engine, self.clock.now
        page = await engine.find(Filter(), limit=ALL)
        counts = {queue: found for queue, found in (await engine.queues()).items() if found.total}
        batches = await engine.batches()
        members = {batch.id: await engine.members(batch.id) for batch in batches}
        return {
            "the ids of all jobs, in the order of their puts": [info.id for info in page.jobs],
            **{f"job {info.id}": _promised(info, now) for info in page.jobs},
            **{f"the counts of queue {queue}": _sums(counts[queue]) for queue in counts},
            "put - deleted": {queue: found.put - found.deleted for queue, found in counts.items()},
            **{f"batch {batch.id}": asdict(batch) for batch in batches},
            **{f"the members of batch {batch}": _members(members[batch]) for batch in members},
            "the rules": sorted(map(repr, await engine.rules())),
        }

    def _expected(self) -> dict[str, object]:
        model, now = self.model, self.clock.now
        infos, counts, batches = model.infos(), model.counts(), model.batches()
        return {
            "the ids of all jobs, in the order of their puts": [info.id for info in infos],
            **{f"job {info.id}": _promised(info, now) for info in infos},
            **{f"the counts of queue {queue}": _sums(counts[queue]) for queue in counts},
            "put - deleted": {queue: found.total for queue, found in counts.items()},
            **{f"batch {batch.id}": asdict(batch) for batch in batches},
            **{f"the members of batch {batch.id}": _members(model.members(batch.id)) for batch in batches},
            "the rules": sorted(map(repr, model.rules)),
        }

    def _compare(self, what: str, expected: object, found: object) -> None:
        if expected == found:
            return
        if isinstance(expected, dict) and isinstance(found, dict):
            expected, found = _unequal(expected, found), _unequal(found, expected)
        shown = text_of if text_of(expected) != text_of(found) else repr
        raise Difference(
            f"{what} must be\n    {shown(expected)}\nand is\n    {shown(found)}\n"
            f"at {text_of(self.clock.now)}, after\n" + "\n".join(f"    {call}" for call in self.calls)
        )

    # --- calling -----------------------------------------------------------------------------

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.get_loop().run_until_complete(call)

    def _both(self, verb: str, *args: object, **options: object) -> object:
        """Call a verb of the model and of the engine, which must give the same answer."""
        call = MadeCall(verb, args, options)
        self.calls.append(call)
        expected, answer = self._predict(call), self._ask(call)
        if isinstance(expected, Refused):
            reasons = sorted(reason.__name__ for reason in expected.reasons)
            self._compare(f"{verb}: one of {reasons} raised", True, type(answer) in expected.reasons)
        else:
            found = self._without_early_look(expected, answer)
            self._compare(f"the answer to {verb}", _comparable(verb, expected), _comparable(verb, found))
        return answer

    def _without_early_look(self, expected: object, answer: object) -> object:
        """For a token that nobody waits for any more an engine may come back too early, and not too late."""
        if not isinstance(expected, Swept) or not isinstance(answer, Swept) or not self.model.limits.full_at:
            return answer
        early = answer.next_in is not None and NOW < answer.next_in < (expected.next_in or timedelta.max)
        return replace(answer, next_in=expected.next_in) if early else answer

    def _predict(self, call: MadeCall) -> object:
        try:
            return getattr(self.model, call.verb)(*call.args, **call.options)
        except Refused as refused:
            return refused

    def _ask(self, call: MadeCall) -> object:
        try:
            return self._run(getattr(self.engine, call.verb)(*call.args, **call.options))
        except PropolisError as error:
            return error
        except Exception as error:
            error.add_note("\n".join(["after", *map(str, self.calls)]))
            raise

    def _put(self, put: Put) -> None:
        self.puts.append(put)
        batch = put.batch
        jobs = [job for job in put.jobs if not self._is_second_member(job.batch, job.id)]
        if batch is None:
            self._both("put", jobs, token=put.token)
        elif batch.id in self.model.groups or not self._left_something(batch):
            self._both("put_batch", batch, jobs, seal=put.seal, token=put.token)

    def _left_something(self, batch: Batch) -> bool:
        """Of a batch that went before its members or parent: may it come back?  The contract is silent."""
        live = any(entry.job.batch == batch.id for entry in self.model.jobs if not entry.state.terminal)
        nested = any(group.batch.parent == batch.id for group in self.model.groups.values())
        return live or nested or self._is_second_member(batch.parent, batch.id)

    def _is_second_member(self, batch: str | None, member_id: str) -> bool:
        """A member that went and is put again under its id: does it count twice?  The contract is silent."""
        return self.model.counts_already(batch, member_id) and not self.model.uses(member_id)

    def _lease(
        self, wants: dict[str, int], span: timedelta, limit: int | None, tasks: tuple[str, ...] = ()
    ) -> list[Lease]:
        self._leave_no_doubt(wants, limit)
        answer = self._both("lease", wants, span=span, holder=HOLDER, limit=limit, tasks=tasks)
        leases = cast(list[Lease], answer)
        self._learn(leases)
        return leases

    def _empty_the_line(self) -> None:
        """Everything that can be leased, in order, and back to where it was."""
        leases = self._lease(EVERYTHING, LONG, None)
        self._both("settle", [(lease, Released()) for lease in leases])

    def _leave_no_doubt(self, wants: dict[str, int], limit: int | None) -> None:
        """Is a queue promoted whose turn does not come, a held job expired?  The contract is silent."""
        crosses = limit is not None and len(wants) > 1
        if crosses or (self.model.keeps_back() and self.model.lets_expire()):
            self._both("sweep")

    def _learn(self, leases: list[Lease]) -> None:
        self._compare("that fences only grow (I3)", True, self.model.learn(leases))
        self.leases = [*self.leases, *leases][-20:]

    def _arrive(self, moment: datetime) -> None:
        self._advance(max(NOW, moment - self.clock.now))

    def _advance(self, span: timedelta) -> None:
        self.clock.advance(span)
        self.calls.append(MadeCall("clock.advance", (span,), {}))
        if self.model.forgetting():
            self._both("sweep")

    # --- making ------------------------------------------------------------------------------

    def _job(self, draft: Draft, **fields_given: Any) -> Envelope:
        self.made += 1
        queue, task, priority, name, time = draft
        args = Raw(_choose(self.made, PAYLOADS))
        given = {"id": f"job-{self.made}", **name, **time, **fields_given}
        return Envelope(queue=queue, task=task, priority=priority, args=args, **given)

    def _members(self, batch: str, drafts: Iterable[Draft]) -> list[Envelope]:
        return [self._job(draft, batch=batch, member=self.made) for draft in drafts]

    def _batch(self, shape: BatchShape, parent: str | None = None) -> Batch:
        number, self.made = self.made, self.made + 1
        batch = f"batch-{len(self.batches) + 1}"
        self.batches.append(batch)
        fields_given: dict[str, Any] = {
            when: Envelope(id=callback_id(batch, when), task=TASKS[0], queue=CALLBACK_QUEUE, chosen=True)
            for when in shape.callbacks
        }
        if parent is not None and "on_finished" in fields_given:  # as the steps of a flow do
            fields_given["on_finished"] = replace(fields_given["on_finished"], batch=parent, member=self.made)
            self.made += 1
        fields_given |= {"keep_for_ms": shape.keep_for_ms, "open_for_ms": shape.open_for_ms}
        return Batch(id=batch, parent=parent, member=number, **fields_given)

    def _outcomes(self, turns: list[tuple[int, Outcome | Emits]]) -> list[tuple[Lease, Outcome]]:
        outcomes: list[tuple[Lease, Outcome]] = []
        for pick, outcome in turns:
            lease = self._some_lease(pick)
            if (lease, Cancelled()) in outcomes:
                continue  # refused the first time, is it lost the second time?  The contract is silent
            outcomes += [
                (lease, self._ending(lease, outcome, pick) if isinstance(outcome, Emits) else outcome)
            ]
        return outcomes

    def _ending(self, lease: Lease, emits: Emits, pick: int) -> Done | Dead:
        opens = () if emits.opens is None else (self._opened(lease, emits.opens, pick),)
        joined = opens[0].id if opens else [None, lease.batch, self._some_batch(pick // 3)][pick % 3]
        emit = self._emissions(lease, emits.drafts, joined)
        return Dead(emit=emit, opens=opens) if emits.dead else Done(emit=emit, opens=opens)

    def _opened(self, lease: Lease, shape: BatchShape, pick: int) -> Batch:
        """A new one, in the batch of its job or in any other, over or not; or one that stays as it is."""
        groups = self.model.groups
        lasting = [name for name, group in groups.items() if not group.sealed or group.batch.keep_for_ms]
        if pick % 5 == 0 and lasting:
            return Batch(id=_choose(pick // 5, lasting), note="another")
        parent = [None, lease.batch, self._some_batch(pick // 3)][pick % 3]
        group = groups.get(parent or "")
        swept = group is not None and not group.sealed and group.batch.open_for_ms != FOR_EVER_MS
        return self._batch(shape, None if swept else parent)

    def _emissions(self, lease: Lease, drafts: Iterable[Draft], batch: str | None) -> tuple[Envelope, ...]:
        ids = [draft.name.get("id", f"{lease.id}>{n}") for n, draft in enumerate(drafts)]
        given = {"chosen": True, "batch": batch}
        jobs = [
            self._job(draft, id=i, member=self.made, **given) for i, draft in zip(ids, drafts, strict=True)
        ]
        return tuple(job for job in jobs if not self._is_second_member(job.batch, job.id))

    # --- choosing, so that what is rare in the wild is frequent here ---------------------------------

    def _running(self) -> list[ModelEntry]:
        return [entry for entry in self.model.jobs if entry.state is State.RUNNING]

    def _some_lease(self, pick: int) -> Lease:
        """Half of the time that of a run; else an old one of a job that runs again, or any."""
        live = [lease for lease in self.leases if self.model.holds(lease)]
        ids = {lease.id for lease in live}
        stale = [lease for lease in self.leases if lease.id in ids and lease not in live]
        lease = _choose(pick // 4, [live, live, stale, self.leases][pick % 4] or live or self.leases)
        return replace(lease, holder="a stranger") if pick % 32 == 31 else lease

    def _some_job(self, pick: int, *states: State) -> str:
        fitting = [entry.job.id for entry in self.model.jobs if entry.state in states]
        others = [*(entry.job.id for entry in self.model.jobs), "nobody"]
        return _choose(pick // 8, others if pick % 8 == 7 or not fitting else fitting)

    def _some_batch(self, pick: int) -> str:
        return _choose(pick // 4, list(self.model.groups) if pick % 4 and self.model.groups else self.batches)

    def _some_parent(self, pick: int) -> str | None:
        """Not one that is swept together with its child: which goes first?  The contract is silent."""
        lasting = [g for g in self.model.groups.values() if g.batch.open_for_ms == FOR_EVER_MS]
        fitting = [group.batch.id for group in lasting if pick % 8 == 7 or not group.sealed]
        return _choose(pick // 8, fitting) if pick % 2 and fitting else None

    def _moments(self) -> list[datetime]:
        """When something will change by itself, the next ones first."""
        moments: list[datetime] = []
        for entry in self.model.jobs:
            if entry.state is State.READY:
                moments += [entry.due_at, entry.expires_at or entry.due_at]
            elif entry.state is State.RUNNING and entry.lease_until is not None:
                moments += [entry.lease_until]
        moments += self.model.limits.full_at.values()
        return sorted({moment for moment in moments if moment > self.clock.now})


def _choose(pick: int, among: Sequence[T]) -> T:
    return among[pick % len(among)]


def _comparable(verb: str, answer: object) -> object:
    """The answer without what the contract leaves to the engine: the numbers of new fences."""
    match answer:
        case list() if verb == "lease":
            return [replace(lease, fence=0, place=0) for lease in answer]
        case Exchange(lost=lost, leases=leases):
            return Exchange(lost, [replace(lease, fence=0, place=0) for lease in leases])
        case Swept():
            return replace(answer, removed=0, ended=tuple(sorted(answer.ended)))
    return answer


def _promised(info: JobInfo, now: datetime) -> dict[str, object]:
    """What the contract says of a job in its state; the rest is left to the engine."""
    names = ["id", "task", "queue", "state", "body", "priority", "put_at", "expires_at", "attempts"]
    names += [
        "failures",
        "losses",
        "crashes",
        "parked",
        "fence",
        "unique",
        "key",
        "batch",
        "member",
        "checkpoint",
        "began",
    ]
    if info.state is State.READY and info.due_at > now:
        names += ["due_at"]
    if info.state is State.RUNNING:
        names += ["lease_until", "holder", "cancel_requested"]
    if info.state.terminal:
        names += ["ended_at", "keep_until", "result"]
    if info.state is State.DEAD:
        names += ["reason"]
    if info.reason in ("failed", "bad", "broken"):
        names += ["error"]
    history = [(event.kind, event.at, event.attempt, event.fence) for event in info.history]
    return {name: getattr(info, name) for name in names} | {"history": history}


def _sums(counts: Counts) -> dict[str, int]:
    names = ("scheduled", "parked", "running", "done", "dead", "cancelled")
    return {name: getattr(counts, name) for name in names} | {"ready or held": counts.ready + counts.held}


def _members(members: Sequence[Member]) -> list[Member]:
    return [m if m.state is State.DEAD else replace(m, reason=None) for m in members]


def _unequal(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in one.items() if name not in other or other[name] != value}

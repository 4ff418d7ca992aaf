"""Ruling: what an operator holds back waits, keeps its place, and is never lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from propolis.core.job import Done, Lease, Released, Retried, State
from propolis.core.protocols import Engine, Rule, RuleKind, Scope, task_key
from propolis.errors import QueueFull
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    CALLBACKS,
    HOUR,
    a_batch,
    a_dead_job,
    bare,
    counts,
    found,
    info_of,
    lose_leases,
    members_of,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

NAMES = {
    Scope.QUEUE: "default",
    Scope.TASK: "tests.echo",
    Scope.KEY: "tenant-1",
    Scope.TASK_KEY: task_key("tests.echo", "tenant-1"),
}
HOLDS = (RuleKind.PAUSE, RuleKind.BLOCK)

every_scope = pytest.mark.parametrize("scope", list(Scope), ids=str)
every_hold = pytest.mark.parametrize("hold", HOLDS, ids=str)


async def a_ruled_job(engine: Engine) -> str:
    """A job that a rule with one of `NAMES` applies to."""
    return (await put_one(engine, key="tenant-1")).id


async def waiting(engine: Engine) -> int:
    """Jobs that are due; an engine may count those under a rule as ready until it meets them."""
    now = await counts(engine)
    return now.ready + now.held


class RulingPromise:
    async def test_rules_are_shown_page_by_page(self, engine: Engine) -> None:
        """L5: in the order of their kinds, scopes and names."""
        rules = [
            Rule(RuleKind.BLOCK, Scope.QUEUE, "b"),
            Rule(RuleKind.CAP, Scope.QUEUE, "a", 3),
            Rule(RuleKind.PAUSE, Scope.QUEUE, "a"),
            Rule(RuleKind.PAUSE, Scope.QUEUE, "b"),
            Rule(RuleKind.PAUSE, Scope.TASK, "a"),
            Rule(RuleKind.PAUSE, Scope.TASK_KEY, "a k"),
        ]
        for rule in reversed(rules):
            await engine.add_rule(rule)

        pages = [await engine.rules(limit=2, after=after) for after in (None, rules[1], rules[3], rules[5])]

        assert [bare(page) for page in pages] == [rules[:2], rules[2:4], rules[4:], []]

    async def test_a_rule_says_who_when_why_and_until(self, engine: Engine, clock: FakeClock) -> None:
        """S2.34: a delay is counted by the engine's clock."""
        until = clock.now + 2 * HOUR
        why = "déploiement: v2\nof: it"
        named = Rule(RuleKind.BLOCK, Scope.QUEUE, "a", by="anna@host", why=why, until=until)
        await engine.add_rule(named)
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "a", 3, by="ben", lasts=HOUR))
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "b:c d"))

        assert await engine.rules() == [
            replace(named, at=clock.now),
            Rule(RuleKind.CAP, Scope.QUEUE, "a", 3, "ben", "", clock.now, clock.now + HOUR),
            Rule(RuleKind.PAUSE, Scope.KEY, "b:c d", at=clock.now),
        ]

    async def test_a_rule_that_is_set_again_is_replaced_with_all_that_it_says(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """S2.13: and whoever sets it learns that it was there."""
        first = Rule(RuleKind.PAUSE, Scope.QUEUE, "default", by="anna", why="deploy", lasts=HOUR)
        assert await engine.add_rule(first) is True
        clock.advance("30m")

        assert await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default", by="ben")) is False

        assert await engine.rules() == [Rule(RuleKind.PAUSE, Scope.QUEUE, "default", by="ben", at=clock.now)]
        clock.advance("1h")
        await engine.sweep()
        assert bare(await engine.rules()) == [Rule(RuleKind.PAUSE, Scope.QUEUE, "default")]

    @every_hold
    @every_scope
    async def test_a_rule_ends_at_its_time(
        self, engine: Engine, clock: FakeClock, hold: RuleKind, scope: Scope
    ) -> None:
        """T2, I2, L1, S2.34: a lease sees that at once, also before any sweep."""
        jobs = [await a_ruled_job(engine) for _ in range(3)]
        await engine.add_rule(Rule(hold, scope, NAMES[scope], lasts=HOUR))
        assert await take(engine) == []
        clock.advance(HOUR - A_MOMENT)
        assert await take(engine) == []

        clock.advance(A_MOMENT)

        assert await engine.rules() == []
        assert await order(engine) == jobs
        assert await engine.remove_rule(hold, scope, NAMES[scope]) is False

    @every_scope
    async def test_a_sweep_knows_when_a_rule_ends(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """L1, L2: so that whoever waits is woken then."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope], lasts=HOUR))
        assert await take(engine) == []

        assert (await engine.sweep()).next_in == HOUR
        clock.advance(HOUR)
        assert (await engine.sweep()).next_in is None

        assert await order(engine) == [job]

    async def test_an_end_may_be_moved_and_taken_away(self, engine: Engine, clock: FakeClock) -> None:
        """I2."""
        job = await a_ruled_job(engine)
        rule = Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo", lasts=HOUR)
        await engine.add_rule(rule)
        await engine.add_rule(replace(rule, lasts=2 * HOUR))
        clock.advance(HOUR)
        await engine.sweep()
        assert await take(engine) == []

        await engine.add_rule(replace(rule, lasts=None))
        clock.advance(2 * HOUR)
        await engine.sweep()
        assert await take(engine) == []

        await engine.add_rule(replace(rule, lasts=None, until=clock.now))
        assert await order(engine) == [job]

    async def test_a_rule_that_is_over_is_set_as_if_it_had_never_been(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """I2, S2.13."""
        rule = Rule(RuleKind.BLOCK, Scope.KEY, "tenant-1", lasts=HOUR)
        await engine.add_rule(rule)
        clock.advance(HOUR)

        assert await engine.add_rule(rule) is True

        await a_ruled_job(engine)
        assert await take(engine) == []

    async def test_the_end_of_one_rule_is_not_that_of_another(self, engine: Engine, clock: FakeClock) -> None:
        """I2."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo", lasts=HOUR))
        await engine.add_rule(Rule(RuleKind.BLOCK, Scope.TASK, "tests.echo"))
        assert await take(engine) == []
        clock.advance(HOUR)
        await engine.sweep()
        assert await take(engine) == []

        await engine.remove_rule(RuleKind.BLOCK, Scope.TASK, "tests.echo")

        assert await order(engine) == [job]

    async def test_a_cap_ends_at_its_time(self, engine: Engine, clock: FakeClock) -> None:
        """T1."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1, lasts=HOUR))
        await put_one(engine)
        with pytest.raises(QueueFull):
            await engine.put([a_job()])

        clock.advance(HOUR)

        await put_some(engine, 2)
        assert await waiting(engine) == 3

    async def test_more_rules_than_a_sweep_removes_end_together(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L5, I2."""
        jobs = [(await put_one(engine, key=f"k{n}")).id for n in range(40)]
        for n in range(40):
            await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, f"k{n}", lasts=HOUR))
        assert await take(engine) == []
        clock.advance(HOUR)

        await engine.sweep(limit=5)
        assert await engine.rules() == []
        taken: list[str] = []
        for _ in range(10):  # an engine may let them go in bites
            taken += await order(engine)
            await engine.sweep(limit=5)

        assert sorted(taken) == sorted(jobs)

    async def test_a_rule_on_a_task_of_one_key_holds_back_no_other_key_and_no_other_task(
        self, engine: Engine
    ) -> None:
        """S2.34: pause task X of key Y alone."""
        held = await put_one(engine, key="tenant 1:a")
        others = [
            await put_one(engine, key="tenant 1"),
            await put_one(engine, key="1:a"),
            await put_one(engine, task="tests.other", key="tenant 1:a"),
            await put_one(engine),
        ]
        name = task_key("tests.echo", "tenant 1:a")
        await engine.add_rule(Rule(RuleKind.BLOCK, Scope.TASK_KEY, name))

        assert await order(engine) == [other.id for other in others]
        await engine.remove_rule(RuleKind.BLOCK, Scope.TASK_KEY, name)
        assert await order(engine) == [held.id]

    @every_hold
    @every_scope
    async def test_what_is_held_back_is_not_leased_until_it_is_let_go(
        self, engine: Engine, clock: FakeClock, hold: RuleKind, scope: Scope
    ) -> None:
        """T2, I2, S2.9."""
        job = await a_ruled_job(engine)

        assert await engine.add_rule(Rule(hold, scope, NAMES[scope])) is True
        assert await take(engine) == []
        clock.advance("1h")
        await engine.sweep()
        assert await take(engine) == []
        assert await waiting(engine) == 1

        assert await engine.remove_rule(hold, scope, NAMES[scope]) is True
        assert await order(engine) == [job]

    @every_scope
    async def test_a_rule_may_be_there_before_the_jobs(self, engine: Engine, scope: Scope) -> None:
        """T1, T2, I2."""
        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))
        job = await a_ruled_job(engine)

        assert await take(engine) == []
        await engine.remove_rule(RuleKind.PAUSE, scope, NAMES[scope])
        assert await order(engine) == [job]

    @every_scope
    async def test_a_rule_holds_back_nothing_else(self, engine: Engine, scope: Scope) -> None:
        """T2, L1."""
        await a_ruled_job(engine)
        queue = "default" if scope is not Scope.QUEUE else "other"
        other = await put_one(engine, queue=queue, task="tests.other", key="tenant-2")
        plain = await put_one(engine, queue=queue, task="tests.other")

        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))

        assert await order(engine, queue) == [other.id, plain.id]

    @pytest.mark.parametrize("first_on", HOLDS, ids=lambda kind: f"{kind} first")
    @pytest.mark.parametrize("first_off", HOLDS, ids=lambda kind: f"un{kind} first")
    async def test_pause_and_block_are_independent(
        self, engine: Engine, first_on: RuleKind, first_off: RuleKind
    ) -> None:
        """T2, I2, S2.13: in all four orders."""
        job = await a_ruled_job(engine)
        for hold in sorted(HOLDS, key=lambda kind: kind is not first_on):
            await engine.add_rule(Rule(hold, Scope.QUEUE, "default"))
            assert await take(engine) == []
        last_off = next(hold for hold in HOLDS if hold is not first_off)

        await engine.remove_rule(first_off, Scope.QUEUE, "default")
        assert await take(engine) == []
        await engine.remove_rule(last_off, Scope.QUEUE, "default")

        assert await order(engine) == [job]

    async def test_a_job_is_held_back_while_any_rule_holds_it(self, engine: Engine) -> None:
        """T2, I2."""
        job = await a_ruled_job(engine)
        for scope in Scope:
            await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))

        for scope in Scope:
            assert await take(engine) == []
            await engine.remove_rule(RuleKind.PAUSE, scope, NAMES[scope])

        assert await order(engine) == [job]

    @every_scope
    async def test_running_jobs_are_not_touched(self, engine: Engine, scope: Scope) -> None:
        """T3, T4, S2.10."""
        job = await a_ruled_job(engine)
        lease = await take_one(engine)

        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))

        [renewal] = await engine.renew([lease], span=SPAN)
        assert (renewal.until, renewal.cancel_requested) == (lease.until, False)
        assert (await info_of(engine, job)).state is State.RUNNING
        await settle_one(engine, lease, Done())

    async def test_what_comes_back_under_a_rule_waits_again(self, engine: Engine, clock: FakeClock) -> None:
        """T5, T7, T8, I2."""
        retried, released, lost = await put_some(engine, 3)
        first, second, _ = await take(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo"))
        await engine.settle([(first, Retried()), (second, Released())])
        await lose_leases(engine, clock)

        assert await take(engine) == []
        await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "tests.echo")

        assert await order(engine) == [lost, released, retried]

    async def test_what_is_passed_over_keeps_its_place(self, engine: Engine) -> None:
        """T2, I15."""
        a, b = await put_one(engine, key="x"), await put_one(engine)
        c = await put_one(engine, key="x")
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "x"))
        assert (await take_one(engine)).id == b.id
        d, e = await put_one(engine, key="x"), await put_one(engine)

        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "x")

        assert await order(engine) == [a.id, c.id, d.id, e.id]

    async def test_many_jobs_that_are_held_back_do_not_hide_one_that_is_not(self, engine: Engine) -> None:
        """T2, L1."""
        await put_some(engine, 250, key="x")
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "x"))
        good = await put_one(engine)

        assert (await take_one(engine)).id == good.id

    async def test_a_held_job_can_be_cancelled(self, engine: Engine) -> None:
        """T9, I7."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo"))
        await take(engine)

        assert await engine.cancel([job]) == [True]

        await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "tests.echo")
        assert await take(engine) == []
        assert await waiting(engine) == 0

    async def test_a_rule_is_added_and_removed_once(self, engine: Engine) -> None:
        """I2."""
        rule = Rule(RuleKind.PAUSE, Scope.QUEUE, "mail")

        assert await engine.add_rule(rule) is True
        assert await engine.add_rule(rule) is False
        assert bare(await engine.rules()) == [rule]
        assert await engine.remove_rule(RuleKind.BLOCK, Scope.QUEUE, "mail") is False
        assert await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "mail") is False
        assert await engine.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "mail") is True
        assert await engine.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "mail") is False
        assert await engine.rules() == []

    async def test_a_full_queue_takes_no_more(self, engine: Engine) -> None:
        """T1."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 2))
        await engine.put([a_job(), a_job(delay_ms=1000)])

        with pytest.raises(QueueFull) as raised:
            await engine.put([a_job(queue="other"), a_job()])

        assert (raised.value.queue, raised.value.limit) == ("default", 2)
        assert await counts(engine, "other") == await counts(engine, "never")
        assert (await counts(engine)).waiting == 2

    async def test_a_bundle_that_would_overfill_a_queue_is_refused_whole(self, engine: Engine) -> None:
        """T1."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 2))

        with pytest.raises(QueueFull):
            await engine.put([a_job(), a_job(), a_job()], token="once")

        assert await found(engine) == []
        assert [receipt.created for receipt in await engine.put([a_job(), a_job()], token="once")] == [
            True,
            True,
        ]

    async def test_what_runs_does_not_fill_a_queue(self, engine: Engine) -> None:
        """T1, T2."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
        await put_one(engine)
        await take_one(engine)

        assert [receipt.created for receipt in await engine.put([a_job()])] == [True]

    async def test_what_is_not_added_does_not_overfill_a_queue(self, engine: Engine) -> None:
        """T1, I1, I12."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
        job = a_job(unique="k")
        await engine.put([job], token="once")

        assert [receipt.created for receipt in await engine.put([job], token="once")] == [False]
        assert [receipt.created for receipt in await engine.put([job])] == [False]
        assert [receipt.created for receipt in await engine.put([a_job(unique="k")])] == [False]

    async def test_a_cap_binds_producers_only(self, engine: Engine, clock: FakeClock) -> None:
        """T5, T7, T8, T13, B1: what was accepted once is never refused."""
        dead = await a_dead_job(engine)
        await put_some(engine, 3)
        retried, released, _ = await take(engine)
        batch = a_batch()
        await engine.put_batch(batch, members_of(batch, 1, queue="other"))
        for queue in ("default", CALLBACKS):
            await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, queue, 1))
        await put_one(engine)

        await engine.settle([(retried, Retried()), (released, Released())])
        await lose_leases(engine, clock)
        await engine.replay([dead.id])
        await settle_one(engine, await take_one(engine, "other"), Done())

        assert await waiting(engine) == 5
        assert (await counts(engine, CALLBACKS)).ready == 2

    async def test_what_was_passed_over_is_seen_as_ready(self, engine: Engine) -> None:
        """I8."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "tenant-1"))
        assert await take(engine) == []

        assert (await info_of(engine, job)).state is State.READY
        assert await found(engine, state=State.READY, scheduled=False) == [job]
        assert await waiting(engine) == (await counts(engine)).total == 1

    async def test_what_was_passed_over_goes_by_priority_when_it_is_let_go(self, engine: Engine) -> None:
        """T2, I15."""
        low, high = await put_one(engine, key="x"), await put_one(engine, key="x", priority=1)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "x"))
        assert await take(engine) == []
        urgent = await put_one(engine, priority=2)

        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "x")

        assert await order(engine) == [urgent.id, high.id, low.id]

    async def test_what_was_passed_over_can_be_rescheduled(self, engine: Engine, clock: FakeClock) -> None:
        """I2."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "tenant-1"))
        assert await take(engine) == []

        assert await engine.reschedule(job, clock.now + timedelta(minutes=1))
        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "tenant-1")

        assert await take(engine) == []
        clock.advance("1m")
        assert await order(engine) == [job]

    @every_scope
    async def test_what_was_passed_over_can_expire(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T11."""
        job = await put_one(engine, key="tenant-1", expires_in_ms=60_000)
        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))
        assert await take(engine) == []
        clock.advance("1m")

        assert (await engine.sweep()).expired == 1

        assert (await info_of(engine, job.id)).reason == "expired"
        assert await waiting(engine) == 0

    async def test_what_was_passed_over_goes_with_its_queue(self, engine: Engine) -> None:
        """T9, T14."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "tenant-1"))
        assert await take(engine) == []

        assert await engine.drop("default") == 1

        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "tenant-1")
        assert await take(engine) == []
        assert job not in await found(engine, state=State.READY)

    async def test_what_was_passed_over_fills_a_queue(self, engine: Engine) -> None:
        """T1."""
        await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "tenant-1"))
        assert await take(engine) == []
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

        with pytest.raises(QueueFull):
            await engine.put([a_job()])

    async def test_jobs_that_become_due_under_a_rule_wait_in_the_order_of_their_times(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        late = await put_one(engine, key="x", delay_ms=2000)
        soon = await put_one(engine, key="x", delay_ms=1000)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "x"))
        clock.advance("1s")
        assert await take(engine) == []
        clock.advance("1s")
        assert await take(engine) == []

        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "x")

        assert await order(engine) == [soon.id, late.id]

    @every_scope
    async def test_all_that_was_held_back_runs_when_it_is_let_go(self, engine: Engine, scope: Scope) -> None:
        """S2.12: however many there are, in the order of the puts."""
        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))
        jobs = [a_job(n, key="tenant-1") for n in range(1500)]
        await engine.put(jobs[:1000])
        await engine.put(jobs[1000:])
        assert await take(engine) == []

        await engine.remove_rule(RuleKind.PAUSE, scope, NAMES[scope])

        leases: list[Lease] = []
        for _ in range(30):  # an engine may move them in bites
            leases += await engine.lease({"default": 1000}, span=SPAN, holder=HOLDER)
            await engine.sweep()
        assert [lease.id for lease in leases] == [job.id for job in jobs]

    @every_scope
    @pytest.mark.parametrize("at_once", [False, True], ids=["one after another", "at once"])
    async def test_letting_go_nine_times_lets_go_once(
        self, engine: Engine, at_once: bool, scope: Scope
    ) -> None:
        """S2.11, S2.14: one has removed the rule, and one has the job."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, scope, NAMES[scope]))
        assert await take(engine) == []
        removals = [engine.remove_rule(RuleKind.PAUSE, scope, NAMES[scope]) for _ in range(9)]

        removed = await asyncio.gather(*removals) if at_once else [await each for each in removals]

        assert sorted(removed) == [False] * 8 + [True]
        leases = await asyncio.gather(*(take(engine) for _ in range(9)))
        assert sorted(map(len, leases)) == [0] * 8 + [1]
        assert [lease.id for each in leases for lease in each] == [job]

"""Limiting: at most so many run at once, and the others keep their places."""

from __future__ import annotations

import pytest

from propolis.core.job import Dead, Done, Released, Retried
from propolis.core.protocols import LIMIT_SCOPES, Engine, Rule, RuleKind, Scope
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.ruling import NAMES, a_ruled_job
from propolis.testing.engines.samples import HOLDER, SPAN
from propolis.testing.engines.steps import (
    HOUR,
    bare,
    counts,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

every_limit = pytest.mark.parametrize("scope", sorted(LIMIT_SCOPES), ids=str)


class LimitingPromise:
    async def test_a_second_rule_of_the_same_kind_scope_and_name_replaces_the_first(
        self, engine: Engine
    ) -> None:
        """I2."""
        others = [Rule(RuleKind.LIMIT, Scope.TASK, "mail", 3), Rule(RuleKind.CAP, Scope.QUEUE, "mail", 4)]
        for rule in others:
            await engine.add_rule(rule)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "mail", 1))

        assert await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "mail", 2)) is False

        assert set(bare(await engine.rules())) == {Rule(RuleKind.LIMIT, Scope.QUEUE, "mail", 2), *others}

    @every_limit
    async def test_a_limit_ends_at_its_time(self, engine: Engine, clock: FakeClock, scope: Scope) -> None:
        """T2, I2; and is set anew as if it had never been."""
        ids = [await a_ruled_job(engine) for _ in range(3)]
        rule = Rule(RuleKind.LIMIT, scope, NAMES[scope], 1, by="anna", lasts=HOUR)
        await engine.add_rule(rule)
        assert [lease.id for lease in await take(engine, span=9 * HOUR)] == ids[:1]
        clock.advance(HOUR)

        assert await engine.rules() == []
        assert [lease.id for lease in await take(engine, span=9 * HOUR)] == ids[1:]
        assert await engine.add_rule(rule) is True

        last = await a_ruled_job(engine)
        assert await take(engine) == []
        await engine.sweep()
        clock.advance(HOUR)
        await engine.sweep()
        assert await order(engine) == [last]

    @every_limit
    async def test_a_limit_lets_so_many_run_at_once(self, engine: Engine, scope: Scope) -> None:
        """T2, I2."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(Rule(RuleKind.LIMIT, scope, NAMES[scope], 2))

        first, second = await take(engine)
        assert await take(engine) == []
        await settle_one(engine, first, Done())
        third = await take_one(engine)

        assert [lease.id for lease in (first, second, third)] == ids[:3]
        assert await take(engine) == []

    @every_limit
    async def test_a_limit_on_one_does_not_bind_the_others(self, engine: Engine, scope: Scope) -> None:
        """T2, L1."""
        await engine.add_rule(Rule(RuleKind.LIMIT, scope, NAMES[scope], 1))
        [first, _] = [await a_ruled_job(engine) for _ in range(2)]
        queue = "default" if scope is not Scope.QUEUE else "other"
        other = await put_one(engine, queue=queue, task="tests.other", key="tenant-2")

        leases = await engine.lease({"default": 5, "other": 5}, span=SPAN, holder=HOLDER)

        assert [lease.id for lease in leases] == [first, other.id]

    async def test_every_end_of_a_run_makes_room_under_a_limit(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T4, T5, T6, T7, T8, I2."""
        await put_some(engine, 3)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 1))
        for outcome in (Retried(), Released(), Dead(), Done()):
            await settle_one(engine, await take_one(engine), outcome)
        await take_one(engine)
        assert await take(engine) == []

        await lose_leases(engine, clock)
        assert len(await take(engine)) == 1
        assert (await counts(engine)).dead == 1

    async def test_a_job_behind_others_that_a_second_rule_keeps_back_is_leased(self, engine: Engine) -> None:
        """T2, L1: what one rule lets go and another keeps back does not stand in its way."""
        first, _, third = [await put_one(engine, task=task) for task in ("tests.a", "tests.a", "tests.b")]
        lease = await take_one(engine)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 1))
        assert await take(engine) == []
        await settle_one(engine, lease, Done())
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.a"))

        assert lease.id == first.id
        assert [one.id for one in await take(engine)] == [third.id]

    async def test_a_limit_counts_those_that_run_already(self, engine: Engine) -> None:
        """T2."""
        await put_some(engine, 3)
        await take(engine, limit=2)

        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 2))
        assert await take(engine) == []
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 3))

        assert len(await take(engine)) == 1

    async def test_removing_a_limit_lets_all_go_in_their_old_order(self, engine: Engine) -> None:
        """T2, I15."""
        ids = await put_some(engine, 4)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 1))
        await take(engine)

        await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "tests.echo")

        assert await order(engine) == ids[1:]

    async def test_what_a_limit_passes_over_keeps_its_place(self, engine: Engine) -> None:
        """T2, I15."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "x", 1))
        a, b, c = [await put_one(engine, key="x") for _ in range(3)]
        free = await put_one(engine)
        running, other = await take(engine)
        assert (running.id, other.id) == (a.id, free.id)
        late = await put_one(engine)

        await settle_one(engine, running, Retried())

        assert await order(engine) == [b.id, late.id]
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "x")
        assert await order(engine) == [c.id, a.id]

    async def test_a_job_starts_when_all_limits_allow_it(self, engine: Engine) -> None:
        """T2, I2."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 2))
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "x", 1))
        a, b, c, d = [await put_one(engine, key=key) for key in ("x", "x", "y", "y")]

        first, third = await take(engine)
        assert (first.id, third.id) == (a.id, c.id)
        await settle_one(engine, third, Done())
        fourth = await take_one(engine)
        assert fourth.id == d.id
        await engine.settle([(first, Done()), (fourth, Done())])

        assert await order(engine) == [b.id]

    async def test_a_job_kept_back_by_a_limit_and_a_pause_waits_for_both(self, engine: Engine) -> None:
        """T2, I2."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "tenant-1", 1))
        _, second = [await a_ruled_job(engine) for _ in range(2)]
        first = await take_one(engine)
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.echo"))
        assert await take(engine) == []

        await settle_one(engine, first, Done())
        assert await take(engine) == []
        await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "tests.echo")

        assert await order(engine) == [second]

    async def test_where_another_rule_keeps_back_what_a_limit_let_go_the_next_of_those_comes_first(
        self, engine: Engine
    ) -> None:
        """T2, I15: before what was put later."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 1))
        await put_one(engine, task="tests.slow")
        await put_one(engine, task="tests.slow")
        waits = await put_one(engine)
        [running] = await take(engine)
        later = await put_one(engine)

        await settle_one(engine, running, Released())
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.slow"))

        for job in (waits, later):
            [lease] = await take(engine)
            assert lease.id == job.id
            await settle_one(engine, lease, Done())

    async def test_where_what_a_limit_let_go_has_expired_the_next_of_those_comes_first(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "default", 1))
        await put_one(engine)
        await put_one(engine, expires_in_ms=1000)
        waits = await put_one(engine)
        [running] = await take(engine)
        await put_one(engine)

        clock.advance("1s")
        await settle_one(engine, running, Done())

        assert [lease.id for lease in await take(engine)] == [waits.id]

    async def test_a_raised_limit_lets_more_go_in_their_old_order(self, engine: Engine) -> None:
        """T2, I15."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "tenant-1", 1))
        ids = [await a_ruled_job(engine) for _ in range(5)]
        assert await order(engine) == ids[:1]

        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "tenant-1", 3))

        assert await order(engine) == ids[1:3]

    async def test_a_limit_of_none_lets_none_run(self, engine: Engine) -> None:
        """T2, I2."""
        job = await a_ruled_job(engine)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 0))

        assert await take(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "tests.echo")
        assert await order(engine) == [job]

    async def test_a_limit_counts_where_a_job_runs_and_not_where_it_was_put(self, engine: Engine) -> None:
        """T2, T5."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "slow", 1))
        moved, waiting = await put_one(engine), await put_one(engine, queue="slow")
        await settle_one(engine, await take_one(engine), Retried(queue="slow"))

        assert await order(engine, "slow") == [waiting.id]
        assert await take(engine, "slow") == []
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.QUEUE, "slow", 2))
        assert await order(engine, "slow") == [moved.id]

    async def test_many_jobs_under_a_limit_do_not_hide_one_that_is_not(self, engine: Engine) -> None:
        """T2, L1."""
        await put_some(engine, 250, key="x")
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "x", 1))
        good = await put_one(engine)

        leases = await take(engine, limit=2)

        assert len(leases) == 2
        assert leases[1].id == good.id

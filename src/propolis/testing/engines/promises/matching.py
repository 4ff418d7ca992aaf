"""Matching: a limit for each key of a prefix or of a task; which one holds for a key."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from propolis.core.job import Done, Lease
from propolis.core.protocols import MAX_PREFIXES, UNBOUNDED, Engine, Rule, RuleKind, Scope, Tokens, task_key
from propolis.errors import BadSetting
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.rating import EVERY, LONG, a_rate, started
from propolis.testing.engines.samples import HOLDER
from propolis.testing.engines.steps import (
    HOUR,
    Another,
    bare,
    put_one,
    settle_one,
    take,
    take_one,
)

EACH_KEY = task_key("tests.echo", "*")


def a_limit(name: str, n: int, **fields: Any) -> Rule:
    """For a key, or for each that begins so."""
    return Rule(RuleKind.LIMIT, Scope.KEY, name, n, **fields)


def for_each_key(n: int, task: str = "tests.echo") -> Rule:
    return Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key(task, "*"), n)


async def put_keys(engine: Engine, *keys: str | None, task: str = "tests.echo") -> list[str]:
    return [(await put_one(engine, key=key, task=task)).id for key in keys]


async def lasting(engine: Engine) -> list[Lease]:
    """All that may start now, which run for long."""
    return await take(engine, span=LONG)


async def end(engine: Engine, *leases: Lease) -> None:
    assert await engine.settle([(lease, Done()) for lease in leases]) == []


class MatchingPromise:
    async def test_a_limit_on_a_prefix_holds_for_each_key_that_begins_so(self, engine: Engine) -> None:
        """T2, I2, L1."""
        await engine.add_rule(a_limit("tenant:*", 1))
        a, b, c, d, e, f = await put_keys(engine, "tenant:1", "tenant:1", "tenant:2", "tenant:", "ten", None)

        leases = await lasting(engine)
        assert [lease.id for lease in leases] == [a, c, d, e, f]
        await end(engine, leases[1], leases[2], leases[3])
        assert await started(engine) == []
        await end(engine, leases[0])
        assert await started(engine) == [b]

    @pytest.mark.parametrize(
        "others", [("50%_x", "50abx", "50%yx"), ("Ä:1", "ä:1", "A:1"), ("a[b", "ab", "a")]
    )
    async def test_a_prefix_is_compared_letter_by_letter(
        self, engine: Engine, others: tuple[str, str, str]
    ) -> None:
        """I2: nothing in it stands for anything else."""
        begins, *rest = others
        await engine.add_rule(a_limit(f"{begins}*", 1))
        first, _, *free = await put_keys(
            engine, begins, begins, *[key for other in rest for key in (other, other)]
        )

        assert await started(engine) == [first, *free]

    async def test_a_star_alone_holds_for_each_key_and_for_no_job_without_one(self, engine: Engine) -> None:
        """T2."""
        await engine.add_rule(a_limit("*", 1))
        a, _, c, _, e, f = await put_keys(engine, "x", "x", "y", "y", None, None)

        assert await started(engine) == [a, c, e, f]

    async def test_a_key_that_ends_with_a_star_is_like_any_other(self, engine: Engine) -> None:
        """T2."""
        await engine.add_rule(a_limit("x*", 1))
        await engine.add_rule(a_limit("x**", 2))
        a, _, c, d, _ = await put_keys(engine, "x", "x", "x*", "x*", "x*")

        leases = await lasting(engine)
        assert [lease.id for lease in leases] == [a, c, d]
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "x**")
        await end(engine, leases[1])
        assert await started(engine) == []

    @pytest.mark.parametrize("backwards", [False, True])
    async def test_exactly_the_key_comes_before_the_longest_prefix_before_others(
        self, engine: Engine, *, backwards: bool
    ) -> None:
        """I2: whichever was set first, and whether it lets more or fewer start."""
        rules = [
            a_limit("*", 2),
            a_limit("t:*", 3),
            a_limit("t:a:*", 1),
            a_limit("t:a:0", 4),
            for_each_key(5),
        ]
        for rule in rules[::-1] if backwards else rules:
            await engine.add_rule(rule)
        found = {key: await put_keys(engine, *[key] * 6) for key in ("t:a:0", "t:a:1", "t:b", "u")}

        expected = [found["t:a:0"][:4], found["t:a:1"][:1], found["t:b"][:3], found["u"][:2]]
        assert await started(engine) == [job for jobs in expected for job in jobs]

    async def test_a_limit_for_each_key_of_a_task_holds_where_there_is_no_other(self, engine: Engine) -> None:
        """T2, I2."""
        await engine.add_rule(for_each_key(1))
        await engine.add_rule(a_limit("big:*", 2))
        await engine.add_rule(a_limit("y", 3))
        keys = ["x", "x", "big:1", "big:1", "big:1", "y", "y", "z", None, None]
        ids = await put_keys(engine, *keys)
        others = await put_keys(engine, "w", "w", task="tests.other")

        assert await started(engine) == [ids[n] for n in (0, 2, 3, 5, 6, 7, 8, 9)] + others

    async def test_a_key_has_one_count_of_all_that_run_whichever_limit_holds(self, engine: Engine) -> None:
        """T2, I2: of jobs of other tasks too, and of those that started before."""
        [other] = await put_keys(engine, "x", task="tests.other")
        [running] = await lasting(engine)
        assert running.id == other
        await engine.add_rule(for_each_key(1))
        [waits] = await put_keys(engine, "x")
        assert await started(engine) == []
        await engine.add_rule(a_limit("x*", 1))
        assert await started(engine) == []

        await end(engine, running)
        assert await started(engine) == [waits]

    async def test_jobs_of_one_key_whose_tasks_have_different_limits_go_as_theirs_allows(
        self, engine: Engine
    ) -> None:
        """T2, L1: one that has no room stands in nobody's way."""
        await engine.add_rule(for_each_key(1, "tests.a"))
        await engine.add_rule(for_each_key(2, "tests.b"))
        a, a2 = await put_keys(engine, "x", "x", task="tests.a")
        b, b2, b3 = await put_keys(engine, "x", "x", "x", task="tests.b")
        leases = await lasting(engine)
        assert [lease.id for lease in leases] == [a, b]
        [c] = await put_keys(engine, "x", task="tests.c")
        leases += await lasting(engine)
        assert leases[2].id == c

        await end(engine, leases[2])
        assert await started(engine) == []
        await end(engine, leases[1])
        third = await take_one(engine, span=LONG)
        assert third.id == b2
        await end(engine, leases[0], third)
        last = await lasting(engine)
        assert [lease.id for lease in last] == [a2, b3]

    @pytest.mark.parametrize("name", ["tenant:*", "*"])
    async def test_removing_a_limit_on_a_prefix_lets_all_go_in_their_old_order(
        self, engine: Engine, name: str
    ) -> None:
        """T2, I15."""
        await engine.add_rule(a_limit(name, 1))
        keys = ["tenant:2", "tenant:1", "tenant:3", "tenant:1", "tenant:2", "tenant:3", "tenant:2"]
        ids = await put_keys(engine, *keys)
        assert await started(engine) == ids[:3]
        assert await started(engine) == []

        assert await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, name) is True

        assert await started(engine) == ids[3:]

    async def test_removing_a_limit_for_each_key_of_a_task_lets_all_go_in_their_old_order(
        self, engine: Engine
    ) -> None:
        """T2, I15."""
        await engine.add_rule(for_each_key(1))
        ids = await put_keys(engine, "b", "a", "c", "a", "b", "c", "b")
        assert await started(engine) == ids[:3]
        assert await started(engine) == []

        assert await engine.remove_rule(RuleKind.LIMIT, Scope.TASK_KEY, EACH_KEY) is True

        assert await started(engine) == ids[3:]

    @pytest.mark.parametrize("rule", [a_limit("t:*", 1), for_each_key(1)], ids=lambda rule: rule.scope.value)
    async def test_a_limit_for_many_keys_can_be_raised_and_lowered(self, engine: Engine, rule: Rule) -> None:
        """T2, I15: what runs already goes on, and counts."""
        await engine.add_rule(rule)
        ids = await put_keys(engine, *["t:1", "t:2"] * 4)
        one, two = await lasting(engine)

        raised = Rule(rule.kind, rule.scope, rule.name, 3)
        assert await engine.add_rule(raised) is False
        assert bare(await engine.rules()) == [raised]
        more = await lasting(engine)
        assert [lease.id for lease in more] == ids[2:6]

        await engine.add_rule(rule)
        await end(engine, one, two, *more[:2])
        assert await started(engine) == []
        await end(engine, more[2])
        assert await started(engine) == ids[6:7]

    @pytest.mark.parametrize("rule", [a_limit("t:*", 1), for_each_key(1)], ids=lambda rule: rule.scope.value)
    async def test_a_limit_for_many_keys_ends_at_its_time(
        self, engine: Engine, clock: FakeClock, rule: Rule
    ) -> None:
        """T2, L1."""
        await engine.add_rule(Rule(rule.kind, rule.scope, rule.name, 1, lasts=HOUR))
        ids = await put_keys(engine, *["t:1", "t:2"] * 2)
        assert await started(engine) == ids[:2]
        assert await started(engine) == []
        clock.advance(HOUR)

        assert await engine.rules() == []
        assert await started(engine) == ids[2:]

    async def test_where_a_limit_goes_the_next_in_order_holds(self, engine: Engine, clock: FakeClock) -> None:
        """T2, I2: with what runs, and what was set aside."""
        await engine.add_rule(for_each_key(4))
        await engine.add_rule(a_limit("t:*", 3))
        await engine.add_rule(a_limit("t:a*", 2, lasts=HOUR))
        await engine.add_rule(a_limit("t:a", 1))
        ids = await put_keys(engine, *["t:a"] * 6)

        assert await started(engine) == ids[:1]
        assert await started(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:a")
        assert await started(engine) == ids[1:2]
        assert await started(engine) == []
        clock.advance(HOUR)
        assert await started(engine) == ids[2:3]
        assert await started(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:*")
        assert await started(engine) == ids[3:4]
        assert await started(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, Scope.TASK_KEY, EACH_KEY)
        assert await started(engine) == ids[4:]

    async def test_where_a_limit_comes_before_another_it_holds_at_once(self, engine: Engine) -> None:
        """T2, I2."""
        await engine.add_rule(for_each_key(1))
        ids = await put_keys(engine, *["t:a"] * 6)
        leases = await lasting(engine)

        await engine.add_rule(a_limit("*", 2))
        leases += await lasting(engine)
        await engine.add_rule(a_limit("t:*", 3))
        leases += await lasting(engine)
        await engine.add_rule(a_limit("t:a", 4))
        leases += await lasting(engine)
        assert [lease.id for lease in leases] == ids[:4]
        await engine.add_rule(a_limit("t:a", 1))
        await end(engine, *leases[:3])
        assert await started(engine) == []
        await end(engine, leases[3])
        assert await started(engine) == ids[4:5]

    async def test_of_many_keys_each_goes_on_when_their_limit_is_removed(self, engine: Engine) -> None:
        """L3, L5: bite by bite, with the leases and sweeps that follow; what has a limit of its own waits."""
        await engine.add_rule(a_limit("t:*", 1))
        await engine.add_rule(a_limit("t:7", 1))
        keys = [f"t:{number}" for number in range(40)]
        ids = await put_keys(engine, *keys, *keys, *keys)
        assert await started(engine) == ids[:40]
        assert await started(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:*")

        found: list[str] = []
        for _ in range(10):
            await engine.sweep()
            found += await started(engine)
        assert sorted(found) == sorted(job for job in ids[40:] if job not in (ids[47], ids[87]))

    async def test_a_pause_of_a_key_and_a_limit_on_its_prefix_both_hold(self, engine: Engine) -> None:
        """T2, I2."""
        await engine.add_rule(a_limit("t:*", 1))
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "t:1"))
        a, b, c = await put_keys(engine, "t:1", "t:1", "t:2")
        assert await started(engine) == [c]
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:*")
        assert await started(engine) == []
        await engine.add_rule(a_limit("t:*", 1))
        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "t:1")

        first = await take_one(engine, span=LONG)
        assert first.id == a
        assert await started(engine) == []
        await settle_one(engine, first, Done())
        assert await started(engine) == [b]

    async def test_what_a_limit_on_a_prefix_keeps_back_can_be_cancelled_moved_and_dropped(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T9, T14: and is counted before what comes after it."""
        await engine.add_rule(a_limit("t:*", 1))
        a, b, c, d = await put_keys(engine, *["t:1"] * 4)
        first = await take_one(engine, span=LONG)
        assert await started(engine) == []
        assert [await engine.position(job) for job in (b, c, d)] == [0, 1, 2]

        assert first.id == a
        assert await engine.cancel([b]) == [True]
        assert await engine.reschedule(c, clock.now + HOUR) is True
        await settle_one(engine, first, Done())
        fourth = await take_one(engine, span=LONG)
        assert fourth.id == d
        clock.advance(HOUR)
        assert await started(engine) == []
        assert await engine.drop("default") == 1 + 1  # what is cancelled is kept, and goes as well
        await settle_one(engine, fourth, Done())
        assert await started(engine) == []

    async def test_another_handle_obeys_a_limit_on_a_prefix_at_once(
        self, engine: Engine, another: Another
    ) -> None:
        """I2."""
        other = await another()
        ids = await put_keys(engine, "t:1", "t:1", "t:2")
        await other.add_rule(a_limit("t:*", 1))
        assert await started(engine) == [ids[0], ids[2]]

        await other.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:*")
        assert await started(engine) == [ids[1]]

    async def test_of_prefixes_there_are_so_many_at_most(self, engine: Engine, clock: FakeClock) -> None:
        """L5: without those that are over, and replacing one is no new one."""
        for number in range(MAX_PREFIXES):
            await engine.add_rule(a_limit(f"t:{number}:*", 1, lasts=HOUR if number else None))
        await engine.add_rule(a_limit("t", 1))
        assert await engine.add_rule(a_limit("t:3:*", 2, lasts=HOUR)) is False
        with pytest.raises(BadSetting, match=f"{MAX_PREFIXES}"):
            await engine.add_rule(a_limit("more:*", 1))
        assert await engine.add_rule(for_each_key(1)) is True

        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:3:*")
        await engine.add_rule(a_limit("more:*", 1))
        with pytest.raises(BadSetting):
            await engine.add_rule(a_limit("t:3:*", 1))
        clock.advance(HOUR)
        await engine.add_rule(a_limit("t:3:*", 1))
        names = {rule.name for rule in await engine.rules()}
        assert names == {"t:0:*", "t", "more:*", "t:3:*", EACH_KEY}

    # --- rates -------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["t:*", "*"])
    async def test_each_key_of_a_prefix_has_a_rate_of_its_own(
        self, engine: Engine, clock: FakeClock, name: str
    ) -> None:
        """T2, I2."""
        await engine.add_rule(a_rate(Scope.KEY, name, burst=2))
        ids = await put_keys(engine, *["t:1", "t:2"] * 4)

        assert await started(engine) == ids[:4]
        assert await started(engine) == []
        assert (await engine.sweep()).next_in == EVERY
        clock.advance(EVERY)
        assert await started(engine) == ids[4:6]
        clock.advance(EVERY)
        assert await started(engine) == ids[6:]

    async def test_each_key_of_a_task_has_a_rate_of_its_own(self, engine: Engine, clock: FakeClock) -> None:
        """T2, I2."""
        await engine.add_rule(a_rate(Scope.TASK_KEY, EACH_KEY, n=2))
        ids = await put_keys(engine, *["t:1", "t:2"] * 3)

        one, two = await lasting(engine)
        assert await started(engine) == []
        clock.advance(EVERY)
        more = await lasting(engine)
        clock.advance(EVERY)
        assert await started(engine) == []
        await end(engine, one, two)
        more += await lasting(engine)

        assert [lease.id for lease in (one, two, *more)] == ids

    async def test_a_key_has_one_bucket_whichever_limit_holds(self, engine: Engine, clock: FakeClock) -> None:
        """T2, I2."""
        await engine.add_rule(a_rate(Scope.TASK_KEY, EACH_KEY))
        ids = await put_keys(engine, *["t:1"] * 4)
        assert await started(engine) == ids[:1]

        rule = a_rate(Scope.KEY, "t:*")
        await engine.add_rule(rule)
        assert await started(engine) == []
        exact = a_rate(Scope.KEY, "t:1", burst=2)
        await engine.add_rule(exact)
        assert await started(engine) == ids[1:2]
        assert await engine.tokens(exact, "t:1") == await engine.tokens(rule, "t:1") == Tokens(0, EVERY)
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "t:1")
        assert await started(engine) == []
        clock.advance(EVERY)
        assert await started(engine) == ids[2:3]

    async def test_tasks_with_different_rates_for_one_key_go_as_theirs_allows(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, L1: what waits for longer stands in nobody's way."""
        await engine.add_rule(a_rate(Scope.TASK_KEY, task_key("tests.a", "*"), every=3 * EVERY))
        await engine.add_rule(a_rate(Scope.TASK_KEY, task_key("tests.b", "*"), every=EVERY, burst=3))
        a, a2 = await put_keys(engine, "x", "x", task="tests.a")
        b, b2 = await put_keys(engine, "x", "x", task="tests.b")

        assert await started(engine) == [a]  # whose token is three of the others
        assert await started(engine) == []
        clock.advance(EVERY)
        assert await started(engine) == [b]
        clock.advance(EVERY)
        assert await started(engine) == [b2]
        clock.advance(3 * EVERY)
        assert await started(engine) == [a2]

    async def test_a_rate_is_also_for_a_key_of_its_own_and_for_a_job_of_another_queue(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2: a bucket belongs to the key, wherever its jobs wait."""
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "t:*", UNBOUNDED, every=EVERY))
        await put_one(engine, key="t:1")
        other = await put_one(engine, key="t:1", queue="other")
        wants = {"default": 9, "other": 9}
        assert len(await engine.lease(wants, span=LONG, holder=HOLDER)) == 1
        assert await engine.lease(wants, span=LONG, holder=HOLDER) == []

        clock.advance(EVERY + timedelta(seconds=1))
        assert await started(engine, "other") == [other.id]

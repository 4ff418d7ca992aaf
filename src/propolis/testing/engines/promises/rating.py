"""Rating: a start each so often, some of which are saved up; the others keep their places."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from propolis.core.job import Crashed, Dead, Done, Outcome, Released, Retried, Snoozed, State, Unknown
from propolis.core.protocols import LIMIT_SCOPES, UNBOUNDED, Engine, Rule, RuleKind, Scope, Tokens
from propolis.errors import BadSetting
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.ruling import NAMES, a_ruled_job
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    bare,
    info_of,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

EVERY = timedelta(seconds=20)  # longer than SPAN
LONG = 9 * HOUR
NOTHING = timedelta(0)

every_limit = pytest.mark.parametrize("scope", sorted(LIMIT_SCOPES), ids=str)


def a_rate(scope: Scope, name: str | None = None, *, n: int = UNBOUNDED, **fields: Any) -> Rule:
    fields.setdefault("every", EVERY)
    return Rule(RuleKind.LIMIT, scope, name or NAMES[scope], n, **fields)


async def started(engine: Engine, queue: str = "default") -> list[str]:
    """The ids of all that may start now, which run for long."""
    return [lease.id for lease in await take(engine, queue, span=LONG)]


async def sweep_until_quiet(engine: Engine) -> timedelta | None:
    """As somebody does who comes back as often as it is asked for; how long it may stay away then."""
    for _ in range(20):
        swept = await engine.sweep(by="sweeper-1")
        if swept.again_in != NOTHING:
            return swept.next_in
    return pytest.fail("a sweep is asked for again and again")


class RatingPromise:
    @every_limit
    async def test_a_rate_is_shown_as_it_was_set(self, engine: Engine, scope: Scope) -> None:
        """I2."""
        rule = a_rate(scope, n=3, every=timedelta(microseconds=333_334), burst=20)
        await engine.add_rule(a_rate(scope))
        assert await engine.add_rule(rule) is False

        assert bare(await engine.rules()) == [rule]
        plain = Rule(RuleKind.LIMIT, scope, NAMES[scope], 1)
        assert await engine.add_rule(plain) is False
        assert bare(await engine.rules()) == [plain]
        with pytest.raises(BadSetting, match="has no rate"):
            await engine.tokens(plain, NAMES[scope])

    @every_limit
    async def test_a_rate_lets_one_start_each_so_often(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T2, I2: also where those that started still run, and not a moment early."""
        ids = [await a_ruled_job(engine) for _ in range(3)]
        await engine.add_rule(a_rate(scope))

        assert await started(engine) == ids[:1]
        assert await started(engine) == []
        for job in ids[1:]:
            clock.advance(EVERY - A_MOMENT)
            assert await started(engine) == []
            clock.advance(A_MOMENT)
            assert await started(engine) == [job]

    @every_limit
    async def test_an_end_of_a_run_gives_no_token_back(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T2, T4."""
        ids = [await a_ruled_job(engine) for _ in range(2)]
        await engine.add_rule(a_rate(scope))
        await settle_one(engine, await take_one(engine), Done())

        assert await started(engine) == []
        clock.advance(EVERY)
        assert await started(engine) == ids[1:]

    @every_limit
    async def test_so_many_starts_are_saved_up_and_no_more(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T2, I2."""
        ids = [await a_ruled_job(engine) for _ in range(9)]
        await engine.add_rule(a_rate(scope, burst=3))

        assert await started(engine) == ids[:3]
        clock.advance(2 * EVERY - A_MOMENT)
        assert await started(engine) == ids[3:4]
        clock.advance(A_MOMENT)
        assert await started(engine) == ids[4:5]
        clock.advance(HOUR)
        assert await started(engine) == ids[5:8]
        assert await started(engine) == []

    @every_limit
    async def test_starts_of_several_leases_share_one_burst(self, engine: Engine, scope: Scope) -> None:
        """T2: also of several queues, where the limit is not that of one."""
        await engine.add_rule(a_rate(scope, burst=3))
        ids = [await a_ruled_job(engine) for _ in range(5)]

        assert [lease.id for lease in await take(engine, limit=2, span=LONG)] == ids[:2]
        await put_one(engine, queue="other", key="tenant-1")
        wants = {"default": 1, "other": 1}
        leases = await engine.lease(wants, span=LONG, holder=HOLDER)
        assert [lease.id for lease in leases][:1] == ids[2:3]
        assert len(leases) == (2 if scope is Scope.QUEUE else 1)

    @every_limit
    async def test_in_no_window_of_time_start_more_than_burst_and_rate_allow(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """I2: and none is later than it could be, where somebody always asks."""
        burst, steps = 4, [0.3, 0.9, 0.1, 2.5, 0.7, 6.0, 0.2, 0.2, 1.1, 0.5]
        for _ in range(50):
            await a_ruled_job(engine)
        await engine.add_rule(a_rate(scope, burst=burst))
        starts: list[datetime] = []
        saved = burst * EVERY
        for number in range(40):
            now = len(await started(engine))
            assert now == saved // EVERY
            starts += [clock.now] * now
            span = EVERY * steps[number % len(steps)]
            saved = min(burst * EVERY, saved - now * EVERY + span)
            clock.advance(span)

        for first, begin in enumerate(starts):
            for last, end in enumerate(starts[first:], 1):
                assert last <= burst + (end - begin) // EVERY

    async def test_a_job_starts_when_number_and_rate_allow_it(self, engine: Engine, clock: FakeClock) -> None:
        """T2, I2."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(a_rate(Scope.KEY, n=1, burst=2))
        first = await take_one(engine, span=LONG)
        assert await take(engine) == []

        clock.advance(HOUR)
        assert await take(engine) == []
        await settle_one(engine, first, Done())
        second = await take_one(engine, span=LONG)
        await settle_one(engine, second, Done())
        third = await take_one(engine, span=LONG)
        await settle_one(engine, third, Done())
        fourth = await take(engine, span=LONG)

        assert [first.id, second.id, third.id, *(lease.id for lease in fourth)] == ids[:3]
        clock.advance(EVERY)
        assert await started(engine) == ids[3:]

    async def test_a_start_takes_a_token_of_each_limit_that_holds_for_it(self, engine: Engine) -> None:
        """T2: and what one of them keeps back takes none of the others."""
        await engine.add_rule(a_rate(Scope.QUEUE, burst=4))
        await engine.add_rule(a_rate(Scope.TASK, burst=3))
        await engine.add_rule(a_rate(Scope.KEY, "x"))
        x, _, y, z, _ = [await put_one(engine, key=key) for key in ("x", "x", "y", "z", "v")]
        other, _ = [await put_one(engine, task="tests.other") for _ in range(2)]

        assert await started(engine) == [x.id, y.id, z.id, other.id]

    async def test_what_finds_no_token_keeps_its_place_and_stands_in_nobodys_way(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T2, I15, L1."""
        await engine.add_rule(a_rate(Scope.KEY, "x"))
        a, b, c = [await put_one(engine, key="x") for _ in range(3)]
        free = await put_one(engine)
        assert await started(engine) == [a.id, free.id]

        late = await put_one(engine)
        clock.advance(EVERY)
        assert await started(engine) == [b.id, late.id]
        await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, "x")
        assert await started(engine) == [c.id]

    async def test_many_jobs_without_a_token_do_not_hide_one_that_needs_none(self, engine: Engine) -> None:
        """T2, L1."""
        [first, *_] = await put_some(engine, 250, key="x")
        await engine.add_rule(a_rate(Scope.KEY, "x"))
        good = await put_one(engine)

        assert [lease.id for lease in await take(engine, limit=2)] == [first, good.id]

    async def test_those_that_wait_for_a_token_can_be_cancelled_and_put_off(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T9, L1: the token is for the next one."""
        await engine.add_rule(a_rate(Scope.KEY))
        ids = [await a_ruled_job(engine) for _ in range(5)]
        assert await started(engine) == ids[:1]

        assert await engine.cancel(ids[1:2]) == [True]
        assert await engine.reschedule(ids[2], clock.now + HOUR) is True
        clock.advance(EVERY)

        assert await started(engine) == ids[3:4]
        clock.advance(EVERY)
        assert await started(engine) == ids[4:5]

    async def test_what_expires_while_it_waits_for_a_token_takes_none(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T11."""
        await engine.add_rule(a_rate(Scope.KEY))
        first = await a_ruled_job(engine)
        brief = await put_one(engine, key="tenant-1", expires_in_ms=1000)
        last = await a_ruled_job(engine)
        assert await started(engine) == [first]

        clock.advance(EVERY)
        assert await started(engine) == [last]
        await engine.sweep()
        assert (await info_of(engine, brief.id)).reason == "expired"

    async def test_parked_jobs_take_tokens_as_well(self, engine: Engine, clock: FakeClock) -> None:
        """T12b, T2."""
        ids = [await a_ruled_job(engine) for _ in range(2)]
        await engine.settle([(lease, Unknown()) for lease in await take(engine)])
        await engine.add_rule(a_rate(Scope.TASK))

        async def started_parked() -> list[str]:
            wants, tasks = {"default": 9}, ["tests.echo"]
            found = await engine.lease(wants, span=LONG, holder=HOLDER, tasks=tasks)
            return [lease.id for lease in found]

        assert await started_parked() == ids[:1]
        assert await started_parked() == []
        clock.advance(EVERY)
        assert await started_parked() == ids[1:]

    # --- tokens that are given back ----------------------------------------------------------

    @every_limit
    @pytest.mark.parametrize("outcome", [Released(), Snoozed(HOUR), Snoozed(HOUR, asked=True), Unknown()])
    async def test_what_did_not_really_run_gives_its_token_back(
        self, engine: Engine, scope: Scope, outcome: Outcome
    ) -> None:
        """T7, T12b."""
        ids = [await a_ruled_job(engine) for _ in range(3)]
        await engine.add_rule(a_rate(scope))
        first = await take_one(engine)
        assert await take(engine) == []

        await settle_one(engine, first, outcome)

        assert await started(engine) == (ids[:1] if isinstance(outcome, Released) else ids[1:2])
        assert await started(engine) == []

    @pytest.mark.parametrize(
        "outcome", [Retried(), Retried(HOUR), Done(), Dead(), Crashed(), Crashed(blameless=True)], ids=repr
    )
    async def test_what_ran_gives_no_token_back(
        self, engine: Engine, clock: FakeClock, outcome: Outcome
    ) -> None:
        """T4, T5, T6, T8b."""
        [await a_ruled_job(engine) for _ in range(2)]
        await engine.add_rule(a_rate(Scope.KEY))

        await settle_one(engine, await take_one(engine), outcome)

        assert await started(engine) == []
        clock.advance(EVERY)
        assert len(await started(engine)) == 1

    async def test_a_lost_lease_gives_no_token_back(self, engine: Engine, clock: FakeClock) -> None:
        """T8."""
        ids = [await a_ruled_job(engine) for _ in range(2)]
        await engine.add_rule(a_rate(Scope.KEY))
        await take_one(engine)
        clock.advance(SPAN)
        await engine.sweep()

        assert await started(engine) == []
        clock.advance(EVERY - SPAN)
        assert await started(engine) == ids[:1]

    async def test_what_is_cancelled_as_it_is_released_gives_no_token_back(self, engine: Engine) -> None:
        """T7, T10: it counts as it ran."""
        first, _ = [await a_ruled_job(engine) for _ in range(2)]
        await engine.add_rule(a_rate(Scope.KEY))
        lease = await take_one(engine)
        await engine.cancel([first])

        await settle_one(engine, lease, Released())

        assert (await info_of(engine, first)).state is State.CANCELLED
        assert await started(engine) == []

    @every_limit
    async def test_tokens_that_are_given_back_are_never_more_than_the_burst(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T7."""
        for _ in range(5):
            await a_ruled_job(engine)
        first, second = await take(engine, limit=2, span=LONG)
        await engine.add_rule(a_rate(scope, burst=2))
        third = await take_one(engine, span=LONG)
        clock.advance(EVERY)

        await engine.settle([(lease, Released()) for lease in (first, second, third)])

        assert len(await started(engine)) == 2

    async def test_a_late_settle_gives_no_token_back(self, engine: Engine, clock: FakeClock) -> None:
        """I5."""
        await a_ruled_job(engine)
        await engine.add_rule(a_rate(Scope.KEY))
        lease = await take_one(engine)
        clock.advance(SPAN)
        await engine.sweep()

        assert await engine.settle([(lease, Released()), (lease, Released())]) == [lease, lease]
        assert await started(engine) == []

    # --- what changes ------------------------------------------------------------------------

    @every_limit
    async def test_a_limit_that_is_replaced_or_set_again_finds_its_tokens_taken(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """T2, I2."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(a_rate(scope))
        assert await started(engine) == ids[:1]

        await engine.add_rule(a_rate(scope, n=5))
        assert await started(engine) == []
        await engine.remove_rule(RuleKind.LIMIT, scope, NAMES[scope])
        await engine.add_rule(a_rate(scope))
        assert await started(engine) == []

        clock.advance(EVERY)
        assert await started(engine) == ids[1:2]
        await engine.remove_rule(RuleKind.LIMIT, scope, NAMES[scope])
        assert await started(engine) == ids[2:]

    @every_limit
    async def test_a_quicker_rate_holds_at_once(self, engine: Engine, clock: FakeClock, scope: Scope) -> None:
        """L1: nobody waits as long as the slow one would have let him."""
        ids = [await a_ruled_job(engine) for _ in range(3)]
        await engine.add_rule(a_rate(scope, every=100 * HOUR))
        assert await started(engine) == ids[:1]
        assert await started(engine) == []

        await engine.add_rule(a_rate(scope))
        assert await started(engine) == []
        for job in ids[1:]:
            clock.advance(EVERY)
            assert await started(engine) == [job]

    @every_limit
    async def test_a_greater_burst_holds_at_once(self, engine: Engine, scope: Scope) -> None:
        """L1."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(a_rate(scope))
        assert await started(engine) == ids[:1]

        await engine.add_rule(a_rate(scope, burst=3))

        assert await started(engine) == ids[1:3]

    @every_limit
    async def test_a_rate_ends_at_its_time(self, engine: Engine, clock: FakeClock, scope: Scope) -> None:
        """T2, L1."""
        ids = [await a_ruled_job(engine) for _ in range(3)]
        await engine.add_rule(a_rate(scope, every=50 * HOUR, lasts=HOUR))
        assert await started(engine) == ids[:1]
        assert await started(engine) == []

        clock.advance(HOUR)

        assert await started(engine) == ids[1:]

    @every_limit
    async def test_a_sweep_tells_when_the_next_token_comes(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """L1."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(a_rate(scope, burst=2))
        assert await started(engine) == ids[:2]
        assert await started(engine) == []

        assert (await engine.sweep()).next_in == EVERY
        clock.advance(EVERY / 4)
        assert (await engine.sweep()).next_in == EVERY * 3 / 4
        clock.advance(EVERY * 3 / 4)
        await engine.sweep()
        assert await started(engine) == ids[2:3]
        assert await started(engine) == []
        assert (await engine.sweep()).next_in == EVERY

    async def test_a_sweep_tells_of_the_next_token_where_a_full_worker_took_the_last(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """L1: what waits for it was seen before."""
        await engine.add_rule(a_rate(Scope.KEY, "k"))
        await engine.put([a_job(n, key="k") for n in range(4)])
        assert len(await started(engine)) == 1
        assert (await engine.sweep()).next_in == EVERY

        clock.advance(EVERY)
        await take_one(engine, span=LONG)
        assert (await engine.sweep()).next_in == EVERY

        assert await started(engine) == []
        assert (await engine.sweep()).next_in == EVERY

    @every_limit
    async def test_a_clock_that_goes_back_keeps_nothing_from_its_token(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        """L2: nor lets more start."""
        ids = [await a_ruled_job(engine) for _ in range(4)]
        await engine.add_rule(a_rate(scope, burst=2))
        assert await started(engine) == ids[:2]
        assert await started(engine) == []
        await sweep_until_quiet(engine)

        clock.set_back(100 * HOUR)
        await sweep_until_quiet(engine)
        assert await started(engine) == []
        next_in = await sweep_until_quiet(engine)
        assert next_in is not None
        assert next_in <= EVERY

        clock.advance(EVERY)
        assert await started(engine) == ids[2:3]
        assert await started(engine) == []

    @every_limit
    async def test_a_look_shows_the_tokens_that_are_left(
        self, engine: Engine, clock: FakeClock, scope: Scope
    ) -> None:
        rule = a_rate(scope, burst=2)
        await engine.add_rule(rule)
        shown: list[Tokens] = [await engine.tokens(rule, NAMES[scope])]
        for _ in range(2):
            await a_ruled_job(engine)
            await started(engine)
            shown.append(await engine.tokens(rule, NAMES[scope]))
        for span in (EVERY / 4, EVERY * 3 / 4, HOUR):
            clock.advance(span)
            shown.append(await engine.tokens(rule, NAMES[scope]))

        assert [tokens.free for tokens in shown] == [2, 1, 0, 0, 1, 2]
        assert [tokens.next_in / EVERY for tokens in shown] == [0, 0, 1, 0.75, 0, 0]
        assert await engine.tokens(a_rate(scope, "nobody", burst=5), "nobody") == Tokens(5, NOTHING)

"""Bundling: jobs that are leased together are as apart as if each had been leased alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from propolis.core.job import (
    Broken,
    Dead,
    Done,
    Error,
    JobInfo,
    Lease,
    Outcome,
    Progress,
    Released,
    Retried,
    Snoozed,
    State,
)
from propolis.core.protocols import Engine, Note, Rule, RuleKind, Scope
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    HOUR,
    Another,
    counts,
    found,
    info_of,
    lose_leases,
    put_some,
    settle_one,
    take,
)

OUTCOMES: dict[str, Outcome] = {
    "done": Done(),
    "kept": Done(result=b"1", keep=HOUR),
    "emitting": Done(emit=(a_job(queue="next"),)),
    "retried": Retried(timedelta(0), Error("E")),
    "dead": Dead(),
    "snoozed": Snoozed(HOUR),
    "released": Released(),
    "broken": Broken(Error("E")),
}

SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "unique": {"unique": "one"},
    "keyed": {"key": "tenant"},
    "chosen": {"id": "chosen", "chosen": True},
}

Act = Callable[[Engine, Lease], Awaitable[object]]


def settling(outcome: Outcome) -> Act:
    return lambda engine, lease: engine.settle([(lease, outcome)])


ACTS: dict[str, Act] = {
    "cancelled": lambda engine, lease: engine.cancel([lease.id]),
    "noted": lambda engine, lease: engine.note([Note(lease, Progress(1, 2), ("line",))]),
    "renewed": lambda engine, lease: engine.renew([lease], span=2 * SPAN),
    **{name: settling(outcome) for name, outcome in OUTCOMES.items()},
}


async def infos(engine: Engine, leases: list[Lease]) -> list[JobInfo]:
    return [await info_of(engine, lease.id) for lease in leases]


class BundlingPromise:
    @pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))
    async def test_what_happens_to_one_of_a_bundle_leaves_the_others_alone(
        self, engine: Engine, act: Act
    ) -> None:
        """T3-T7, T9, T12, I8: whatever the engine shares between them."""
        await put_some(engine, 5)
        leases = await take(engine)
        one, others = leases[2], leases[:2] + leases[3:]
        before = await infos(engine, others)

        await act(engine, one)

        assert await infos(engine, others) == before
        assert (await counts(engine)).running in (4, 5)
        assert await engine.settle([(lease, Done()) for lease in others]) == []
        left = await counts(engine)
        assert left.total == left.put - left.deleted <= 1

    async def test_each_of_a_bundle_is_found(self, engine: Engine) -> None:
        """I8, I1: by its id, by its queue and by its state, until it has ended; and its id is taken."""
        ids = await put_some(engine, 5)
        leases = await take(engine)
        await settle_one(engine, leases[1], Done())
        left = [name for name in ids if name != ids[1]]

        assert await found(engine, state=State.RUNNING) == left
        assert await found(engine, queue="default") == left
        assert (await counts(engine)).running == 4
        assert await engine.get(ids[1]) is None
        info = await info_of(engine, ids[2])
        assert (info.state, info.fence, info.holder) == (State.RUNNING, leases[2].fence, HOLDER)
        assert (info.attempts, info.lease_until, info.body) == (1, leases[2].until, leases[2].body)
        again = await engine.put([a_job(id=name) for name in left])
        assert [receipt.created for receipt in again] == [False] * 4

    async def test_a_bundle_is_settled_in_pieces(self, engine: Engine) -> None:
        """T4, I5: each lease once, in any order."""
        await put_some(engine, 6)
        leases = await take(engine)
        pieces = [leases[3:5], leases[:1], [*leases[4:], leases[1]], leases]

        lost = [await engine.settle([(lease, Done()) for lease in piece]) for piece in pieces]

        assert lost == [[], [], [leases[4]], [leases[0], leases[1], *leases[3:]]]
        assert await counts(engine) == replace(await counts(engine), running=0, put=6, deleted=6)

    @pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=list(OUTCOMES))
    async def test_one_settle_mixes_ends_and_bundles(self, engine: Engine, outcome: Outcome) -> None:
        """T4-T7, T12: with a lease that nobody gave, too."""
        await put_some(engine, 3)
        first = await take(engine)
        await put_some(engine, 3)
        second = await take(engine)
        strange = replace(first[1], holder="a stranger")

        lost = await engine.settle(
            [
                (second[1], outcome),
                (first[2], Done()),
                (strange, Done()),
                (second[0], Done()),
                (first[1], Dead()),
            ]
        )

        assert lost == [strange]
        assert (await counts(engine)).running == 2
        assert await engine.settle([(first[0], Done()), (second[2], Done())]) == []

    async def test_what_is_wrong_with_a_few_of_a_large_bundle_is_not_done_to_the_others(
        self, engine: Engine
    ) -> None:
        """T4, I5, I8: former fences, strangers, those that have ended, and of two outcomes the first."""
        ids = await put_some(engine, 60)
        leases = await take(engine)
        wrong = [replace(leases[3], fence=leases[3].fence - 1), replace(leases[5], holder="a stranger")]
        done = [(lease, Done()) for lease in leases]

        assert await engine.settle([*done[40:], *((lease, Done()) for lease in wrong)]) == wrong
        assert await engine.settle(done[20:41]) == [leases[40]]
        assert await engine.settle([(leases[0], Retried()), *done[6:20], done[0]]) == [leases[0]]

        assert await found(engine, state=State.READY) == [ids[0]]
        assert await found(engine, state=State.RUNNING) == ids[1:6]
        assert (await counts(engine)).deleted == 54

    @pytest.mark.parametrize("special", SPECIAL.values(), ids=list(SPECIAL))
    async def test_one_of_a_large_bundle_leaves_behind_what_it_should(
        self, engine: Engine, special: dict[str, Any]
    ) -> None:
        """T4, I7, I16: its id or unique key, and one job less that runs of its key and task."""
        jobs = [a_job() for _ in range(30)]
        jobs[20] = a_job(**special)
        await engine.put(jobs)
        leases = await take(engine)

        assert await engine.settle([(lease, Done()) for lease in leases]) == []

        assert (await counts(engine)).total == 0
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "tenant", 1))
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, jobs[0].task, 1))
        [again] = await engine.put([a_job(**special)])
        assert again.created is not special.get("chosen", False)
        assert len(await take(engine)) == again.created

    async def test_those_of_a_bundle_that_nobody_renews_are_lost_alone(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, T8, I4, L2."""
        ids = await put_some(engine, 5)
        leases = await take(engine)
        clock.advance(SPAN - A_MOMENT)
        await engine.renew([leases[3], leases[1]], span=SPAN)
        clock.advance(A_MOMENT)

        assert (await engine.sweep()).reaped == 3

        assert [lease.id for lease in await take(engine)] == [ids[0], ids[2], ids[4]]
        assert await engine.settle([(lease, Done()) for lease in leases]) == [leases[0], leases[2], leases[4]]

    async def test_a_bundle_of_which_some_are_done_is_renewed_as_one(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3: those that are done are lost to the renewal, the others live."""
        await put_some(engine, 4)
        leases = await take(engine)
        await settle_one(engine, leases[0], Done())

        renewals = await engine.renew(leases, span=SPAN * 2)

        assert [renewal.until for renewal in renewals] == [None] + [clock.now + SPAN * 2] * 3
        clock.advance(SPAN)
        assert (await engine.sweep()).reaped == 0
        clock.advance(SPAN)
        assert await engine.renew(leases, span=SPAN) == [replace(renewals[0])] * 4
        assert (await engine.sweep()).reaped == 3

    async def test_a_lost_bundle_comes_back_in_its_order(self, engine: Engine, clock: FakeClock) -> None:
        """T8, I15: also when it is reaped in pieces, each with one loss."""
        ids = await put_some(engine, 5)
        await take(engine)
        clock.advance(SPAN)

        reaped = [(await engine.sweep(limit=limit)).reaped for limit in (5, 5)]

        again = await take(engine)
        assert reaped == [5, 0]
        assert [lease.id for lease in again] == ids
        assert {(lease.losses, lease.attempt) for lease in again} == {(1, 2)}

    async def test_a_sweep_reaps_no_more_of_bundles_than_it_may(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T8: the oldest leases first, at most `limit` at a time."""
        ids = await put_some(engine, 6)
        for _ in range(3):
            await take(engine, limit=2)
        clock.advance(SPAN)

        reaped = [(await engine.sweep(limit=limit)).reaped for limit in (1, 2, 100)]

        assert reaped == [1, 2, 3]
        assert sorted(lease.id for lease in await take(engine)) == sorted(ids)

    async def test_the_earliest_end_of_a_bundle_is_when_to_sweep_next(self, engine: Engine) -> None:
        """L2."""
        await put_some(engine, 3)
        await take(engine)

        assert (await engine.sweep()).next_in == SPAN

    @pytest.mark.parametrize("scope", [Scope.QUEUE, Scope.TASK])
    async def test_a_limit_counts_those_of_bundles_that_were_there_before_it(
        self, engine: Engine, scope: Scope
    ) -> None:
        """T2, I2."""
        await put_some(engine, 6)
        leases = await take(engine, limit=3)
        name = "default" if scope is Scope.QUEUE else leases[0].task
        await engine.add_rule(Rule(RuleKind.LIMIT, scope, name, 4))

        assert len(await take(engine)) == 1
        assert await engine.settle([(lease, Done()) for lease in leases]) == []
        assert len(await take(engine)) == 2

    async def test_a_bundle_outlives_the_drop_of_its_queue(self, engine: Engine) -> None:
        """T14: running jobs finish."""
        await put_some(engine, 3)
        leases = await take(engine)

        assert await engine.drop("default") == 0

        assert (await counts(engine)).running == 3
        assert await engine.settle([(lease, Done()) for lease in leases]) == []

    async def test_a_request_to_stop_reaches_one_of_a_bundle(self, engine: Engine, clock: FakeClock) -> None:
        """T9: and a lost lease of it ends as cancelled."""
        ids = await put_some(engine, 3)
        leases = await take(engine)
        await engine.cancel([ids[1]])

        renewals = await engine.renew(leases, span=SPAN)

        assert [renewal.cancel_requested for renewal in renewals] == [False, True, False]
        await lose_leases(engine, clock)
        assert (await info_of(engine, ids[1])).state is State.CANCELLED
        assert [lease.id for lease in await take(engine)] == [ids[0], ids[2]]

    async def test_more_jobs_than_any_bundle_holds_are_leased_in_their_order(self, engine: Engine) -> None:
        """T2, I15."""
        ids = await put_some(engine, 2500)

        leases = await take(engine, limit=2400)

        assert [lease.id for lease in leases] == ids[:2400]
        assert await engine.settle([(lease, Done()) for lease in leases]) == []
        assert (await counts(engine)).total == 100

    async def test_many_hands_on_one_bundle_end_each_of_it_once(
        self, engine: Engine, another: Another
    ) -> None:
        """I5, I8: settles, renewals, notes, requests to stop and looks at the same time."""
        handles = [engine, *[await another() for _ in range(3)]]
        ids = await put_some(engine, 30)
        leases = await take(engine)

        async def settle(handle: Engine, step: int) -> int:
            ended = 0
            for start in range(step):
                piece = leases[start::step]
                ended += len(piece) - len(await handle.settle([(lease, Done()) for lease in piece]))
                await handle.renew(leases[start:], span=SPAN)
            return ended

        async def disturb(handle: Engine) -> int:
            for lease in leases[::5]:
                await handle.note([Note(lease, Progress(1))])
                await handle.cancel([lease.id])
                await handle.put([a_job(id=lease.id)])
            return 0

        ended = await asyncio.gather(
            *(settle(handle, step) for handle, step in zip(handles, (1, 2, 3, 5), strict=True)),
            disturb(handles[0]),
        )

        assert sum(ended) == len(ids)
        left = await counts(engine)
        assert left.running == 0
        assert left.total == left.put - left.deleted

"""Fencing: whoever lost a job has no say in what becomes of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from propolis.core.clock import to_us
from propolis.core.job import Dead, Done, Outcome, Progress, Retried, State
from propolis.core.protocols import Engine, Note, Renewal
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import Way, every_outcome, every_return
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import (
    HOUR,
    a_dead_job,
    counts,
    found,
    info_of,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


class FencingPromise:
    @every_return
    async def test_each_lease_of_a_job_has_a_greater_fence_than_the_one_before(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T2, I3."""
        job = await put_one(engine, max_crashes=10)
        fences = [(await info_of(engine, job.id)).fence]
        for _ in range(3):
            await back.go(engine, clock, job.id)
            fences.append((await info_of(engine, job.id)).fence)

        assert fences == sorted(set(fences))

    async def test_a_fence_is_never_behind_the_clock(self, engine: Engine, clock: FakeClock) -> None:
        """I3: so that none comes back where the last leases were forgotten in a failover."""
        await put_some(engine, 3)
        await put_one(engine, max_crashes=2)  # in a row of its own, where others travel together
        clock.advance(HOUR)

        leases = await take(engine)

        assert {lease.fence >= to_us(clock.now) for lease in leases} == {True}
        assert {lease.fence < 2**53 for lease in leases} == {True}

    async def test_a_lease_is_good_for_its_holder_only(self, engine: Engine) -> None:
        """I3, I5: also if a server that has forgotten the last leases gave the same fence once more."""
        job = await put_one(engine)
        lease = await take_one(engine)
        strange = replace(lease, holder="a stranger")

        assert await engine.renew([strange], span=HOUR) == [Renewal(None)]
        assert await engine.note([Note(strange, began=True)]) == [strange]
        assert await engine.settle([(strange, Done())]) == [strange]

        assert (await info_of(engine, job.id)).began is False
        await settle_one(engine, lease, Done())

    async def test_the_fence_goes_on_growing_after_a_replay(self, engine: Engine) -> None:
        """T13, I3."""
        job = await put_one(engine)
        first = await take_one(engine)
        await settle_one(engine, first, Dead())

        await engine.replay([job.id])

        assert (await info_of(engine, job.id)).fence >= first.fence
        assert (await take_one(engine)).fence > first.fence

    async def test_the_fence_goes_on_growing_when_an_id_is_used_again(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I3: or a lease from its first life would be good for its second."""
        job = await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        await settle_one(engine, await take_one(engine), Done())
        await engine.put([job])
        lease = await take_one(engine)

        assert lease.fence > zombie.fence
        assert await engine.settle([(zombie, Done())]) == [zombie]
        await settle_one(engine, lease, Done())

    @every_outcome
    async def test_a_holder_whose_job_runs_elsewhere_is_refused(
        self, engine: Engine, clock: FakeClock, outcome: Outcome
    ) -> None:
        """T4, T5, T6, T7, T10, T12, I5, S1.6, S1.7."""
        job = await put_one(engine)
        zombie = await take_one(engine, holder="zombie")
        await lose_leases(engine, clock)
        lease = await take_one(engine, holder="heir")
        await engine.cancel([job.id])  # so that Cancelled is refused for its fence alone
        before = await info_of(engine, job.id)

        assert await engine.settle([(zombie, outcome)]) == [zombie]

        assert await info_of(engine, job.id) == before
        assert before.holder == "heir"
        await settle_one(engine, lease, Done())

    @every_outcome
    async def test_a_holder_whose_job_was_taken_away_is_refused(
        self, engine: Engine, clock: FakeClock, outcome: Outcome
    ) -> None:
        """T4, T5, T6, T7, T10, T12, I5, S1.6, S1.7: also while nobody else has it, and no second copy."""
        job = await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        before = await info_of(engine, job.id)

        assert await engine.settle([(zombie, outcome)]) == [zombie]

        assert await info_of(engine, job.id) == before
        assert before.state is State.READY
        assert await order(engine) == [job.id]

    async def test_a_lost_success_is_not_an_error_and_the_job_runs_again(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T4, I5, S1.6."""
        job = await put_one(engine)
        slow = await take_one(engine)
        await lose_leases(engine, clock)

        assert await engine.settle([(slow, Done(result=b"1", keep=HOUR))]) == [slow]

        again = await take_one(engine)
        assert (again.id, again.attempt, again.losses) == (job.id, 2, 1)
        assert (await info_of(engine, job.id)).result is None

    @pytest.mark.parametrize("first", ["settle", "sweep"])
    async def test_a_retry_at_the_very_moment_of_the_timeout_makes_one_job(
        self, engine: Engine, clock: FakeClock, first: str
    ) -> None:
        """T5, T8, I5, S1.15: whoever comes first decides; no duplicate, no loss."""
        job = await put_one(engine)
        lease = await take_one(engine)
        clock.advance(SPAN)

        if first == "settle":
            lost = await engine.settle([(lease, Retried())])
            reaped = (await engine.sweep()).reaped
        else:
            reaped = (await engine.sweep()).reaped
            lost = await engine.settle([(lease, Retried())])

        again = await take_one(engine)
        assert again.id == job.id
        assert await take(engine) == []
        if first == "settle":
            assert (lost, reaped, again.failures, again.losses) == ([], 0, 1, 0)
        else:
            assert (lost, reaped, again.failures, again.losses) == ([lease], 1, 0, 1)

    async def test_a_lost_lease_emits_nothing(self, engine: Engine, clock: FakeClock) -> None:
        """T4, I5."""
        job = await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)

        await engine.settle([(zombie, Done(emit=(a_job(queue="next"),)))])

        assert await found(engine) == [job.id]
        assert await counts(engine, "next") == await counts(engine, "never")

    async def test_a_lost_lease_has_nothing_to_tell(self, engine: Engine, clock: FakeClock) -> None:
        """I5."""
        job = await put_one(engine)
        zombie = await take_one(engine)
        await lose_leases(engine, clock)
        lease = await take_one(engine)
        await engine.note([Note(lease, Progress(1, 2, "half"), ("from the heir",))])

        await engine.note([Note(zombie, Progress(2, 2, "all"), ("from the zombie",))])

        info = await info_of(engine, job.id)
        assert info.progress == Progress(1, 2, "half")
        assert info.log == ("from the heir",)

    async def test_a_lease_of_a_former_life_is_refused(self, engine: Engine) -> None:
        """T13, I3, I5."""
        job = await a_dead_job(engine)
        await engine.replay([job.id])
        old = await take_one(engine)
        await settle_one(engine, old, Dead())
        await engine.replay([job.id])
        new = await take_one(engine)

        assert await engine.settle([(old, Done())]) == [old]
        assert await engine.renew([old], span=SPAN) == [Renewal(None)]
        await settle_one(engine, new, Done())

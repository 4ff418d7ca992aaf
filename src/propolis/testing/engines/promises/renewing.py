"""Renewing: only the holder of a live lease can extend it."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from propolis.core.job import Done, Released, State
from propolis.core.protocols import Engine, Renewal
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import SPAN
from propolis.testing.engines.steps import (
    A_MOMENT,
    info_of,
    lose_leases,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

LOST = Renewal(until=None)


class RenewingPromise:
    async def test_a_renewed_lease_ends_a_span_from_now(self, engine: Engine, clock: FakeClock) -> None:
        """T3, I4."""
        job = await put_one(engine)
        lease = await take_one(engine)
        clock.advance("10s")

        assert await engine.renew([lease], span=SPAN) == [Renewal(clock.now + SPAN)]

        assert (await info_of(engine, job.id)).lease_until == clock.now + SPAN
        clock.advance(SPAN - A_MOMENT)
        assert (await engine.sweep()).reaped == 0
        clock.advance(A_MOMENT)
        assert (await engine.sweep()).reaped == 1

    async def test_a_renewal_replaces_the_end_of_the_lease_and_may_shorten_it(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, S0.9: ten seconds, then one second, is one second."""
        await put_one(engine)
        lease = await take_one(engine)
        await engine.renew([lease], span=timedelta(seconds=10))

        assert await engine.renew([lease], span=timedelta(seconds=1)) == [
            Renewal(clock.now + timedelta(seconds=1))
        ]

        clock.advance("1s")
        await engine.sweep()
        assert (await take_one(engine)).losses == 1

    async def test_a_job_that_is_renewed_runs_once_however_long_it_takes(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, I2, I4."""
        job = await put_one(engine)
        lease = await take_one(engine)
        for _ in range(10):
            clock.advance(SPAN / 2)
            [renewal] = await engine.renew([lease], span=SPAN)
            await engine.sweep()
            assert renewal.until is not None
            assert await take(engine) == []

        info = await info_of(engine, job.id)
        assert (info.attempts, info.crashes, info.fence) == (1, 0, lease.fence)
        await settle_one(engine, lease, Done())

    async def test_a_lease_that_has_ended_cannot_be_renewed_even_if_nobody_took_it_yet(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, I4: the end of a lease is a moment that has come when it is now."""
        await put_one(engine)
        lease = await take_one(engine)
        clock.advance(SPAN)

        assert await engine.renew([lease], span=SPAN) == [LOST]

        assert (await engine.sweep()).reaped == 1

    async def test_a_reaped_lease_cannot_be_renewed(self, engine: Engine, clock: FakeClock) -> None:
        """T3, I4."""
        job = await put_one(engine)
        lease = await take_one(engine)
        await lose_leases(engine, clock)

        assert await engine.renew([lease], span=SPAN) == [LOST]
        assert (await info_of(engine, job.id)).state is State.READY

    async def test_a_settled_lease_cannot_be_renewed(self, engine: Engine) -> None:
        """T3, I4, S4.7."""
        await put_one(engine)
        lease = await take_one(engine)
        await settle_one(engine, lease, Released())

        assert await engine.renew([lease], span=SPAN) == [LOST]

    async def test_the_renewal_of_a_lost_lease_leaves_the_new_holders_alone(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, I4."""
        job = await put_one(engine)
        old = await take_one(engine)
        await lose_leases(engine, clock)
        new = await take_one(engine)

        assert await engine.renew([old], span=SPAN * 100) == [LOST]

        assert (await info_of(engine, job.id)).lease_until == new.until

    async def test_many_leases_are_renewed_in_one_call_and_answered_in_its_order(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3."""
        await put_some(engine, 3)
        first, second, third = await take(engine)
        await settle_one(engine, second, Done())
        clock.advance("1s")

        renewals = await engine.renew([third, second, first], span=SPAN)

        assert renewals == [Renewal(clock.now + SPAN), LOST, Renewal(clock.now + SPAN)]

    async def test_a_lease_that_nobody_gave_cannot_be_renewed(self, engine: Engine) -> None:
        """T3, I4, S4.7."""
        await put_one(engine)
        lease = await take_one(engine)

        renewals = await engine.renew(
            [replace(lease, id="unknown"), replace(lease, fence=lease.fence + 1)], span=SPAN
        )

        assert renewals == [LOST, LOST]

    async def test_a_renewal_tells_whether_somebody_wants_the_job_stopped(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3, T9."""
        stopped, _ = await put_some(engine, 2)
        leases = await take(engine)
        await engine.cancel([stopped])

        renewals = await engine.renew(leases, span=SPAN)

        assert renewals == [
            Renewal(clock.now + SPAN, cancel_requested=True),
            Renewal(clock.now + SPAN, cancel_requested=False),
        ]

    async def test_renewing_nothing_is_fine(self, engine: Engine) -> None:
        """T3."""
        assert await engine.renew([], span=SPAN) == []

"""Noting: what a running job reports is kept in one step, and what it has saved comes back to it."""

from __future__ import annotations

import pytest

from propolis.core.ids import derive_id
from propolis.core.job import Dead, Done, Progress, Released, Retried, State
from propolis.core.protocols import Engine, Note, Rule, RuleKind, Scope
from propolis.errors import QueueFull
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending, every_return
from propolis.testing.engines.samples import SPAN, a_job
from propolis.testing.engines.steps import (
    HOUR,
    counts,
    info_of,
    lose_leases,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)

SAVED = bytes(range(256)) * 256  # 64 KiB, with every byte that there is


class NotingPromise:
    async def test_a_first_run_has_no_checkpoint(self, engine: Engine) -> None:
        """T3b."""
        job = await put_one(engine)

        assert (await take_one(engine)).checkpoint is None
        assert (await info_of(engine, job.id)).checkpoint is None

    @every_return
    async def test_the_next_lease_brings_the_checkpoint_back(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T3b, T5, T7, T8."""
        job = await put_one(engine, max_crashes=10)
        await _save(engine, job.id, SAVED)

        for _ in range(3):
            await back.go(engine, clock, job.id)

            lease = await take_one(engine)
            assert (lease.id, lease.checkpoint) == (job.id, SAVED)
            await settle_one(engine, lease, Released())
        assert (await info_of(engine, job.id)).checkpoint == SAVED

    async def test_the_newest_checkpoint_counts(self, engine: Engine) -> None:
        """T3b: also an empty one; a note without one changes nothing."""
        job = await put_one(engine)
        lease = await take_one(engine)

        assert await engine.note([Note(lease, checkpoint=b"1"), Note(lease, checkpoint=b"2")]) == []
        assert await engine.note([Note(lease, Progress(1))]) == []

        assert (await info_of(engine, job.id)).checkpoint == b"2"
        assert await engine.note([Note(lease, checkpoint=b"")]) == []
        await settle_one(engine, lease, Retried())
        assert (await take_one(engine)).checkpoint == b""

    async def test_a_checkpoint_goes_with_its_job_into_another_queue(self, engine: Engine) -> None:
        """T3b, T5."""
        await put_one(engine)
        lease = await take_one(engine)
        await engine.note([Note(lease, checkpoint=SAVED)])

        for queue in ("other", "further", "default"):
            await settle_one(engine, lease, Retried(queue=queue))
            lease = await take_one(engine, queue)

            assert lease.checkpoint == SAVED

    async def test_each_job_has_a_checkpoint_of_its_own(self, engine: Engine) -> None:
        """T3b."""
        await put_some(engine, 3)
        one, two, three = await take(engine)
        await engine.note([Note(one, checkpoint=b"one"), Note(three, checkpoint=b"three")])

        await engine.settle([(lease, Retried()) for lease in (one, two, three)])

        assert [lease.checkpoint for lease in await take(engine)] == [b"one", None, b"three"]

    @every_ending
    async def test_a_checkpoint_stays_with_a_dead_job_only(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T3b, T4, T6, T8, T9, T10, T11, T12."""
        job = await put_one(engine, **MORTAL)
        await _save(engine, job.id, SAVED)

        await ending.go(engine, clock, job.id)

        info = await info_of(engine, job.id)
        assert info.state is ending.state
        assert info.checkpoint == (SAVED if ending.state is State.DEAD else None)

    async def test_a_replayed_job_goes_on_where_it_was(self, engine: Engine) -> None:
        """T3b, T13."""
        job = await put_one(engine)
        await _save(engine, job.id, SAVED)
        await settle_one(engine, await take_one(engine), Dead())

        assert await engine.replay([job.id]) == [True]

        lease = await take_one(engine)
        assert (lease.attempt, lease.checkpoint) == (1, SAVED)

    @pytest.mark.parametrize("ending", [Done(), Done(keep=HOUR), Dead()], ids=["gone", "kept", "dead"])
    async def test_a_job_that_is_put_again_begins_anew(self, engine: Engine, ending: Done | Dead) -> None:
        """T1, T14."""
        job = await put_one(engine)
        await _save(engine, job.id, SAVED)
        await settle_one(engine, await take_one(engine), ending)
        await engine.delete([job.id])

        await engine.put([job])

        assert (await take_one(engine)).checkpoint is None

    async def test_the_note_of_a_lost_lease_is_answered_with_it(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T3b: nothing of it is kept, and others are not touched."""
        first, second = await put_some(engine, 2)
        zombie, _ = await take(engine)
        await lose_leases(engine, clock)
        heir, other = await take(engine)
        notes = [
            Note(zombie, Progress(1), ("from the zombie",), True, b"zombie", (a_job(queue="next"),)),
            Note(heir, checkpoint=b"heir"),
            Note(other, checkpoint=b"other"),
        ]

        assert await engine.note(notes) == [zombie]

        info = await info_of(engine, first)
        assert (info.progress, info.log, info.began, info.checkpoint) == (None, (), False, b"heir")
        assert (await info_of(engine, second)).checkpoint == b"other"
        assert await take(engine, "next") == []

    async def test_a_lease_whose_time_is_over_notes_nothing(self, engine: Engine, clock: FakeClock) -> None:
        """T3b: also before anybody has reaped it; settling it still counts."""
        job = await put_one(engine)
        lease = await take_one(engine)
        clock.advance(SPAN)

        assert await engine.note([Note(lease, checkpoint=b"late", puts=(a_job(queue="next"),))]) == [lease]

        assert (await info_of(engine, job.id)).checkpoint is None
        assert await take(engine, "next") == []
        await settle_one(engine, lease, Done())

    async def test_a_renewed_lease_still_notes(self, engine: Engine, clock: FakeClock) -> None:
        """T3, T3b."""
        await put_one(engine)
        lease = await take_one(engine)
        clock.advance(SPAN / 2)
        await engine.renew([lease], span=SPAN)
        clock.advance(SPAN / 2)

        assert await engine.note([Note(lease, checkpoint=b"1")]) == []

    @every_return
    async def test_that_a_run_has_begun_is_kept_until_its_lease_ends(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T3b."""
        job = await put_one(engine, max_crashes=10)
        lease = await take_one(engine)
        assert not (await info_of(engine, job.id)).began

        await engine.note([Note(lease, began=True)])
        await engine.note([Note(lease, Progress(1))])

        assert (await info_of(engine, job.id)).began
        await settle_one(engine, lease, Released())
        assert not (await info_of(engine, job.id)).began
        await back.go(engine, clock, job.id)
        await take_one(engine)
        assert not (await info_of(engine, job.id)).began

    async def test_a_note_puts_jobs_in_its_step(self, engine: Engine, clock: FakeClock) -> None:
        """T1, T3b."""
        job = await put_one(engine)
        lease = await take_one(engine)
        here, there, later = a_job(), a_job(queue="other"), a_job(delay_ms=1000)

        assert await engine.note([Note(lease, checkpoint=b"1", puts=(here, there, later))]) == []

        assert (await info_of(engine, job.id)).checkpoint == b"1"
        assert await order(engine) == [here.id]
        assert await order(engine, "other") == [there.id]
        clock.advance("1s")
        assert await order(engine) == [later.id]

    async def test_a_note_that_is_repeated_makes_no_second_job(self, engine: Engine) -> None:
        """T1, T3b, I1: also when the first has run and gone."""
        job = await put_one(engine)
        lease = await take_one(engine)
        puts = tuple(a_job(id=derive_id(job.id, n), chosen=True, queue=q) for n, q in enumerate("ab"))
        note = Note(lease, checkpoint=b"1", puts=puts)
        await engine.note([note])
        await settle_one(engine, await take_one(engine, "a"), Done())

        assert await engine.note([note, note]) == []

        assert await take(engine, "a") == []
        assert await order(engine, "b") == [puts[1].id]

    async def test_a_put_of_a_note_whose_key_is_held_adds_nothing(self, engine: Engine) -> None:
        """T1, T3b, I12: and does not hinder; also inside of one note."""
        holder = await put_one(engine, unique="k", queue="other")
        job = await put_one(engine)
        lease = await take_one(engine)
        first, twin = a_job(unique="new"), a_job(unique="new")

        assert await engine.note([Note(lease, puts=(a_job(unique="k"), first, twin))]) == []

        assert await order(engine) == [first.id]
        assert await order(engine, "other") == [holder.id]
        assert (await info_of(engine, job.id)).state is State.RUNNING

    async def test_a_note_whose_jobs_find_no_room_is_refused_wholly(self, engine: Engine) -> None:
        """T1, T3b: as a put is."""
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "full", 1))
        job = await put_one(engine)
        lease = await take_one(engine)
        await engine.note([Note(lease, checkpoint=b"before")])
        puts = (a_job(queue="other"), a_job(queue="full"), a_job(queue="full"))

        with pytest.raises(QueueFull):
            await engine.note([Note(lease, Progress(1), ("line",), True, b"after", puts)])

        info = await info_of(engine, job.id)
        assert (info.checkpoint, info.progress, info.log, info.began) == (b"before", None, (), False)
        assert await counts(engine, "other") == await counts(engine, "never")
        assert await counts(engine, "full") == await counts(engine, "never")
        assert await engine.note([Note(lease, checkpoint=b"after", puts=puts[:2])]) == []
        assert await order(engine, "full") == [puts[1].id]


async def _save(engine: Engine, job_id: str, checkpoint: bytes) -> None:
    """In a run that is given back."""
    lease = await take_one(engine)
    assert lease.id == job_id
    assert await engine.note([Note(lease, checkpoint=checkpoint)]) == []
    await settle_one(engine, lease, Released())

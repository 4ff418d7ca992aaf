"""Putting: a job that was accepted is there, once."""

from __future__ import annotations

import pytest

from propolis.core.job import Crashed, Done, State
from propolis.core.protocols import KNOWN_FOR, Engine, Receipt, Rule, RuleKind, Scope
from propolis.core.wire import CRASHES_CEILING
from propolis.errors import BadName, BadSetting
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import (
    A_MOMENT,
    a_cancelled_job,
    a_done_job,
    counts,
    found,
    info_of,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


class PuttingPromise:
    async def test_a_put_job_is_ready_under_the_id_its_producer_made(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I13, S0.3."""
        job = a_job("hello", queue="mail", priority=7)

        assert await engine.put([job]) == [Receipt(job.id, created=True)]

        info = await info_of(engine, job.id)
        assert (info.id, info.task, info.queue, info.priority) == (job.id, job.task, "mail", 7)
        assert (info.state, info.put_at, info.due_at) == (State.READY, clock.now, clock.now)
        assert (info.attempts, info.failures, info.crashes) == (0, 0, 0)

    async def test_one_put_adds_many_jobs_and_gives_a_receipt_for_each_in_their_order(
        self, engine: Engine
    ) -> None:
        """T1."""
        jobs = [a_job(queue="mail"), a_job(queue="sms"), a_job(queue="mail")]

        receipts = await engine.put(jobs)

        assert receipts == [Receipt(job.id, created=True) for job in jobs]
        assert await found(engine) == [job.id for job in jobs]

    async def test_a_put_of_nothing_adds_nothing(self, engine: Engine) -> None:
        """T1."""
        assert await engine.put([]) == []
        assert await found(engine) == []

    async def test_a_put_repeated_with_its_token_adds_nothing(self, engine: Engine) -> None:
        """T1, I1."""
        jobs = [a_job(), a_job()]
        await engine.put(jobs, token="once")

        assert await engine.put(jobs, token="once") == [Receipt(job.id, created=False) for job in jobs]
        assert len(await take(engine)) == 2

    async def test_a_put_repeated_with_its_token_names_the_jobs_that_are_there(self, engine: Engine) -> None:
        """I1: its own, and those in whose favour some of it was not put."""
        holder = await put_one(engine, unique="u")
        jobs = [a_job(), a_job(unique="u")]
        first = await engine.put(jobs, token="t")

        assert await engine.put(jobs, token="t") == [Receipt(r.id, created=False) for r in first]
        assert [receipt.id for receipt in first] == [jobs[0].id, holder.id]

    async def test_a_token_is_known_after_its_jobs_have_gone_for_a_day_from_its_put(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I1."""
        job = a_job()
        await engine.put([job], token="once")
        await settle_one(engine, await take_one(engine), Done())

        clock.advance(KNOWN_FOR - A_MOMENT)
        await engine.sweep()

        assert await engine.put([job], token="once") == [Receipt(job.id, created=False)]
        assert await take(engine) == []

    async def test_different_tokens_name_different_puts(self, engine: Engine) -> None:
        """T1: what is known is the call, not its contents."""
        await engine.put([a_job()], token="one")

        [receipt] = await engine.put([a_job()], token="two")

        assert receipt.created
        assert len(await take(engine)) == 2

    async def test_a_second_job_with_a_used_id_is_not_put_and_changes_nothing(self, engine: Engine) -> None:
        """T1, I1."""
        job = await put_one(engine, "first")
        before = await info_of(engine, job.id)

        receipts = await engine.put([a_job("second", id=job.id, queue="other", priority=9)])

        assert receipts == [Receipt(job.id, created=False)]
        assert await info_of(engine, job.id) == before
        assert len(await take(engine)) == 1

    async def test_an_id_is_used_while_its_job_runs(self, engine: Engine) -> None:
        """T1, I1."""
        job = await put_one(engine)
        await take_one(engine)

        assert await engine.put([a_job(id=job.id)]) == [Receipt(job.id, created=False)]

    @pytest.mark.parametrize("others", [0, 1], ids=["alone", "with others"])
    async def test_an_id_is_used_wherever_its_job_is(self, engine: Engine, others: int) -> None:
        """T1, I1: in line, to come, held, running alone or with others, ended; or gone, if it was chosen."""
        used = [(await a_done_job(engine, keep=None, id="chosen", chosen=True)).id]
        used += [(await a_done_job(engine)).id, (await a_cancelled_job(engine)).id]
        used += await put_some(engine, 3)
        await take(engine)
        used += [(await put_one(engine)).id]
        await take_one(engine)
        used += [(await put_one(engine, delay_ms=60_000)).id]
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "kept"))
        used += [(await put_one(engine, task="kept")).id]
        assert await take(engine) == []
        used += [(await put_one(engine)).id]
        before = await found(engine, queue="default")

        for job_id in used:
            more = [a_job(queue="elsewhere") for _ in range(others)]
            receipts = await engine.put([a_job(id=job_id), *more])
            assert [receipt.created for receipt in receipts] == [False, *[True] * others], job_id

        assert await found(engine, queue="default") == before
        assert (await counts(engine)).put == len(used)

    @pytest.mark.parametrize("others", [0, 1], ids=["alone", "with others"])
    async def test_an_id_between_those_of_running_jobs_is_free(self, engine: Engine, others: int) -> None:
        """T1: also that of one that ran with them and has gone."""
        await engine.put([a_job(id=name) for name in ("a", "c", "e")])
        leases = {lease.id: lease for lease in await take(engine)}
        await settle_one(engine, leases["c"], Done())

        for name in ("b", "c", "d"):
            receipts = await engine.put([a_job(id=name), *(a_job() for _ in range(others))])
            assert all(receipt.created for receipt in receipts), name

    @every_ending
    async def test_an_id_is_used_while_its_ended_job_is_kept(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T1, I1, I10."""
        job = await put_one(engine, **MORTAL)
        await ending.go(engine, clock, job.id)

        assert await engine.put([a_job(id=job.id)]) == [Receipt(job.id, created=False)]
        assert (await info_of(engine, job.id)).state is ending.state

    async def test_a_chosen_id_is_known_for_a_day_after_its_job_has_ended_and_gone(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I1."""
        job = await a_done_job(engine, keep=None, id="invoice-7", chosen=True)

        clock.advance(KNOWN_FOR - A_MOMENT)
        await engine.sweep()

        assert await engine.put([job]) == [Receipt("invoice-7", created=False)]
        assert await take(engine) == []

    async def test_the_day_of_a_chosen_id_begins_when_its_job_ends(
        self, engine: Engine, clock: FakeClock
    ) -> None:
        """T1, I1."""
        job = await put_one(engine, id="invoice-7", chosen=True)
        clock.advance(KNOWN_FOR)
        await engine.sweep()
        await settle_one(engine, await take_one(engine), Done())

        clock.advance(KNOWN_FOR - A_MOMENT)
        await engine.sweep()

        assert await engine.put([job]) == [Receipt("invoice-7", created=False)]

    async def test_a_chosen_id_is_known_after_its_ended_job_was_deleted(self, engine: Engine) -> None:
        """T1, T14, I1."""
        job = await a_cancelled_job(engine, id="invoice-7", chosen=True)
        assert await engine.delete([job.id]) == [True]

        assert await engine.put([job]) == [Receipt("invoice-7", created=False)]

    async def test_an_id_that_nobody_chose_is_free_when_its_job_has_gone(self, engine: Engine) -> None:
        """T1: such ids are made anew for each job, and are not worth remembering."""
        job = await a_done_job(engine, keep=None)

        assert await engine.put([job]) == [Receipt(job.id, created=True)]

    async def test_of_two_jobs_with_one_id_in_a_bundle_the_first_is_put(self, engine: Engine) -> None:
        """T1, I1."""
        receipts = await engine.put([a_job("first", id="x"), a_job("second", id="x", queue="other"), a_job()])

        assert [receipt.created for receipt in receipts] == [True, False, True]
        assert (await info_of(engine, "x")).queue == "default"
        assert (await counts(engine)).put == 2

    async def test_a_known_id_does_not_keep_the_rest_of_its_bundle_out(self, engine: Engine) -> None:
        """T1."""
        known = await put_one(engine)
        new = a_job()

        receipts = await engine.put([known, new])

        assert receipts == [Receipt(known.id, created=False), Receipt(new.id, created=True)]
        assert await order(engine) == [known.id, new.id]

    async def test_a_bundle_with_a_job_that_no_engine_should_hold_adds_nothing(self, engine: Engine) -> None:
        """T1: each call happens wholly or not at all."""
        with pytest.raises(BadName):
            await engine.put([a_job(), a_job(priority=101)], token="once")

        assert await found(engine) == []
        assert [receipt.created for receipt in await engine.put([a_job()], token="once")] == [True]

    @pytest.mark.parametrize("most", [0, CRASHES_CEILING + 1, 2**31, 2**63])
    async def test_more_crashes_than_every_engine_can_count_are_refused(
        self, engine: Engine, most: int
    ) -> None:
        """T1, T8: the same bound everywhere, so that a job may move from one engine to another."""
        with pytest.raises(BadSetting, match=f"max_crashes={most}"):
            await engine.put([a_job(max_crashes=most)])

        assert await found(engine) == []

    async def test_a_job_may_crash_as_often_as_an_engine_can_count(self, engine: Engine) -> None:
        """T1, T8b."""
        job = await put_one(engine, max_crashes=CRASHES_CEILING)
        await settle_one(engine, await take_one(engine), Crashed())

        info = await info_of(engine, job.id)
        assert (info.state, info.crashes) == (State.READY, 1)

    async def test_two_jobs_with_the_same_payload_are_two_jobs(self, engine: Engine) -> None:
        """T1, S1.26: an id tells them apart, not what they say."""
        await engine.put([a_job("same"), a_job("same")])

        first, second = await take(engine)
        await settle_one(engine, first, Done())

        assert second.id != first.id
        assert (await counts(engine)).running == 1

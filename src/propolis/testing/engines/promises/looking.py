"""Looking: what an operator sees is what is there, and looking changes nothing."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from propolis.core.job import Dead, Done, Error, Event, Outcome, Progress, Released, Retried, Snoozed, State
from propolis.core.protocols import (
    HISTORY_EVENTS,
    LOG_LINES,
    Counts,
    Engine,
    Filter,
    Note,
)
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import (
    HOUR,
    a_batch,
    a_cancelled_job,
    a_dead_job,
    a_done_job,
    counts,
    found,
    info_of,
    members_of,
    order,
    put_one,
    put_some,
    settle_one,
    take,
    take_one,
)


async def one_in_every_state(engine: Engine) -> dict[str, str]:
    """The ids of six jobs, all on the default queue, by the state each is in."""
    done = await a_done_job(engine)
    dead = await a_dead_job(engine, task="tests.dies")
    cancelled = await a_cancelled_job(engine)
    running = await put_one(engine)
    await take_one(engine)
    ready = await put_one(engine)
    scheduled = await put_one(engine, delay_ms=60_000)
    return {
        "done": done.id,
        "dead": dead.id,
        "cancelled": cancelled.id,
        "running": running.id,
        "ready": ready.id,
        "scheduled": scheduled.id,
    }


class LookingPromise:
    async def test_queues_are_shown_page_by_page(self, engine: Engine) -> None:
        """L5."""
        names = [f"q{n}" for n in range(5)]
        for name in reversed(names):
            await put_one(engine, queue=name)

        pages = [list(await engine.queues(limit=2, after=after)) for after in (None, "q1", "q3", "q4")]

        assert pages == [["q0", "q1"], ["q2", "q3"], ["q4"], []]

    async def test_an_engine_has_every_verb_of_the_contract(self, engine: Engine) -> None:
        """S0.2: a missing one is found here and not at the first call."""
        parts = [part for part in Engine.__mro__ if part.__module__ == Engine.__module__]
        verbs = [name for part in parts for name in vars(part) if not name.startswith("_")]

        assert [name for name in verbs if not hasattr(engine, name)] == []
        assert {"put", "lease", "settle", "find", "wait"} <= set(verbs)

    async def test_looking_changes_nothing(self, engine: Engine) -> None:
        """S0.6: what is leased after it was looked at is leased for the first time."""
        job = await put_one(engine)
        before = await info_of(engine, job.id)

        for _ in range(3):
            await engine.get(job.id)
            await engine.find(Filter())
            await engine.queues()
            await engine.position(job.id)
            await engine.rules()
            await engine.batches()

        assert await info_of(engine, job.id) == before
        assert (await take_one(engine)).attempt == 1

    async def test_what_is_not_there_is_not_seen(self, engine: Engine) -> None:
        """I8."""
        assert await engine.get("unknown") is None
        assert await engine.batch("unknown") is None
        assert await engine.queues() == {}
        assert (await engine.find(Filter())).jobs == []

    async def test_counts_tell_how_many_jobs_are_in_each_state(self, engine: Engine) -> None:
        """I8, S0.5."""
        await one_in_every_state(engine)
        await a_done_job(engine, keep=None)

        assert await counts(engine) == Counts(
            ready=1, scheduled=1, running=1, done=1, dead=1, cancelled=1, put=7, deleted=1
        )

    async def test_counts_equal_a_recount(self, engine: Engine, clock: FakeClock) -> None:
        """I8, S4.12."""
        await one_in_every_state(engine)
        for outcome in (Retried(delay=HOUR), Released(), Snoozed(HOUR), Dead(), Done(keep=HOUR)):
            await put_one(engine)
            await settle_one(engine, await take_one(engine), outcome)
        clock.advance(SPAN)
        await engine.sweep()

        recount = Counter(info.state for info in (await engine.find(Filter())).jobs)

        now = await counts(engine)
        assert now.waiting == recount[State.READY]
        assert (now.running, now.done) == (recount[State.RUNNING], recount[State.DONE])
        assert (now.dead, now.cancelled) == (recount[State.DEAD], recount[State.CANCELLED])
        assert now.total == recount.total() == now.put - now.deleted

    async def test_the_size_of_a_queue_is_what_can_be_leased_now(self, engine: Engine) -> None:
        """I8, S0.5: and the total is another number."""
        ids = await put_some(engine, 20)
        for hidden in range(20):
            now = await counts(engine)
            assert (now.ready, now.total) == (20 - hidden, 20)
            assert await found(engine, state=State.READY, scheduled=False) == ids[hidden:]
            await take_one(engine)

        assert (await counts(engine)).ready == 0
        assert (await counts(engine)).total == 20

    async def test_queues_are_listed_by_name_also_when_they_are_empty(self, engine: Engine) -> None:
        """I8."""
        for name in ("sms", "fax", "mail"):
            await a_done_job(engine, keep=None, queue=name)

        queues = await engine.queues()

        assert list(queues) == ["fax", "mail", "sms"]
        assert queues["fax"] == Counts(put=1, deleted=1)

    async def test_jobs_are_found_by_every_fact_that_is_given(self, engine: Engine) -> None:
        """I8, S0.2, S4.13."""
        ids = await one_in_every_state(engine)
        batch = a_batch()
        [member] = members_of(batch, 1, queue="other")
        await engine.put_batch(batch, [member])

        for state in State:
            if state is not State.READY:
                assert await found(engine, state=state) == [ids[state.value]]
        assert await found(engine, state=State.READY) == [ids["ready"], ids["scheduled"], member.id]
        assert await found(engine, scheduled=True) == [ids["scheduled"]]
        assert await found(engine, queue="other") == [member.id]
        assert await found(engine, task="tests.dies") == [ids["dead"]]
        assert await found(engine, reason="failed") == [ids["dead"]]
        assert await found(engine, batch=batch.id) == [member.id]
        assert await found(engine, queue="other", state=State.DEAD) == []

    async def test_jobs_are_listed_in_the_order_of_their_puts_whatever_became_of_them(
        self, engine: Engine
    ) -> None:
        """I15."""
        ids = await put_some(engine, 5)
        leases = await take(engine, limit=4)
        outcomes: list[Outcome] = [Retried(), Done(keep=HOUR), Dead(), Released()]
        await engine.settle(list(zip(leases, outcomes, strict=True)))

        assert await found(engine) == ids

    async def test_jobs_are_listed_page_by_page(self, engine: Engine) -> None:
        """I8."""
        ids = await put_some(engine, 5)
        await settle_one(engine, await take_one(engine), Dead())
        seen: list[list[str]] = []
        after: int | None = None
        while len(seen) < 4:
            page = await engine.find(Filter(), limit=2, after=after)
            seen.append([info.id for info in page.jobs])
            after = page.after
            if after is None:
                break

        assert [name for page_ids in seen for name in page_ids] == ids
        assert max(len(page_ids) for page_ids in seen) == 2
        assert after is None

    async def test_the_happy_path_writes_no_history(self, engine: Engine, clock: FakeClock) -> None:
        """T1, T2, T4: its times and counters tell it."""
        job = await put_one(engine)
        put_at = clock.now
        clock.advance("1s")
        lease = await take_one(engine)
        started_at = clock.now
        clock.advance("1s")
        await engine.renew([lease], span=SPAN)
        await settle_one(engine, lease, Done(keep=HOUR))

        info = await info_of(engine, job.id)

        assert info.history == ()
        assert (info.put_at, info.started_at, info.ended_at) == (put_at, started_at, clock.now)

    async def test_the_history_tells_why_a_job_ran_again(self, engine: Engine, clock: FakeClock) -> None:
        """T5, T7, S1.4: with the attempt and the fence that each line speaks of."""
        job = await put_one(engine)
        expected = []
        for kind, outcome in (
            ("released", Released()),
            ("retried", Retried()),
            ("snoozed", Snoozed(timedelta(0))),
        ):
            clock.advance("1s")
            lease = await take_one(engine)
            await settle_one(engine, lease, outcome)
            expected.append(Event(clock.now, kind, lease.attempt, lease.fence, HOLDER))

        assert (await info_of(engine, job.id)).history == tuple(expected)
        assert [event.attempt for event in expected] == [1, 1, 2]

    async def test_the_history_of_a_retry_tells_its_error(self, engine: Engine) -> None:
        """T5, S1.4."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried(error=Error("ValueError", "too small")))

        [event] = (await info_of(engine, job.id)).history

        assert event.note == "ValueError: too small"

    async def test_the_history_tells_what_an_operator_did(self, engine: Engine, clock: FakeClock) -> None:
        """T13."""
        job = await put_one(engine)
        await engine.reschedule(job.id, clock.now)
        await settle_one(engine, await take_one(engine), Dead())
        await engine.replay([job.id])

        assert [event.kind for event in (await info_of(engine, job.id)).history] == [
            "rescheduled",
            "replayed",
        ]

    async def test_the_history_keeps_its_newest_events(self, engine: Engine) -> None:
        """T7."""
        await put_one(engine)
        lease = await take_one(engine)
        fences = [lease.fence]
        for _ in range(HISTORY_EVENTS + 2):
            swap = await engine.exchange([(lease, Released())], {"default": 1}, span=SPAN, holder=HOLDER)
            [lease] = swap.leases
            fences.append(lease.fence)

        history = (await info_of(engine, lease.id)).history

        assert [event.fence for event in history] == fences[-HISTORY_EVENTS - 1 : -1]

    async def test_a_running_job_tells_how_far_it_is(self, engine: Engine) -> None:
        """S0.6."""
        first, second = await put_some(engine, 2)
        one, two = await take(engine)

        await engine.note([Note(one, Progress(1, 10, "read"), ("begin",)), Note(two, lines=("hello", "you"))])
        await engine.note([Note(one, Progress(2, 10), ("go on",)), Note(two)])

        info, other = await info_of(engine, first), await info_of(engine, second)
        assert (info.progress, info.log) == (Progress(2, 10), ("begin", "go on"))
        assert (other.progress, other.log) == (None, ("hello", "you"))

    async def test_the_log_keeps_its_newest_lines(self, engine: Engine) -> None:
        """I8."""
        job = await put_one(engine)
        lease = await take_one(engine)
        lines = [f"line {number}" for number in range(LOG_LINES + 50)]

        await engine.note([Note(lease, lines=tuple(lines[:80]))])
        await engine.note([Note(lease, lines=tuple(lines[80:]))])

        assert (await info_of(engine, job.id)).log == tuple(lines[-LOG_LINES:])

    async def test_the_record_of_a_job_names_its_keys(self, engine: Engine) -> None:
        """I8."""
        job = a_job(unique="u", key="k", priority=-3)
        await engine.put([job])

        info = await info_of(engine, job.id)

        assert (info.unique, info.key, info.priority) == ("u", "k", -3)
        assert (info.batch, info.holder, info.result) == (None, None, None)
        assert await order(engine) == [job.id]

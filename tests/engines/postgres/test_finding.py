"""I8, L5: jobs are found bite by bite, and none of them is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, Outcome, Released, Retried, State
from propolis.core.protocols import Engine, Filter
from propolis.engines.postgres import engine as postgres_engine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

QUEUES = [f"q{n}" for n in range(7)]
HOUR = timedelta(hours=1)
FILTERS = [
    Filter(),
    Filter(queue="q1"),
    Filter(task="rare"),
    Filter(scheduled=True),
    Filter(scheduled=False),
    Filter(reason="failed"),
    Filter(batch="b"),
    Filter(batch="b", queue="q2", task="rare"),
    Filter(batch="b", state=State.RUNNING),
    Filter(queue="q2", state=State.READY),
    Filter(queue="q2", state=State.DEAD),
    Filter(state=State.DEAD, reason="other"),
    Filter(state=State.RUNNING, task="rare"),
    Filter(state=State.DEAD, scheduled=True),
    *[Filter(state=state) for state in State],
]


def look_at(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(postgres_engine, "COUNTED", most)


async def fill(engine: Engine) -> None:
    """Some hundred jobs in every state, in several queues; some run as members of chunks, some as rows."""
    await engine.put_batch(Batch(id="b"), seal=False)
    for queue in QUEUES:
        await engine.put([a_job(queue=queue, task="rare" if n % 9 == 0 else "t") for n in range(120)])
        await engine.put([a_job(queue=queue, task="rare", batch="b", member=n, priority=1) for n in range(6)])
        await engine.put([a_job(queue=queue, delay_ms=10**8) for _ in range(10)])
        await engine.put([a_job(queue=queue, key=f"k{n}", priority=2) for n in range(8)])
        leases = await engine.lease({queue: 104}, span=SPAN, holder=HOLDER)
        ends: list[Outcome] = [Done(keep=HOUR), Dead(), Dead("other"), Retried()]
        await engine.settle([(lease, ends[n % 4]) for n, lease in enumerate(leases[::2])])
    await engine.put(waiting := [a_job(queue="q3") for _ in range(30)])
    await engine.cancel([job.id for job in waiting])


async def pages(engine: Engine, where: Filter, limit: int) -> AsyncIterator[list[str]]:
    after = None
    while True:
        page = await engine.find(where, limit=limit, after=after)
        assert len(page.jobs) <= limit
        yield [info.id for info in page.jobs]
        if (after := page.after) is None:
            return


async def walked(engine: Engine, where: Filter, limit: int) -> list[str]:
    return [job_id async for page in pages(engine, where, limit) for job_id in page]


async def test_a_walk_finds_each_job(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is looked for, and however short the pages are; each job once, unless many run."""
    await fill(engine)
    ordered = {where: await walked(engine, where, 2000) for where in FILTERS}
    assert len(ordered[Filter()]) == 7 * 144 + 30
    assert all(ordered[where] for where in FILTERS if where != Filter(state=State.DEAD, scheduled=True))

    for most, limit in ((2000, 70), (400, 7), (100, 100), (20, 1000)):
        look_at(monkeypatch, most)
        for where in FILTERS:
            found = await walked(engine, where, limit)
            assert set(found) == set(ordered[where]), (where, most, limit)
            if most == 2000 or where.reason or where.state not in (None, State.RUNNING):
                assert max(Counter(found).values(), default=1) == 1, (where, most, limit)
            if most == 2000 or (where.queue and where.state is State.DEAD):
                assert found == ordered[where], (where, most, limit)
    await engine.sweep()


async def test_a_page_that_matches_nothing_says_where_to_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(monkeypatch, 100)
    await engine.put([a_job(task="t") for _ in range(350)])
    await engine.put([last := a_job(task="rare")])

    found = [page async for page in pages(engine, Filter(task="rare"), 10)]

    assert found == [[], [], [], [last.id]]


async def test_few_jobs_of_many_queues_are_in_the_order_of_puts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at(monkeypatch, 1000)
    jobs = [a_job(queue=f"q{n * 37 % 90}") for n in range(180)]
    await engine.put(jobs)

    assert await walked(engine, Filter(), 50) == [job.id for job in jobs]


async def test_a_list_that_began_in_order_leaves_out_what_it_has_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there are too many queues, it goes on in one after the other."""
    look_at(monkeypatch, 100)
    jobs = [a_job(queue=f"q{n % 5}") for n in range(20)]
    await engine.put(jobs)
    page = await engine.find(Filter(), limit=10)
    assert [info.id for info in page.jobs] == [job.id for job in jobs[:10]]

    await engine.put(others := [a_job(queue=f"other{n}") for n in range(50)])
    found = []
    while page.after is not None:
        page = await engine.find(Filter(), limit=10, after=page.after)
        found += [info.id for info in page.jobs]

    assert sorted(found) == sorted(job.id for job in (*jobs[10:], *others))


@pytest.mark.parametrize("outcome", [Retried(), Released(), Done(keep=HOUR), Dead()])
async def test_a_job_whose_run_ends_meanwhile_is_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, outcome: Outcome
) -> None:
    """Where many run, those that were leased together come last: some may have left for a place before."""
    look_at(monkeypatch, 100)
    await engine.put(jobs := [a_job() for _ in range(300)])
    leases = await engine.lease({"default": 200}, span=SPAN, holder=HOLDER)
    found: list[str] = []
    async for page in pages(engine, Filter(), 100):
        found += page
        if len(found) == 100:  # all that wait
            await engine.settle([(lease, outcome) for lease in leases[:50]])

    assert set(found) == {job.id for job in jobs}


async def test_a_job_is_got_wherever_it_is(engine: Engine) -> None:
    await fill(engine)
    for job_id in await walked(engine, Filter(queue="q1"), 2000):
        info = await engine.get(job_id)
        assert info is not None
        assert info.id == job_id

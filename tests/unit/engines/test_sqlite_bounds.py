"""L5 on SQLite: the cases that showed work without bounds, each by the steps of SQLite's virtual machine.

What a call may cost is told by what it costs where there is next to nothing; contract/test_costs.py compares
all verbs at two sizes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, Lease, Unknown
from propolis.core.protocols import BITE, REMOVALS, Filter, Rule, RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.engines.sqlite import snapshot
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.engines.sqlite.steps import claims
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.meters import SQLiteMeter
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import bare

MANY = 5000
A_BITE = 300 * BITE  # steps: what a call that does a bite of 1,000 jobs may take
A_FEW = 5000  # steps: what any other call may take for ten jobs


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: FakeClock) -> AsyncIterator[SQLiteEngine]:
    retention = Retention(dead_max=3)
    engine = SQLiteEngine(tmp_path / "jobs.db", clock=clock, synchronous="normal", retention=retention)
    yield await engine.open()
    await engine.close()


@pytest.fixture
def meter(engine: SQLiteEngine) -> SQLiteMeter:
    return SQLiteMeter(engine)


async def lease(engine: SQLiteEngine, n: int = 10, queue: str = "default") -> list[str]:
    return [lease.id for lease in await engine.lease({queue: n}, span=SPAN, holder=HOLDER)]


async def test_a_paused_queue_is_skipped(engine: SQLiteEngine, meter: SQLiteMeter) -> None:
    """L5.1: nothing of it moves, and resumed it is as it was."""
    jobs = [a_job(n) for n in range(MANY)]
    await engine.put(jobs)
    before = await meter.read()
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, "default"))
    assert await lease(engine) == []
    assert (await engine.exchange([], {"default": 10}, span=SPAN, holder=HOLDER)).leases == []
    assert await meter.read() - before < A_FEW
    await engine.remove_rule(RuleKind.PAUSE, Scope.QUEUE, "default")
    assert await lease(engine) == [job.id for job in jobs[:10]]


@pytest.mark.parametrize("scope", [Scope.TASK, Scope.KEY])
async def test_what_a_paused_task_or_key_keeps_back_is_set_aside_in_bites(
    engine: SQLiteEngine, meter: SQLiteMeter, scope: Scope
) -> None:
    """L5.1, L5.2: whoever comes back finds the job behind it; it is not looked at again until it may go."""
    await engine.put([a_job(task="slow", key="slow") for _ in range(MANY)])
    [behind] = jobs = [a_job()]
    await engine.put(jobs)
    await engine.add_rule(Rule(RuleKind.PAUSE, scope, "slow"))
    calls = 0
    leased: list[str] = []
    while not leased:
        before = await meter.read()
        leased = await lease(engine)
        assert await meter.read() - before < A_BITE
        calls += not leased
    assert leased == [behind.id]
    assert calls == MANY // BITE
    assert (await engine.queues())["default"].held == MANY
    before = await meter.read()
    assert await lease(engine) == []
    assert await meter.read() - before < A_FEW


@pytest.mark.parametrize("what", ["queue", "batch"])
async def test_what_is_dropped_goes_in_bites_and_is_never_leased(
    engine: SQLiteEngine, meter: SQLiteMeter, what: str
) -> None:
    """L5.3: the first bite at once, the others by sweeps, with a record that tells how far they are."""
    batch = "b" if what == "batch" else None
    if batch is not None:
        await engine.put_batch(Batch(id=batch), seal=False)
    for start in range(0, MANY, BITE):
        await engine.put([a_job(batch=batch, member=start + n) for n in range(BITE)])
    before = await meter.read()
    if batch is None:
        assert await engine.drop("default") == BITE
    else:
        assert await engine.delete_batch(batch)
    assert await meter.read() - before < A_BITE
    [record] = (await engine.records(REMOVALS)).records
    assert record.name == ("queue:default" if batch is None else "batch:b")
    assert msgspec.json.decode(record.value)["removed"] == BITE
    [new] = jobs = [a_job()]
    await engine.put(jobs)
    leased: list[str] = []
    for _ in range(MANY // BITE + 2):
        before = await meter.read()
        leased += await lease(engine, 100)
        await engine.sweep()
        assert await meter.read() - before < 2 * A_BITE
    assert leased == [new.id]
    assert (await engine.records(REMOVALS)).records == []
    counts = (await engine.queues())["default"]
    assert (counts.waiting, counts.running, counts.put - counts.deleted) == (0, 1, 1)


async def test_a_cap_is_read_and_not_counted(engine: SQLiteEngine, meter: SQLiteMeter) -> None:
    """L5.4."""
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", MANY + 1))
    await engine.put([a_job() for _ in range(MANY)])
    before = await meter.read()
    await engine.put([a_job()])
    assert await meter.read() - before < A_FEW


async def test_many_limited_keys_cost_a_bite_per_call(engine: SQLiteEngine, meter: SQLiteMeter) -> None:
    """L5.5: 100 keys with limit 1 and 4,000 jobs."""
    for number in range(100):
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"key-{number}", 1))
    await engine.put([a_job(key=f"key-{n % 100}") for n in range(4000)])
    done: list[Lease] = []
    for _ in range(6):
        before = await meter.read()
        answer = await engine.exchange(
            [(each, Done()) for each in done], {"default": 200}, span=SPAN, holder=HOLDER
        )
        assert await meter.read() - before < 2 * A_BITE
        done = answer.leases
        assert len(done) == 100


async def test_a_limit_on_others_costs_plain_jobs_next_to_nothing(
    engine: SQLiteEngine, meter: SQLiteMeter
) -> None:
    """L5.5."""
    costs = []
    for _ in range(2):
        await engine.put([a_job() for _ in range(100)])
        before = await meter.read()
        assert len(await lease(engine, 100)) == 100
        costs.append(await meter.read() - before)
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "another", 3))
    assert costs[1] < 1.05 * costs[0]


async def test_nothing_is_left_of_what_was_set_aside(engine: SQLiteEngine) -> None:
    """L5: neither of those that were let go nor of those that were cancelled."""
    jobs = [a_job(key=f"key-{n}") for n in range(20)]
    await engine.put(jobs)
    for job in jobs:
        assert job.key is not None
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, job.key))
    assert await lease(engine, 20) == []
    await engine.cancel([job.id for job in jobs[:10]])
    for job in jobs:
        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, job.key or "")
    leases = await engine.lease({"default": 20}, span=SPAN, holder=HOLDER)
    assert [each.id for each in leases] == [job.id for job in jobs[10:]]
    await engine.settle([(each, Done()) for each in leases])
    left = await engine._file.read(
        lambda db: [
            db.execute(f"SELECT count(*) FROM propolis_{table}").fetchone()[0]
            for table in ("held", "group", "busy")
        ]
    )
    assert left == [0, 0, 0]


async def test_queues_and_rules_are_given_in_pages(engine: SQLiteEngine) -> None:
    """L5.7."""
    names = [f"q{number}" for number in range(7)]
    await engine.put([a_job(queue=name) for name in names])
    assert list(await engine.queues(limit=3)) == names[:3]
    assert list(await engine.queues(limit=3, after=names[2])) == names[3:6]
    rules = sorted((Rule(RuleKind.PAUSE, Scope.QUEUE, name) for name in names), key=lambda rule: rule.name)
    for rule in rules:
        await engine.add_rule(rule)
    assert bare(await engine.rules(limit=2)) == rules[:2]
    assert bare(await engine.rules(limit=9, after=rules[1])) == rules[2:]


async def test_a_search_that_filters_reads_a_bite_and_says_where_to_go_on(
    engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: also where nothing was found yet."""
    monkeypatch.setattr(snapshot, "COUNTED", 10)
    await engine.put([a_job(task="other") for _ in range(25)])
    [wanted] = jobs = [a_job(task="wanted")]
    await engine.put(jobs)
    pages, after = 0, None
    found: list[str] = []
    while True:
        page = await engine.find(Filter(task="wanted"), after=after)
        found += [info.id for info in page.jobs]
        pages, after = pages + 1, page.after
        if after is None:
            break
    assert found == [wanted.id]
    assert pages == 3
    assert await engine.position(wanted.id) == 10  # or more


async def test_a_full_shelf_of_the_dead_is_emptied_without_counting_it(
    engine: SQLiteEngine, meter: SQLiteMeter
) -> None:
    """L5.8."""
    await engine.put([a_job() for _ in range(30)])
    leases = await engine.lease({"default": 30}, span=SPAN, holder=HOLDER)
    await engine.settle([(each, Dead()) for each in leases])
    assert (await engine.sweep()).removed == 27
    assert (await engine.queues())["default"].dead == 3
    before = await meter.read()
    assert (await engine.sweep()).removed == 0
    assert await meter.read() - before < A_FEW


async def test_whoever_swept_a_whole_bite_is_told_to_come_back_at_once(
    engine: SQLiteEngine, clock: FakeClock
) -> None:
    """L5.10: retention and reaping do not wait for the next second."""
    await engine.put([a_job() for _ in range(30)])
    leases = await engine.lease({"default": 30}, span=SPAN, holder=HOLDER)
    await engine.settle([(each, Done(keep=timedelta(seconds=1))) for each in leases])
    clock.advance("1s")
    swept = [await engine.sweep(limit=10) for _ in range(4)]
    assert [(each.removed, each.again_in) for each in swept] == [(10, timedelta(0))] * 3 + [(0, None)]


@pytest.mark.parametrize("parked", [False, True], ids=["ready", "parked"])
async def test_a_claim_is_bounded_by_bytes(
    engine: SQLiteEngine, monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    """L5.13, I14, I15: over all of its queues; and the next claim goes on."""
    monkeypatch.setattr(claims, "MAX_BYTES", 5000)
    jobs = [a_job("x" * 900, queue=queue) for queue in ("first", "second") for _ in range(8)]
    await engine.put(jobs)
    tasks = [jobs[0].task]
    if parked:
        while found := await engine.lease({"first": 99, "second": 99}, span=SPAN, holder=HOLDER):
            await engine.settle([(lease, Unknown()) for lease in found])
    leased: list[list[str]] = []
    while True:
        wants = {"first": 99, "second": 99}
        found = (await engine.exchange([], wants, span=SPAN, holder=HOLDER, tasks=tasks)).leases
        if not found:
            break
        leased.append([lease.id for lease in found])

    assert [len(each) for each in leased] == [6, 6, 4]  # the sixth is the one with which it is too much
    assert [name for each in leased for name in each] == [job.id for job in jobs]

"""L5 on PostgreSQL: what a call costs does not grow with what is there.

Costs are pages that the server reads or changes for a call: they do not depend on the hour, and in a database
of their own no snapshot of another test keeps dead rows, which are pages too.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from tests.system.fleet import cpu_seconds

from propolis.core.batch import Batch
from propolis.core.job import Done, Lease
from propolis.core.protocols import BITE, Counts, Rule, RuleKind, Scope
from propolis.core.transitions import Retention
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.floors import Floors
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.serving import database

FEW, MANY = 200, 4000
NO_MORE = 1.6  # times as much, for twenty times as many: what is left are the levels of an index

PAGES = """
    SELECT coalesce(sum(pg_stat_get_xact_blocks_fetched(c.oid)), 0)::bigint FROM pg_class AS c
     WHERE c.relnamespace = $1::regnamespace
"""

CALLS = """
    SELECT coalesce(sum(pg_stat_get_xact_function_calls(p.oid)), 0)::bigint FROM pg_proc AS p
      JOIN pg_language AS l ON l.oid = p.prolang WHERE l.lanname = 'plpgsql'
"""
ROUNDS = "SELECT sum(pg_stat_get_xact_function_calls(oid)) FROM pg_proc WHERE proname = 'lease_these'"


class Desk:
    """An engine whose statements are counted, and its tables."""

    def __init__(self, engine: PostgresEngine, connection: asyncpg.Connection, schema: str) -> None:
        self.engine, self.connection, self.schema = engine, connection, schema
        self.pages = 0
        engine._link.write = engine._link.read = self._counted  # type: ignore[method-assign]

    async def _counted(self, statement: str, *args: object, patient: float = 0.0) -> list[Any]:
        async with self.connection.transaction():
            before = await self.connection.fetchval(PAGES, f'"{self.schema}"')
            rows = await self.connection.fetch(statement, *args)
            self.pages = await self.connection.fetchval(PAGES, f'"{self.schema}"') - before
        return list(rows)

    async def cost(self, call: Callable[[], Awaitable[object]]) -> int:
        """Of the second call: the first one also plans."""
        await call()
        await call()
        return self.pages

    async def sql(self, text: str) -> Any:
        return await self.connection.fetchval(text.replace("propolis.", f'"{self.schema}".'))

    async def fill(self, table: str, n: int, **columns: str) -> None:
        """So many jobs, plain but for these columns, given as SQL of their number i."""
        values = {
            "seq": "nextval('propolis.back')",
            "pos": "i",
            "put_us": "0",
            "due_us": "0",
            "rank": "0",
            "max_crashes": "3",
            "attempts": "0",
            "failures": "0",
            "crashes": "0",
            "queue": "'q'",
            "id": "gen_random_uuid()::text",
            "task": "'tests.echo'",
            "body": "'{}'::bytea",
            "member": "0",
            **columns,
        }
        names, texts = ", ".join(values), ", ".join(values.values())
        await self.sql(
            f"INSERT INTO propolis.{table} ({names}) SELECT {texts} FROM generate_series(1, {n}) AS i"
        )
        kept, dead = (1, int("dead" in values["state"])) if table == "archive" else (0, 0)
        await self.sql(
            f"INSERT INTO propolis.total AS t (queue, put, deleted, kept, dead)"
            f" SELECT {values['queue']} AS q, count(*), 0, {kept} * count(*), {dead} * count(*)"
            f" FROM generate_series(1, {n}) AS i GROUP BY q ON CONFLICT (queue) DO UPDATE"
            f" SET put = t.put + excluded.put, kept = t.kept + excluded.kept, dead = t.dead + excluded.dead"
        )
        await self.sql(f"ANALYZE propolis.{table}")

    async def take(self, n: int = 10, queue: str = "q", **more: Any) -> list[Lease]:
        return await self.engine.lease({queue: n}, span=SPAN, holder=HOLDER, **more)


@pytest.fixture(scope="module")
def postgres_url(postgres_url: str) -> Iterator[str]:
    with database(postgres_url) as url:
        yield url


@pytest_asyncio.fixture
async def desk(
    postgres_url: str, schema: str, clock: FakeClock, connection: asyncpg.Connection
) -> AsyncIterator[Desk]:
    engine = await PostgresEngine(
        postgres_url, schema=schema, clock=clock, retention=Retention(dead_max=100_000)
    ).open()
    yield Desk(engine, connection, schema)
    await engine.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


async def grown(
    desk: Desk,
    call: Callable[[], Awaitable[object]],
    fill: Callable[[int], Awaitable[None]],
    times: float = NO_MORE,
) -> None:
    """What the call costs with few, and with many."""
    await fill(FEW)
    few = await desk.cost(call)
    await fill(MANY)
    assert await desk.cost(call) <= few * times


@pytest.mark.parametrize("kind", [RuleKind.PAUSE, RuleKind.BLOCK])
async def test_a_queue_that_is_held_back_is_skipped(desk: Desk, kind: RuleKind) -> None:
    """L5.1."""
    await desk.engine.add_rule(Rule(kind, Scope.QUEUE, "q"))

    await grown(desk, desk.take, lambda n: desk.fill("ready", n, pos="nextval('propolis.back')"))

    assert await desk.sql("SELECT count(*) FROM propolis.held") == 0


@pytest.mark.parametrize("kind", [RuleKind.PAUSE, RuleKind.LIMIT])
async def test_a_claim_sets_no_more_than_a_bite_aside(desk: Desk, kind: RuleKind) -> None:
    """L5.2, L5.5: the calls are as many as the bites, and what stands behind is found."""
    await desk.fill("ready", 2 * BITE + 500, task="'slow'", pos="i")
    [receipt] = await desk.engine.put([a_job(queue="q", task="quick")])
    await desk.engine.add_rule(Rule(kind, Scope.TASK, "slow"))

    taken, aside = [], []
    for _ in range(3):
        taken += await desk.take(1)
        aside.append(await desk.sql("SELECT count(*) FROM propolis.held"))

    assert [lease.id for lease in taken] == [receipt.id]
    assert all(after - before <= 2 * BITE for before, after in zip([0, *aside], aside, strict=False))
    assert aside[-1] == 2 * BITE + 500


async def test_a_claim_behind_many_keys_costs_a_bite(desk: Desk) -> None:
    """L5.5: a hundred keys, of each of which one job may run."""
    for n in range(100):
        await desk.engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"k{n}", 1))
    await desk.fill("ready", MANY, limit_key="'k' || i % 100", pos="i")

    leases = await desk.take(1000)
    assert len(leases) == 100
    assert desk.pages < 40 * BITE
    assert await desk.take(1000) == []
    assert desk.pages < 40 * BITE
    await desk.engine.settle([(leases[0], Done())])

    [again] = await desk.take(1000)
    assert again.id not in {lease.id for lease in leases}


@pytest.mark.parametrize(("scope", "name"), [(Scope.QUEUE, "q"), (Scope.TASK, "tests.echo")])
async def test_what_one_rule_lets_go_and_another_keeps_back_costs_a_bite(
    desk: Desk, scope: Scope, name: str
) -> None:
    """L5.2, L5.5: a key was paused and is resumed, where a limit of its queue or task leaves no room.

    The claim looked at a thousand jobs for each single one that it set aside: it never ended in time, and the
    worker stood still.
    """
    await desk.fill("held", MANY, limit_key="'k'", hold_scope="'key'", hold_name="'k'")
    await desk.fill("ready", MANY, pos="1000000 + i")
    await desk.engine.add_rule(Rule(RuleKind.LIMIT, scope, name, 1))

    [first] = await desk.take(4)
    assert await desk.sql(f"SELECT pos FROM propolis.running WHERE id = '{first.id}'") == 1
    assert desk.pages < 40 * BITE
    for _ in range(20):
        assert await desk.take(4) == []
        assert desk.pages < 40 * BITE
    await desk.engine.settle([(first, Done())])

    [second] = await desk.take(4)
    assert await desk.sql(f"SELECT pos FROM propolis.running WHERE id = '{second.id}'") == 2


async def test_parked_jobs_that_a_rule_keeps_back_cost_a_bite(desk: Desk) -> None:
    """L5.5: there was a round for each of them where a worker has one slot."""
    await desk.fill("held", MANY, limit_key="'k'", hold_scope="'parked'", hold_name="'tests.echo'")
    await desk.engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "k"))

    await desk.sql("SET track_functions = 'all'")
    async with desk.connection.transaction():
        assert await desk.take(1, tasks=["tests.echo"]) == []
        assert 0 < await desk.sql(ROUNDS) <= 10
    await desk.engine.remove_rule(RuleKind.PAUSE, Scope.KEY, "k")

    [first] = await desk.take(1, tasks=["tests.echo"])
    assert await desk.sql(f"SELECT pos FROM propolis.running WHERE id = '{first.id}'") == 1
    await desk.engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", 2))
    [second] = await desk.take(3, tasks=["tests.echo"])
    assert await desk.sql(f"SELECT pos FROM propolis.running WHERE id = '{second.id}'") == 2
    assert await desk.sql("SELECT count(*) FROM propolis.held WHERE hold_scope = 'parked'") == MANY - 2


async def test_a_limit_elsewhere_costs_plain_jobs_nothing(desk: Desk) -> None:
    """L5.5: they are still leased as one row, and no running one becomes a row of its own."""
    await desk.fill("ready", 400, pos="i")

    without = await desk.cost(lambda: desk.take(100))
    await desk.engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "another", 1))
    await desk.engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, "k"))

    assert await desk.cost(lambda: desk.take(100)) <= without + 150  # each is looked at once more
    assert await desk.sql("SELECT count(*) FROM propolis.chunk") == 4
    assert await desk.sql("SELECT count(*) FROM propolis.running") == 0


async def test_tasks_with_limits_for_each_key_that_hold_nothing_are_asked_once(desk: Desk) -> None:
    """L5: and not for each key that has opened."""
    await desk.engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, "k", 1))
    await desk.engine.put([a_job(queue="q", key="k") for _ in range(2)])
    assert len(await desk.take(1)) == 1
    assert await desk.take(1) == []

    async def take(n: int) -> int:
        """Beside so many such tasks, where 50 other keys have opened."""
        await desk.sql(
            "INSERT INTO propolis.rule (kind, scope, name, n, set_by, why, set_us)"
            " SELECT 'limit', 'task_key', 'task' || i || ' *', 1, '', '', 0"
            f" FROM generate_series(1, {n}) AS i ON CONFLICT DO NOTHING"
        )
        await desk.sql(
            "INSERT INTO propolis.opening (queue, scope, name, at_us)"
            " SELECT 'q', 'key', 'other' || i, 0 FROM generate_series(1, 50) AS i"
        )
        assert await desk.take(100) == []
        return desk.pages

    await take(1)
    few = await take(1)
    assert await take(51) - few < 50 * 10  # and not 50 times 50


async def test_a_sweep_does_not_read_all_that_runs(desk: Desk) -> None:
    """L5: with leases that end later."""
    await grown(desk, partial(desk.engine.sweep, by="one"), partial(fill_running, desk))


@pytest.mark.parametrize(("scope", "name"), [(Scope.TASK, "tests.echo"), (Scope.QUEUE, "q")])
async def test_a_limit_does_not_count_all_that_runs(desk: Desk, scope: Scope, name: str) -> None:
    """L5: it stops where there is no room, and reads nothing of others."""
    await desk.engine.add_rule(Rule(RuleKind.LIMIT, scope, name, 5))
    await desk.fill("ready", 10)

    async def fill(n: int) -> None:
        await desk.sql("DELETE FROM propolis.running WHERE task = 'tests.echo'")
        await fill_running(desk, n, task="'another'", queue="'another'")
        await fill_running(desk, 10)

    await grown(desk, desk.take, fill)
    assert await desk.take() == []


async def fill_running(desk: Desk, n: int, **columns: str) -> None:
    """Jobs that run as rows of their own, with leases for long."""
    await desk.fill(
        "running",
        n,
        fence="1",
        started_us="0",
        until_us="9000000000000000 + i",
        number="nextval('propolis.number')",
        holder="'somebody'",
        **columns,
    )


async def test_a_cap_does_not_count_all_that_waits(desk: Desk) -> None:
    """L5.4."""
    await desk.engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "q", 100_000))

    await grown(
        desk,
        lambda: desk.engine.put([a_job(queue="q")]),
        lambda n: desk.fill("ready", n, pos="nextval('propolis.back')"),
    )


async def test_a_full_queue_refuses_at_the_same_cost(desk: Desk) -> None:
    """L5.4."""

    async def put() -> None:
        await desk.engine.put([a_job(queue="q"), a_job(queue="q")])

    async def more(n: int) -> None:
        await desk.fill("ready", n, pos="nextval('propolis.back')")
        there = await desk.sql("SELECT count(*) FROM propolis.ready")
        await desk.engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "q", there + 4))

    await grown(desk, put, more)
    with pytest.raises(Exception, match="full"):
        await put()


@pytest.mark.parametrize("table", ["ready", "held"])
async def test_a_drop_costs_a_bite(desk: Desk, table: str) -> None:
    """L5.3."""
    rule = {"hold_scope": "'key'", "hold_name": "'k'"} if table == "held" else {}
    costs = []
    for n in (BITE, 3 * BITE):
        await desk.fill(table, n, pos="i", queue=f"'q{n}'", **rule)
        assert await desk.engine.drop(f"q{n}") == BITE
        costs.append(desk.pages)

    assert costs[1] <= costs[0] * NO_MORE
    assert await desk.take(10, f"q{3 * BITE}") == []


async def test_a_batch_is_deleted_a_bite_at_a_time(desk: Desk) -> None:
    """L5.3: its waiting members, and what is listed of those that have ended."""
    await desk.engine.put_batch(Batch(id="b"), seal=False)
    await desk.fill("ready", 2 * BITE, pos="i", batch="'b'", member="i")
    await desk.sql(
        "INSERT INTO propolis.ended (batch, born, first, last, n, state, numbers, ids)"
        " SELECT 'b', b.born, i, i, 1, 'done', ARRAY[i], ARRAY['x'] FROM propolis.batch AS b,"
        " generate_series(1, 2500) AS i"
    )
    assert await desk.engine.delete_batch("b")
    assert desk.pages < 40 * BITE

    [record] = (await desk.engine.records("removal")).records
    assert (record.name, await desk.engine.batch("b")) == ("batch:b", None)
    for _ in range(3):
        assert await desk.take() == []
        await desk.engine.sweep()
        assert desk.pages < 40 * BITE
    assert (await desk.engine.records("removal")).records == []
    assert await desk.sql("SELECT count(*) FROM propolis.ready") == 0
    assert await desk.sql("SELECT count(*) FROM propolis.ended") == 0


@pytest.mark.parametrize("size", [2000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_an_idle_sweep_does_not_ask_each_queue(desk: Desk, size: int) -> None:
    """L5.7, and a page of queues costs what is on it."""
    await desk.fill("ready", 20, queue="'q' || i")
    few = await desk.cost(desk.engine.sweep), await desk.cost(lambda: desk.engine.queues(limit=10))
    await desk.fill("ready", size, queue="'q' || 20 + i")

    many = await desk.cost(desk.engine.sweep), await desk.cost(lambda: desk.engine.queues(limit=10))
    assert many[0] <= few[0] * NO_MORE
    assert many[1] <= few[1] * NO_MORE
    names: list[str] = []
    while page := await desk.engine.queues(limit=1000, after=names[-1] if names else None):
        names += page
    assert names == sorted(f"q{n + 1}" for n in range(size + 20))


async def test_counts_stop_at_a_bite_and_say_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """L5.7."""
    monkeypatch.setattr("propolis.engines.postgres.engine.COUNTED", 50)
    await desk.fill("scheduled", 80, due_us="9e15::bigint")
    await desk.fill("ready", 20, pos="i")

    assert await desk.engine.queues() == {"q": Counts(ready=20, scheduled=50, put=100, more=True)}


async def test_a_place_in_line_is_counted_up_to_a_bite(
    desk: Desk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: of those that stand there, and of those that have become due and do not yet."""
    monkeypatch.setattr("propolis.engines.postgres.engine.COUNTED", 50)
    await desk.engine.put(jobs := [a_job() for _ in range(60)])
    await desk.engine.put([late := a_job(delay_ms=1000), later := a_job(delay_ms=2000)])
    clock.advance("2s")

    places = [await desk.engine.position(job.id) for job in (jobs[0], jobs[49], jobs[55], late)]
    await desk.engine.cancel([job.id for job in jobs[10:]])

    assert places == [0, 49, 50, 50]
    assert [await desk.engine.position(job.id) for job in (late, later)] == [10, 11]


async def test_members_of_a_batch_are_told_apart_up_to_a_bite(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: the others count as enqueued."""
    members = [a_job(batch="b", member=n, key=f"k{n}") for n in range(60)]
    await desk.engine.put_batch(Batch(id="b"), members)
    await desk.engine.lease({"default": 40}, span=SPAN, holder=HOLDER)
    exact = await desk.engine.batch("b")
    monkeypatch.setattr("propolis.engines.postgres.engine.COUNTED", 30)
    about = await desk.engine.batch("b")

    assert exact is not None
    assert about is not None
    assert (exact.enqueued, exact.running, exact.total) == (20, 40, 60)
    assert (about.enqueued, about.running, about.total) == (30, 30, 60)


async def test_a_bounded_dead_shelf_is_not_counted(desk: Desk) -> None:
    """L5.8."""

    async def more(n: int) -> None:
        await desk.fill("archive", n, state="'dead'", ended_us="i", keep_us="9e15::bigint")

    await grown(desk, desk.engine.sweep, more)


@pytest.mark.parametrize("dead_rows", [2000, pytest.param(50_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["plain", "delayed", "expiring"])
async def test_what_an_old_snapshot_keeps_is_not_walked_over(
    desk: Desk, clock: FakeClock, postgres_url: str, what: str, dead_rows: int
) -> None:
    """L5.9: at most five times as dear.  Once in a second a claim looks at all of it, and then not again."""
    columns = {"plain": {}, "delayed": {"delay_ms": 1000}, "expiring": {"expires_in_ms": 3_600_000}}[what]
    passed = 0.0
    desk.engine._floors = Floors(lambda: passed)

    async def turn(n: int) -> int:
        """Put, wait, and take all of them."""
        nonlocal passed
        passed += 0.3
        await desk.engine.put([a_job(queue="q", **columns) for _ in range(n)])
        clock.advance("1s")
        pages = 0
        while leases := await desk.take(1000):
            pages += desk.pages
            await desk.engine.settle([(lease, Done()) for lease in leases])
            pages += desk.pages
        return pages + desk.pages

    for _ in range(3):
        before = await turn(1)
    other = await asyncpg.connect(postgres_url)
    async with other.transaction(isolation="repeatable_read"):
        await other.fetchval("SELECT count(*) FROM pg_class")
        for _ in range(dead_rows // 1000):
            await turn(1000)
        passed += 1
        await turn(1)  # which looks from the front
        after = [await turn(1) for _ in range(3)]
    await other.close()

    assert max(after) <= 5 * before


async def test_retention_goes_on_while_there_is_more(desk: Desk) -> None:
    """L5.10: ten bites are ten sweeps, each of which says to come back at once."""
    await desk.fill("archive", 3 * BITE, state="'done'", ended_us="0", keep_us="1")

    swept = [await desk.engine.sweep(by="me") for _ in range(4)]

    assert [each.removed for each in swept] == [BITE, BITE, BITE, 0]
    assert all(
        each.again_in is not None and each.again_in <= timedelta(milliseconds=10) for each in swept[:3]
    )


@pytest.mark.parametrize("ended", [False, True], ids=["live", "ended"])
async def test_a_page_of_members_does_not_sort_the_rest(desk: Desk, ended: bool) -> None:
    """L5.12: also far behind in the batch."""
    await desk.engine.put_batch(Batch(id="b"), seal=False)
    lines = """
        INSERT INTO propolis.ended (batch, born, first, last, n, state, numbers, ids)
        SELECT 'b', b.born, min(i), max(i), count(*), 'done', array_agg(i), array_agg('x' || i)
          FROM propolis.batch AS b, generate_series({}, {}) AS i GROUP BY b.born, i / 100
    """

    async def more(first: int, n: int) -> None:
        if ended:
            await desk.sql(lines.format(first, first + n - 1))
        else:
            await desk.fill("ready", n, pos=f"{first} + i", batch="'b'", member=f"{first} + i - 1")

    await more(1, FEW)
    few = await desk.cost(lambda: desk.engine.members("b", limit=10))
    await more(FEW + 1, MANY)
    for after in (0, 2000, 4100):
        assert await desk.cost(partial(desk.engine.members, "b", limit=10, after=after)) <= few * 3
        members = await desk.engine.members("b", limit=10, after=after)
        assert [member.member for member in members] == list(range(after + 1, after + 11))


async def test_the_tally_of_a_batch_stays_short_while_its_newest_member_waits(desk: Desk) -> None:
    """L5: each call adds a row, and whoever looks at the batch reads them all."""
    await desk.engine.put_batch(Batch(id="b"), seal=False)
    jobs = [a_job(queue="q", batch="b", member=number) for number in range(1023 - 8, 1023 + 3)]
    await desk.engine.put([*jobs, a_job(queue="q", batch="b", member=2000)])
    rows = []
    for lease in await desk.take(len(jobs)):
        await desk.engine.settle([(lease, Done())])
        rows.append(await desk.connection.fetchval(f"SELECT count(*) FROM {desk.schema}.batch_tally"))

    assert rows == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    status = await desk.engine.batch("b")
    assert status is not None
    assert (status.total, status.done) == (12, 11)


async def test_many_are_cancelled_and_reaped_in_sets(desk: Desk, clock: FakeClock) -> None:
    """L5.13: statements are as many for a thousand as for ten, as the plans that were made show."""
    costs = []
    for n in (100, 1000):
        jobs = [a_job(queue="q") for _ in range(n)]
        await desk.engine.put(jobs)
        assert await desk.engine.cancel([job.id for job in jobs]) == [True] * n
        costs.append(desk.pages / n)
    assert costs[1] <= 2 * costs[0]
    assert costs[1] < 30

    await desk.fill("ready", 1000, queue="'lost'", pos="i")
    leases = await desk.take(1000, "lost")
    clock.advance(SPAN)
    assert (await desk.engine.sweep()).reaped == 1000
    assert desk.pages < 30 * 1000
    assert [lease.id for lease in await desk.take(1000, "lost")] == [lease.id for lease in leases]


async def test_what_is_reaped_and_has_expired_ends_in_the_same_sweep(desk: Desk, clock: FakeClock) -> None:
    """T8, T11."""
    await desk.engine.put([a_job(queue="q", expires_in_ms=1000)])
    await desk.take(1)
    clock.advance(SPAN)

    swept = await desk.engine.sweep()

    assert (swept.reaped, swept.expired) == (1, 1)


async def test_what_expires_is_found_by_its_time(desk: Desk) -> None:
    """L5.13: a bite of many that have expired."""

    async def more(n: int) -> None:
        await desk.fill("ready", n, pos="nextval('propolis.back')", expires_us="i")

    async def sweep() -> None:
        assert (await desk.engine.sweep(limit=50)).expired == 50

    await grown(desk, sweep, more, times=3)  # with what is gone and not yet vacuumed


@pytest.mark.parametrize("size", [2 * BITE, pytest.param(100_000, marks=pytest.mark.full)])
async def test_what_becomes_due_at_once_is_promoted_in_as_many_sweeps(desk: Desk, size: int) -> None:
    """S3.28: in proportion, and with 100,000 within ten seconds of the server's work."""
    await desk.fill("scheduled", size, due_us="1", queue="'q' || i % 7")
    session = desk.connection.get_server_pid()

    sweeps = pages = 0
    began = cpu_seconds(session)
    while (await desk.engine.sweep()).promoted:
        sweeps += 1
        pages += desk.pages
    took = cpu_seconds(session) - began

    assert sweeps == size // BITE
    assert pages < 30 * size
    assert took < 10
    assert took > 0 or size < 100_000 or sys.platform != "linux"  # the process that serves us was seen


EMITTED: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "later": lambda n: {"delay_ms": 60_000},
    "chosen": lambda n: {"chosen": True},
    "with keys": lambda n: {"unique": f"key {n}"},
    "with one key": lambda n: {"unique": "key"},
    "members": lambda n: {"batch": "b", "member": n},
    "members of what is over": lambda n: {"batch": "none", "member": n},
}


@pytest.mark.parametrize("kind", EMITTED)
async def test_what_one_outcome_emits_is_put_as_a_set(desk: Desk, kind: str) -> None:
    """L5: each was put by itself, and those of a batch made its row a long chain: a job could emit more than
    any call had time for."""
    await desk.engine.put_batch(Batch(id="b"), seal=False)
    await desk.sql("SET track_functions = 'all'")

    async def calls_and_pages(first: int, many: int) -> tuple[int, int]:
        await desk.engine.put([a_job(1_000_000 + first, queue="first")])
        [lease] = await desk.engine.lease({"first": 1}, span=SPAN, holder=HOLDER)
        emit = tuple(a_job(n, queue="q", **EMITTED[kind](n)) for n in range(first, first + many))
        async with desk.connection.transaction():
            before = await desk.sql(CALLS)
            assert await desk.engine.settle([(lease, Done(emit=emit))]) == []
            return await desk.sql(CALLS) - before, desk.pages

    few_calls, few_pages = await calls_and_pages(0, FEW)
    many_calls, many_pages = await calls_and_pages(FEW, MANY)

    assert many_calls <= few_calls + 20 < FEW
    assert many_pages <= few_pages * MANY / FEW * NO_MORE
    created = 1 if kind == "with one key" else FEW + MANY
    waiting = [await desk.sql(f"SELECT count(*) FROM propolis.{table}") for table in ("ready", "scheduled")]
    assert sum(waiting) == created
    assert await desk.sql("SELECT live FROM propolis.batch") == (created if kind == "members" else 0)

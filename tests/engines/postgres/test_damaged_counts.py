"""L7: a damaged count stops no call that is about anything else, and is mended."""

from __future__ import annotations

import asyncpg
import pytest

from propolis.core.batch import Batch
from propolis.core.job import Dead, Done
from propolis.core.protocols import EACH, Rule, RuleKind, Scope, task_key
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


COUNTS = ["batch.live", "batch.done", "batch.dead", "batch.cancelled", "batch_tally.n", "batch_tally.joined"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("damage", [2**31 - 1, -(2**31 - 1)])
async def test_one_damaged_count_of_a_batch_stops_no_call(
    postgres_url: str, schema: str, connection: asyncpg.Connection, clock: FakeClock, count: str, damage: int
) -> None:
    """A settle of many members raised for all of them, and so did each look at batches."""
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    for batch in ("bad", "good"):
        await engine.put_batch(Batch(id=batch), [a_job(batch=batch, member=n) for n in range(4)])
    await connection.execute(f"INSERT INTO \"{schema}\".batch_tally (batch, n) VALUES ('bad', 0)")
    table, _, column = count.partition(".")
    key = "id" if table == "batch" else "batch"
    await connection.execute(f"UPDATE \"{schema}\".{table} SET {column} = $1 WHERE {key} = 'bad'", damage)

    assert [status.id for status in await engine.batches()] == ["bad", "good"]
    leases = await engine.lease({"default": 100}, span=SPAN, holder=HOLDER)
    assert await engine.settle([(lease, Done() if n % 4 else Dead()) for n, lease in enumerate(leases)]) == []
    await engine.sweep(by="sweeper-1")
    await engine.repair(mend=True)
    good = await engine.batch("good")
    assert good is not None
    assert (good.done, good.dead, good.finished_at is not None) == (3, 1, True)
    await engine.close()


@pytest.mark.parametrize("column", ["put", "deleted", "kept", "dead"])
@pytest.mark.parametrize("table", ["tally", "total"])
@pytest.mark.parametrize("damage", [2**63 - 1, -(2**63 - 1)])
async def test_one_damaged_count_of_a_queue_stops_no_call(
    postgres_url: str,
    schema: str,
    connection: asyncpg.Connection,
    clock: FakeClock,
    table: str,
    column: str,
    damage: int,
) -> None:
    """Looks at queues raised, and no sweep added up what any queue has counted."""
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    await engine.put([a_job(queue="bad"), a_job(queue="good")])
    if table == "total":
        await engine.sweep()
        await engine.put([a_job(queue="bad"), a_job(queue="good")])
    await connection.execute(f"UPDATE \"{schema}\".{table} SET {column} = $1 WHERE queue = 'bad'", damage)
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "good", 100))

    there = (await engine.queues())["good"].put
    await engine.put([a_job(queue="bad"), a_job(queue="good")])
    await engine.sweep()
    assert await connection.fetchval(f'SELECT count(*) FROM "{schema}".tally') == 0
    assert (await engine.queues())["good"].put == there + 1
    await engine.repair(mend=True)
    assert await engine.repair(mend=False) == []
    await engine.close()


RULES = {
    "kind": "'junk'",
    "scope": "'junk'",
    "name": "'no task and no key'",
    "n": "-1",
    "set_us": str(2**63 - 1),
    "until_us": str(2**63 - 1),
    "every_us": str(2**63 - 1),
    "burst": "NULL",
    "set_by": "repeat('x', 10000)",
}


@pytest.mark.parametrize("column", RULES)
async def test_one_damaged_rule_hides_no_other(
    postgres_url: str, schema: str, connection: asyncpg.Connection, clock: FakeClock, column: str
) -> None:
    """Whoever asked for rules was refused all of them, and some stopped each lease of their queue.

    A page without it is no shorter, since a short one ends a walk.
    """
    engine = await PostgresEngine(postgres_url, schema=schema, clock=clock).open()
    name = task_key("t", EACH)
    for rule in (
        Rule(RuleKind.CAP, Scope.QUEUE, "a", 1),
        Rule(RuleKind.LIMIT, Scope.TASK_KEY, name, 1, every=SPAN),
        Rule(RuleKind.PAUSE, Scope.QUEUE, "b"),
        Rule(RuleKind.PAUSE, Scope.QUEUE, "c"),
    ):
        await engine.add_rule(rule)
    await connection.execute(f"UPDATE \"{schema}\".rule SET {column} = {RULES[column]} WHERE kind = 'limit'")

    shown = [rule.name for rule in await engine.rules()]
    assert [each for each in shown if each in "abc"] == ["a", "b", "c"]
    assert len(shown) == (4 if column in ("set_us", "until_us") else 3)
    pages, after = [], None
    while page := await engine.rules(limit=1, after=after):
        pages += [rule.name for rule in page]
        after = page[-1]
    assert pages == shown
    await engine.put([a_job(), a_job(task="t", key="k")])
    leases = await engine.lease({"default": 10}, span=SPAN, holder=HOLDER)
    assert len(leases) == 2
    assert await engine.settle([(lease, Done()) for lease in leases]) == []
    await engine.sweep(by="sweeper-1")
    await engine.close()

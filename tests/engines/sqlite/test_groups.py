"""What limits set aside in SQLite: groups that know their first jobs, written only where they must be."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from propolis.core.job import Done, Lease
from propolis.core.protocols import UNBOUNDED, Rule, RuleKind, Scope, task_key
from propolis.engines.shared.statements import load_migrations
from propolis.engines.sqlite import schema
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.engines.sqlite.steps.rules import groups, openings
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, a_job
from propolis.testing.engines.steps import HOUR, counts, put_one, take

LONG = 9 * HOUR
EACH_KEY = (RuleKind.LIMIT, Scope.KEY, "k*")


def execute(path: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        return db.execute(statement).fetchall()


async def set_aside(engine: SQLiteEngine, n: int) -> list[str]:
    """One job of each of so many keys, some with more priority; the ids in the order in which they may go."""
    await engine.add_rule(Rule(*EACH_KEY, 0))
    numbers = [*range(n)]
    random.Random(7).shuffle(numbers)
    jobs = [a_job(key=f"k{number}", priority=number % 3) for number in numbers]
    await engine.put(jobs)
    assert await take(engine) == []
    assert (await counts(engine)).held == n
    return [job.id for job in sorted(jobs, key=lambda job: -job.priority)]


async def taken_in_bundles(engine: SQLiteEngine, size: int, most: int) -> list[str]:
    taken: list[Lease] = []
    for _ in range(most):
        taken += await engine.lease({"default": size}, span=LONG, holder=HOLDER)
    return [lease.id for lease in taken]


async def test_many_groups_go_in_the_old_order_of_their_jobs(engine: SQLiteEngine) -> None:
    """I15: of more of them than are wanted, and what stands in the line goes among them."""
    ids = await set_aside(engine, 150)
    plain = await put_one(engine, priority=1)
    last = [each.id for each in [await put_one(engine), await put_one(engine, key="other")]]
    await engine.remove_rule(*EACH_KEY)

    assert await taken_in_bundles(engine, 7, 24) == [*ids[:100], plain.id, *ids[100:], *last]


async def test_a_limit_that_is_lowered_meanwhile_lets_the_others_go_first(engine: SQLiteEngine) -> None:
    """I15, L1: groups without room do not hide those behind them."""
    await set_aside(engine, 150)
    for number in range(140):
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, f"k{number}", 0))
    await engine.remove_rule(*EACH_KEY)
    late = await put_one(engine)

    taken = await taken_in_bundles(engine, 6, 2)

    assert len(taken) == 11
    assert taken[-1] == late.id


async def test_what_a_rule_for_many_keys_kept_back_goes_bite_by_bite(
    engine: SQLiteEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5, L1: by leases and by sweeps."""
    for module in (openings, groups):
        monkeypatch.setattr(module, "BITE", 20)
    ids = await set_aside(engine, 90)
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key("tests.echo", "*"), 1))

    await engine.remove_rule(*EACH_KEY)
    assert execute(path, "SELECT count(*) FROM propolis_group WHERE opened") == [(20,)]
    found = await taken_in_bundles(engine, 100, 1)
    assert len(found) == 40
    while (await engine.sweep(limit=20)).again_in == timedelta(0):
        pass
    found += await taken_in_bundles(engine, 100, 1)

    assert sorted(found) == sorted(ids)
    assert (
        execute(path, "SELECT * FROM propolis_opening") == execute(path, "SELECT * FROM propolis_group") == []
    )


async def test_a_job_whose_key_is_busy_joins_the_others_of_its_key_at_once(engine: SQLiteEngine) -> None:
    await engine.add_rule(Rule(*EACH_KEY, 1))
    await engine.put([a_job(key="k1"), a_job(key="k1")])
    [lease] = await take(engine, span=LONG)
    late = a_job(key="k1", delay_ms=1000)
    urgent = a_job(key="k1", priority=5)

    await engine.put([urgent, late, a_job(key="k2"), a_job()])

    found = await counts(engine)
    assert (found.held, found.ready, found.scheduled) == (2, 2, 1)
    exchange = await engine.exchange([(lease, Done())], {"default": 1}, span=LONG, holder=HOLDER)
    assert [each.id for each in exchange.leases] == [urgent.id]


async def test_what_nothing_binds_counts_for_others_of_its_key_in_one_lease(engine: SQLiteEngine) -> None:
    """T2: a key has one count, of its jobs of all tasks."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key("tests.b", "*"), 2))
    jobs = [a_job(key="k", task=task) for task in ("tests.a", "tests.b", "tests.b", "tests.a")]
    await engine.put(jobs)

    assert [lease.id for lease in await take(engine)] == [jobs[n].id for n in (0, 1, 3)]


async def test_while_a_key_stays_busy_nothing_is_written_of_it(engine: SQLiteEngine) -> None:
    """Its group is closed before and after, and as many of it run."""
    await engine.add_rule(Rule(*EACH_KEY, 1))
    await engine.put([a_job(key=f"k{number % 10}") for number in range(30)])
    leases = await take(engine, span=LONG)
    assert len(leases) == 10
    statements: list[str] = []
    writer = engine._file._writer
    assert isinstance(writer, sqlite3.Connection)
    writer.set_trace_callback(statements.append)

    exchange = await engine.exchange(
        [(lease, Done()) for lease in leases], {"default": 10}, span=LONG, holder=HOLDER
    )

    assert len(exchange.leases) == 10
    writes = [each for each in statements if each.startswith(("INSERT", "UPDATE", "DELETE"))]
    assert writes != []
    assert [each for each in writes if "propolis_group" in each or "propolis_busy" in each] == []


async def test_keys_that_were_seen_once_leave_nothing_behind(
    engine: SQLiteEngine, clock: FakeClock, path: Path
) -> None:
    """L5."""
    every = timedelta(seconds=10)
    await engine.add_rule(Rule(*EACH_KEY, UNBOUNDED, every=every, burst=2))
    await engine.put([a_job(key=f"k{number % 50}") for number in range(150)])
    for _ in range(2):
        leases = await take(engine, span=LONG)
        await engine.settle([(lease, Done()) for lease in leases])
        clock.advance(every)
    assert execute(path, "SELECT count(*) FROM propolis_busy") == [(50,)]

    clock.advance(every)
    while (await engine.sweep(limit=20)).again_in == timedelta(0):
        pass

    assert (await counts(engine)).waiting == 0
    for table in ("busy", "group", "held"):
        assert execute(path, f"SELECT * FROM propolis_{table}") == []


@pytest.mark.parametrize("scope", [Scope.KEY, Scope.QUEUE])
async def test_who_waits_hears_of_a_token_where_nobody_sweeps(engine: SQLiteEngine, scope: Scope) -> None:
    """L1."""
    every = timedelta(milliseconds=20)
    await engine.add_rule(Rule(RuleKind.LIMIT, scope, "default", UNBOUNDED, every=every))
    await engine.put([a_job(key="default"), a_job(key="default")])
    while await engine.wait(["default"], 0.1):  # until it has nothing more to hear
        await take(engine, "other")
    assert len(await take(engine, span=LONG)) == 1

    assert await engine.wait(["default"], 60.0)


@pytest.mark.parametrize("value", ["'junk'", "9000000000000000000", "NULL", "-9000000000000000000", "1.5"])
async def test_a_bucket_that_is_damaged_stops_no_key(engine: SQLiteEngine, path: Path, value: str) -> None:
    """L7."""
    await engine.add_rule(Rule(*EACH_KEY, 1, every=timedelta(seconds=1)))
    await engine.put([a_job(key="k1"), a_job(key="k1"), a_job(key="k2")])
    leases = await take(engine, limit=1)
    execute(path, f"UPDATE OR IGNORE propolis_busy SET full_us = {value}")

    assert len(await take(engine, span=LONG)) == 1
    assert await engine.settle([(lease, Done()) for lease in leases]) == []
    await engine.sweep()
    await take(engine)


async def test_a_job_that_is_gone_stops_no_group(engine: SQLiteEngine, path: Path) -> None:
    """L7: whoever has taken it away, the one behind it goes."""
    await engine.add_rule(Rule(*EACH_KEY, 0))
    jobs = [a_job(key="k1") for _ in range(3)]
    await engine.put(jobs)
    assert await take(engine) == []
    execute(path, f"DELETE FROM propolis_job WHERE id IN ('{jobs[0].id}', '{jobs[1].id}')")

    await engine.remove_rule(*EACH_KEY)

    assert [lease.id for lease in await take(engine)] == [jobs[2].id]


async def test_what_older_code_has_set_aside_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables know no first jobs of groups, and which key one is about."""
    path, known = tmp_path / "old.db", load_migrations("sqlite")
    monkeypatch.setattr(schema, "load_migrations", lambda _: known[:1])
    await SQLiteEngine(path).install()
    for n in (1, 2):
        execute(
            path,
            "INSERT INTO propolis_job (seq, id, task, queue, priority, pos, put_us, due_us, limit_key, "
            "max_crashes, plain, chosen, member, body) "
            f"VALUES ({n}, 'j{n}', 'tests.echo', 'default', 0, {n}, 0, 0, 'x', 3, 1, 0, 0, '{{}}')",
        )
    execute(path, "INSERT INTO propolis_held VALUES ('default', 'task_key', 'tests.echo x', 0, 1, 1)")
    execute(path, "INSERT INTO propolis_held VALUES ('default', 'key', 'x', 0, 2, 2)")
    execute(path, "INSERT INTO propolis_group VALUES ('default', 'task_key', 'tests.echo x', 0)")
    execute(path, "INSERT INTO propolis_group VALUES ('default', 'key', 'x', 0)")
    execute(path, "INSERT INTO propolis_busy VALUES ('key', 'x', 0, 1), ('task_key', 'tests.echo x', 0, 1)")
    execute(path, "INSERT INTO propolis_tally VALUES ('default', 2, 0, 0, 0, 2, 0, 0, 0, 0, 0)")
    monkeypatch.setattr(schema, "load_migrations", lambda _: known)
    assert await SQLiteEngine(path).install() == ["ran 0002_rates.sql"]

    engine = await SQLiteEngine(path).open()
    leases = await take(engine)
    await engine.settle([(lease, Done()) for lease in leases])
    await engine.close()

    assert [lease.id for lease in leases] == ["j1", "j2"]
    assert execute(path, "SELECT * FROM propolis_busy") == []


async def test_a_token_wakes_nobody_while_its_queue_is_paused(engine: SQLiteEngine, clock: FakeClock) -> None:
    """Whoever waited looked, found nothing, and waited again, at once and until somebody swept."""
    await engine.add_rule(Rule(*EACH_KEY, UNBOUNDED, every=timedelta(seconds=1)))
    await engine.put([a_job(key="k1") for _ in range(2)])
    assert len(await take(engine)) == 1
    pause = (RuleKind.PAUSE, Scope.QUEUE, "default")
    await engine.add_rule(Rule(*pause))
    clock.advance("2s")

    assert await take(engine) == []
    assert await engine.wait(["default"], 0.01) is False
    await engine.remove_rule(*pause)
    assert await engine.wait(["default"], 60) is True
    assert len(await take(engine)) == 1

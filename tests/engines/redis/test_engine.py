"""What is Redis' own: what is left behind, lists with gaps, full memory, administrators."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio
from tests.engines.redis.looking import COUNTERS, keys, listed, take

from propolis import App
from propolis.app.client.client import Client
from propolis.core.batch import Batch, callback_id
from propolis.core.job import Dead, Done, Error, Lease, Released, Retried, State
from propolis.core.protocols import Durability, Exchange, Filter, Note, Rule, RuleKind, Scope, Watched
from propolis.core.records import Change, Swap
from propolis.engines import make_engine
from propolis.engines.address import Address
from propolis.engines.redis import engine as redis_engine
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.scripts import load_scripts, load_sharded_scripts
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.errors import (
    BadSetting,
    MemoryFull,
    QueueFull,
    StorageFull,
    UnsafeStorage,
)
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.redis import RedisServer, redis

# --- nothing is left behind --------------------------------------------------------------


async def test_looking_into_an_empty_queue_writes_nothing(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """S1.27: neither does settling, renewing, cancelling or deleting what is not there."""
    gone = Lease("gone", 7, "t", "default", b"", 1, 0, 0, await engine.now(), await engine.now(), HOLDER)
    for _ in range(3):
        assert await take(engine) == []
        got = await engine.exchange([(gone, Done())], {"default": 5}, span=SPAN, holder=HOLDER)
        assert got == Exchange([gone], [])
        assert await engine.settle([(gone, Retried()), (gone, Released())]) == [gone, gone]
        assert (await engine.renew([gone], span=SPAN))[0].until is None
        await engine.sweep()
        assert await engine.cancel(["gone"]) == [False]
        assert await engine.replay(["gone"]) == await engine.delete(["gone"]) == [False]
        assert await engine.reschedule("gone", await engine.now()) is False
        assert await engine.position("gone") is None
        assert await engine.drop("default") == 0
        assert await engine.delete_batch("gone") is False
        assert await engine.members("gone") == []
    assert await keys(link, prefix) == set()


async def test_finished_jobs_leave_only_counters(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """S4.22."""
    await engine.put([a_job(n) for n in range(20)])
    await engine.settle([(lease, Retried()) for lease in await take(engine)])
    await engine.settle([(lease, Done()) for lease in await take(engine)])
    await engine.settle([(lease, Done()) for lease in await take(engine)])
    assert await take(engine) == []

    assert await keys(link, prefix) == COUNTERS | {"queues", "{default}:tally"}


async def test_a_dropped_queue_leaves_no_key(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """S4.15: whatever stood in it."""
    await engine.put([a_job(n, priority=n % 3) for n in range(30)])
    await engine.put([a_job(delay_ms=60_000), a_job(expires_in_ms=60_000), a_job(unique="k")])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "tests.held"))
    await engine.put([a_job(task="tests.held", priority=9) for _ in range(3)])
    one, two, three, four = await take(engine, 4)
    await engine.settle(
        [
            (one, Done(b"1", keep=SPAN)),
            (two, Dead(error=Error("E", "m"))),
            (three, Released()),
            (four, Done()),
        ]
    )
    await engine.cancel([lease.id for lease in await take(engine, 0)])
    await engine.remove_rule(RuleKind.PAUSE, Scope.TASK, "tests.held")

    assert await engine.drop("default") == 35

    assert await keys(link, prefix) == COUNTERS
    assert await engine.queues() == {}


async def test_a_deleted_batch_leaves_no_key(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """S4.15."""
    back = a_job(id=callback_id("b", "finished"), chosen=True)
    await engine.put_batch(Batch(id="b", on_finished=back), [a_job(n, batch="b", member=n) for n in range(9)])
    one, two = await take(engine, 2)
    await engine.settle([(one, Done(b"1")), (two, Dead(keep=None))])
    assert await engine.delete_batch("b") is True
    await engine.drop("default")

    assert await keys(link, prefix) == COUNTERS


# --- lists with gaps ---------------------------------------------------------------------


@pytest.mark.parametrize("puts", [[["job-4", "new"]], [["job-4"], ["new"]]], ids=["together", "one by one"])
async def test_what_is_struck_out_of_a_line_never_comes_back(
    engine: RedisEngine, link: RedisLink, prefix: str, puts: list[list[str]]
) -> None:
    """I7, I15: not even when the same id is put again while its old entry is still in the list."""
    ids = [f"job-{n}" for n in range(10)]
    await engine.put([a_job(id=each) for each in ids])
    assert await engine.cancel(["job-2", "job-4"]) == [True, True]
    assert await engine.delete(["job-2", "job-4"]) == [True, True]
    for together in puts:
        await engine.put([a_job(id=each) for each in together])
    await engine.put([a_job(id="job-2", delay_ms=1)])

    assert (await engine.queues())["default"].waiting == 11
    assert await engine.position("job-4") == 8
    assert [lease.id for lease in await take(engine)][:10] == [
        *(each for each in ids if each not in ("job-2", "job-4")),
        "job-4",
        "new",
    ]
    await engine.drop("default")
    assert not [key for key in await keys(link, prefix) if "void" in key]


async def test_a_line_that_is_mostly_gaps_is_written_anew(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """F45: a queue that nobody leases from does not grow with what is cancelled."""
    await engine.put([a_job(id=f"job-{n}") for n in range(500)])
    await engine.cancel([f"job-{n}" for n in range(499) if n % 10])

    line = f"{prefix}:{{default}}:line:0"
    assert await link.command("LLEN", line) < 150
    counts = (await engine.queues())["default"]
    assert (counts.ready, counts.cancelled) == (51, 449)
    expected = [*(f"job-{n}" for n in range(0, 499, 10)), "job-499"]
    assert await engine.position("job-490") == 49
    assert [lease.id for lease in await take(engine)] == expected


async def test_bundles_of_any_size_are_one_call(engine: RedisEngine) -> None:
    """Lua can pass only some thousand values at once."""
    jobs = [a_job(n, id=f"job-{n}") for n in range(9_500)]
    receipts = await engine.put(jobs)
    assert all(receipt.created for receipt in receipts)
    assert not any(receipt.created for receipt in await engine.put(jobs))

    leases = await take(engine, 20_000)
    assert [lease.id for lease in leases] == [job.id for job in jobs]
    assert all(renewal.until for renewal in await engine.renew(leases, span=SPAN))
    assert await engine.settle([(lease, Released()) for lease in leases]) == []
    leases = await take(engine, 20_000)
    assert [lease.id for lease in leases] == [job.id for job in jobs]
    assert await engine.settle([(lease, Done()) for lease in leases]) == []
    assert (await engine.queues())["default"].total == 0


@pytest_asyncio.fixture
async def app(valkey_url: str, prefix: str) -> AsyncIterator[App]:
    app = App(f"{valkey_url}?prefix={prefix}:")
    yield app
    await app.aclose()


async def test_a_put_of_one_job_is_a_few_commands() -> None:
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        await engine.put([a_job()], token="first")  # sends the text of the script
        server.forget_calls()
        for n in range(10):
            await engine.put([a_job()], token=str(n))
        calls = server.calls()
        assert calls.pop("evalsha") == 10
        calls.pop("config|resetstat")
        assert sum(calls.values()) <= 11 * 10
        await engine.close()


async def test_one_bundle_of_many_is_made_ready_while_the_last_is_put(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I15: two are under way at a time, no more, and they keep their order."""
    engine = await app.ready()
    real, under_way, most = engine.put, 0, 0

    async def put(*args: Any, **kwargs: Any) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        receipts = await real(*args, **kwargs)
        under_way -= 1
        return receipts

    monkeypatch.setattr(engine, "put", put)

    @app.task
    async def ping(n: int) -> None: ...

    handles = await ping.many(range(4500)).aenqueue()

    assert [lease.id for lease in await take(engine, 5000)] == [handle.id for handle in handles]
    assert (most, under_way) == (2, 0)


def puts_under_way() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if Client._put.__qualname__ in repr(task.get_coro())]


async def test_of_many_that_do_not_fit_whole_bundles_are_put_and_nothing_comes_later(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was under way beside a bundle that is refused has ended, too, when the error comes."""
    engine = await app.ready()
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1500))
    real, seen = engine.put, 0

    async def put(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen = max(seen, len(puts_under_way()))
        return await real(*args, **kwargs)

    monkeypatch.setattr(engine, "put", put)

    @app.task
    async def ping(n: int) -> None: ...

    with pytest.raises(QueueFull):
        await ping.many(range(2100)).aenqueue()

    assert seen == 2  # so that they would be found
    assert not puts_under_way()
    assert (await engine.queues())["default"].ready in (1000, 1100)


async def test_many_jobs_are_listed_page_by_page(engine: RedisEngine) -> None:
    """In the order of their puts as long as one call can look through all of them: decision 0065."""
    for first, count in ((0, 2_000), (2_000, 1_000)):
        await engine.put([a_job(n, id=f"job-{first + n}") for n in range(count)])
        seen = [info.id for info in await listed(engine, Filter(queue="default"), 700)]
        expected = [f"job-{n}" for n in range(first + count)]
        assert seen == expected if first == 0 else sorted(seen) == sorted(expected)


# --- servers and their administrators ----------------------------------------------------


async def test_full_memory_refuses_puts_while_jobs_still_run_and_end() -> None:
    """F26."""
    for kind in ("valkey", "redis"):
        if kind == "redis" and shutil.which("redis-server") is None:
            continue
        with redis(kind) as server:
            await fill_and_drain(server)


async def fill_and_drain(server: RedisServer) -> None:
    engine = await RedisEngine(target_of(Address(server.url))).open()
    await engine.put([a_job("x" * 1000) for _ in range(200)])
    running = await take(engine, 10)
    server.ask("CONFIG", "SET", "maxmemory", "1mb")

    before = (await engine.queues())["default"]
    for jobs in ([a_job("x" * 1000)], [a_job(delay_ms=5)], [a_job(chosen=True, unique="k")]):
        with pytest.raises(QueueFull, match="memory") as full:
            await engine.put(jobs)
        assert isinstance(full.value, MemoryFull)
        assert isinstance(full.value, StorageFull)
    with pytest.raises(MemoryFull):
        await engine.put_batch(Batch(id="b"), [a_job(batch="b")])
    assert (await engine.queues())["default"] == before
    assert await engine.batches() == []

    assert all(renewal.until for renewal in await engine.renew(running, span=SPAN))
    assert await engine.note([Note(running[0], lines=("a line",), checkpoint=b"here")]) == []
    again, *others = running
    assert await engine.settle([(again, Retried(error=Error("E", "m")))]) == []
    got = await engine.exchange([(each, Done()) for each in others], {"default": 5}, span=SPAN, holder=HOLDER)
    assert (len(got.lost), len(got.leases)) == (0, 5)
    await engine.sweep()
    await operate(engine, got.leases[0])
    await engine.close()


async def operate(engine: RedisEngine | ShardedEngine, running: Lease) -> None:
    """L6.6, F54: all that an operator may want to do where memory is full."""
    waiting, later, *_ = (await engine.find(Filter(state=State.READY))).jobs
    for rule in (
        Rule(RuleKind.PAUSE, Scope.QUEUE, "default", 0),
        Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 1),
        Rule(RuleKind.CAP, Scope.QUEUE, "default", 5),
    ):
        assert await engine.add_rule(rule)
    assert await engine.cancel([waiting.id, running.id]) == [True, True]
    assert await engine.reschedule(later.id, datetime(2100, 1, 1, tzinfo=UTC))
    assert await engine.settle([(running, Dead(error=Error("E", "m")))]) == []
    assert await engine.replay([running.id]) == [True]
    assert await engine.delete([waiting.id]) == [True]
    assert await engine.remove_rule(RuleKind.LIMIT, Scope.TASK, "tests.echo")
    assert await engine.drop("default") > 0
    [swapped] = await engine.swap([Swap(changes=(Change(kind="worker", name="me", value=b"alive"),))])
    assert swapped.version
    for swap in (
        Swap(puts=(a_job(),)),
        Swap(changes=(Change(kind="cursor", name="it", value=b"x" * 5000),)),
    ):
        with pytest.raises(StorageFull):
            await engine.swap([swap])
    assert isinstance(engine, Watched)
    [complaint] = await engine.complaints()
    assert re.search("is full .*raise maxmemory", complaint)


async def test_after_flushall_leases_are_lost_and_nothing_comes_back() -> None:
    """F27."""
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        await engine.put([a_job(), a_job()])
        leases = await take(engine)
        server.ask("FLUSHALL")

        assert [renewal.until for renewal in await engine.renew(leases, span=SPAN)] == [None, None]
        assert await engine.settle([(leases[0], Done()), (leases[1], Retried())]) == leases
        assert await engine.sweep() == await engine.sweep()
        assert await engine.queues() == {}
        await engine.put([a_job(id=leases[0].id)])
        [again] = await take(engine)
        assert again.fence > leases[0].fence
        await engine.close()


async def test_forgotten_scripts_are_sent_again() -> None:
    """F27."""
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        await engine.put([a_job()])
        server.ask("SCRIPT", "FLUSH")
        [lease] = await take(engine)
        server.ask("SCRIPT", "FLUSH")
        assert await engine.settle([(lease, Done())]) == []
        await engine.close()


async def test_a_server_that_may_throw_jobs_away_is_refused() -> None:
    """F26."""
    with redis(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        engine = make_engine(server.url)
        with pytest.raises(UnsafeStorage, match="noeviction"):
            await engine.open()


def test_in_a_cluster_all_keys_must_share_a_slot() -> None:
    assert isinstance(make_engine("redis+cluster://here?prefix={shop}:"), RedisEngine)
    with pytest.raises(BadSetting, match="hash tag"):
        make_engine("redis+cluster://here?prefix=shop:")


async def test_durability_is_what_the_server_says() -> None:
    with redis() as server:
        for settings, level in {
            ("no", "everysec"): Durability.MEMORY,
            ("yes", "everysec"): Durability.PROCESS,
            ("yes", "always"): Durability.POWER,
        }.items():
            for name, value in zip(("appendonly", "appendfsync"), settings, strict=True):
                server.ask("CONFIG", "SET", name, value)
            engine = await make_engine(server.url).open()
            assert engine.durability is level
            await engine.close()


async def test_a_fence_is_never_given_twice_even_if_the_last_lease_is_not_known(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """F25, I3: as on a replica that took over without the last leases."""
    await engine.put([a_job()])
    [first] = await take(engine)
    await engine.settle([(first, Released())])
    await link.command("DEL", f"{prefix}:state")

    [second] = await take(engine)

    assert second.fence > first.fence


async def test_a_waiting_job_of_300_bytes_takes_less_than_600() -> None:
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        before = int(server.info("memory")["used_memory"])
        for _ in range(20):
            await engine.put([a_job("x" * 200) for _ in range(500)])
        used = int(server.info("memory")["used_memory"]) - before
        [lease] = await take(engine, 1)
        assert 280 < len(lease.body) < 320
        assert used / 10_000 < 600
        await engine.close()


async def test_scripts_are_constant_and_few(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """S07: whatever is asked for, the server is sent texts that are files of the package."""
    known = load_scripts()
    assert len({script.sha for script in known.values()}) == len(known)
    answers = await link.command("SCRIPT", "EXISTS", *(script.sha for script in known.values()))
    assert len(answers) == len(known)


@pytest.mark.parametrize("load", [load_scripts, load_sharded_scripts], ids=["one slot", "shards"])
async def test_the_server_can_compile_every_script(
    link: RedisLink, load: Callable[[], dict[str, LuaScript]]
) -> None:
    """A function of Lua has at most 60 variables from outside and 200 of its own."""
    for name, script in load().items():
        assert await link.command("SCRIPT", "LOAD", script.text) == script.sha, name


def test_the_engine_does_not_import_redis_py(valkey_url: str, prefix: str, uncovered: None) -> None:
    code = f"""
import asyncio, sys
from propolis.core.records import Change, Swap
from propolis.engines import make_engine
from propolis.testing.engines.samples import a_job
async def main():
    engine = await make_engine("{valkey_url}?prefix={prefix}:").open()
    await engine.put([a_job()])
    await engine.close()
asyncio.run(main())
assert "hiredis" in sys.modules
assert "redis" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_key_that_the_scripts_use_is_in_the_layout() -> None:
    """The layout at the top of engine.py is its only description."""
    layout = redis_engine.__doc__ or ""
    texts = [script.text.decode() for script in load_sharded_scripts().values()]
    of_app = {name for text in texts for name in re.findall(r"base \.\. '(\w+:?)'", text)}
    of_batch = {name for text in texts for name in re.findall(r"batch_key\([\w.]+, '(\w+:)'\)", text)}
    of_queue = {name for text in texts for name in re.findall(r"of_queue\([\w.]+, '(\w+:?)'", text)}

    assert {"jobs", "outbox:", "batch:"} <= of_app
    assert "batch_members:" in of_batch
    assert {"running", "line:"} <= of_queue
    assert [name for name in of_app | of_batch if f"PREFIX{name}" not in layout] == []
    assert [name for name in of_queue if not re.search(rf"PREFIX{{queue}}:(\w+\|)*{name}", layout)] == []


# --- the order of what follows -------------------------------------------------------------


@pytest.mark.parametrize("queue", ["default", "other"])
@pytest.mark.parametrize("outcome", [Done(), Done(b"1"), Dead()], ids=["plain", "kept", "dead"])
async def test_a_callback_comes_before_the_end_of_a_later_job_that_holds_its_key(
    engine: RedisEngine, queue: str, outcome: Done | Dead
) -> None:
    """I16: where the member ends first, the key is still taken, and the callback is left out."""
    for first, expected in ((True, 0), (False, 1)):
        name = f"batch-{first}"
        back = a_job(id=callback_id(name, "finished"), chosen=True, unique="k", queue="callbacks")
        await engine.put([a_job(id=f"holder-{first}", unique="k", queue=queue)])
        await engine.put_batch(Batch(id=name, on_finished=back), [a_job(batch=name, member=0)])
        leases = [*await take(engine), *(await take(engine, queue=queue) if queue != "default" else [])]
        member, holder = sorted(leases, key=lambda lease: lease.batch is None)
        ends: list[tuple[Lease, Done | Dead]] = [(member, outcome), (holder, Done())]
        assert await engine.settle(ends if first else ends[::-1]) == []
        assert len(await take(engine, queue="callbacks")) == expected

"""The open door: what any program pushes is taken in, counted, listed, dropped and shelved."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from tests.engines.redis.looking import COUNTERS, keys, listed, take

from propolis import App
from propolis.core import wire
from propolis.core.job import Done, Lease, State
from propolis.core.protocols import Filter
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.codec import taken_in
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.redis import redis
from propolis.worker import Settings, Worker


async def push(link: RedisLink, prefix: str, *payloads: str | bytes, queue: str = "default") -> None:
    await link.command("LPUSH", f"{prefix}:{{{queue}}}:incoming", *payloads)


async def test_what_is_pushed_is_leased_in_its_order(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """S1.1, I14: with an id of its own, or with one that it is given."""
    first = '{"id": "mine", "task": "mail.send", "queue": "default", "args": ["\\u00e9"]}'
    await push(link, prefix, first, '{"task": "mail.send", "priority": 0}')

    own, given = await take(engine)

    assert (own.id, own.task, own.body) == ("mine", "mail.send", first.encode())
    assert given.task == "mail.send"
    assert json.loads(given.body)["id"] == given.id
    assert await engine.settle([(own, Done()), (given, Done())]) == []
    assert (await engine.queues())["default"].total == 0


async def test_two_identical_pushes_are_two_jobs(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    await push(link, prefix, '{"task": "t"}', '{"task": "t"}')

    one, other = await take(engine)

    assert one.id != other.id
    assert await take(engine) == []


async def test_an_id_that_is_pushed_twice_is_one_job(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """I1."""
    await push(link, prefix, '{"id": "one", "task": "t"}', '{"id": "one", "task": "t"}')

    assert [lease.id for lease in await take(engine)] == ["one"]
    assert await take(engine) == []


async def test_a_push_waits_behind_what_was_put_before(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """I15: and a priority counts at the door as elsewhere."""
    await engine.put([a_job(id="put")])
    await push(link, prefix, '{"id": "pushed", "task": "t"}', '{"id": "high", "task": "t", "priority": 5}')
    await engine.sweep()

    assert [lease.id for lease in await take(engine)] == ["high", "put", "pushed"]


async def test_the_door_decides_the_queue(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    await push(link, prefix, '{"task": "t", "queue": "elsewhere"}', queue="mail")

    [lease] = await take(engine, queue="mail")

    assert lease.queue == "mail"
    assert json.loads(lease.body)["queue"] == "mail"


@pytest.mark.parametrize(
    "payload",
    [
        b"not json",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"args": []}',
        b'{"task": 5}',
        b'{"task": "t", "delay_ms": -1}',
        b'{"task": "t", "v": 99}',
        b'{"task": "white space"}',
        b'{"task": "t", "args": ' + b"[" * 100 + b"]" * 100 + b"}",
        b"x" * 300_000,
        b"",
        b"\x00\n\x00",
    ],
)
async def test_what_is_no_job_goes_to_the_broken_shelf_with_its_bytes(
    engine: RedisEngine, link: RedisLink, prefix: str, payload: bytes
) -> None:
    """F41, S1.27: and what stands behind it is leased all the same."""
    await push(link, prefix, payload, '{"id": "good", "task": "t"}')

    assert [lease.id for lease in await take(engine)] == ["good"]

    [info] = (await engine.find(Filter(state=State.DEAD))).jobs
    assert (info.body, info.reason, info.queue) == (payload, "broken", "default")
    assert info.error is not None
    assert info.error.message


async def test_a_broken_push_can_be_replayed(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    await push(link, prefix, "not json")
    assert await take(engine) == []
    [info] = (await engine.find(Filter(state=State.DEAD))).jobs

    assert await engine.replay([info.id]) == [True]
    [lease] = await take(engine)
    assert lease.body == b"not json"


async def test_many_who_look_at_the_door_take_each_push_once(
    engine: RedisEngine, link: RedisLink, valkey_url: str, prefix: str
) -> None:
    """S4.5: identical pushes among them."""
    others = [await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:").open() for _ in range(4)]
    await push(link, prefix, *['{"task": "same"}'] * 50, *[f'{{"task": "t{n}"}}' for n in range(50)])

    found = await asyncio.gather(*(take(each, 100) for each in [engine, *others]))

    leases = [lease for each in found for lease in each]
    leases += await take(engine, 200)
    assert len(leases) == len({lease.id for lease in leases}) == 100
    assert sum(lease.task == "same" for lease in leases) == 50
    for each in others:
        await each.close()


async def test_nobody_searches_the_door_for_what_another_has_taken() -> None:
    """L5.6: each push is read and taken from the end of the list, by whoever comes first."""
    with redis() as server:
        engines = [await RedisEngine(target_of(Address(server.url))).open() for _ in range(4)]
        pushes = [f'{{"task": "t", "args": [{n}]}}' for n in range(4000)]
        server.ask("LPUSH", "propolis:{default}:incoming", *pushes)
        server.forget_calls()

        leases: list[Lease] = []
        while len(leases) < 4000:
            for got in await asyncio.gather(*(take(engine, 100) for engine in engines)):
                leases += got

        calls = server.calls()
        assert len({lease.id for lease in leases}) == 4000
        assert "lrem" not in calls
        # Each of the four may have read what only one has got, and compared it with the next.
        assert calls["lindex"] <= 2 * 4 * 4000 + 1000
        for engine in engines:
            await engine.close()


async def test_what_was_read_at_the_door_and_then_given_up_is_lost_to_nobody(
    engine: RedisEngine, link: RedisLink, valkey_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5.6, S4.5: one dies after it has read, one comes too late."""
    late, dying = [
        await RedisEngine(target_of(Address(valkey_url)), prefix=f"{prefix}:").open() for _ in "ab"
    ]
    read, going = asyncio.Event(), asyncio.Event()

    async def waits(queue: str, found: Any) -> Any:
        read.set()
        await going.wait()
        return [taken_in(queue, pushed)[1] for pushed in found]

    for each in (late, dying):
        monkeypatch.setattr(each, "_meanings", waits)
    await push(link, prefix, *[f'{{"task": "t", "args": [{n % 3}]}}' for n in range(10)])
    tasks = []
    for each in (late, dying):
        tasks.append(asyncio.create_task(take(each)))
        await read.wait()
        read.clear()
    tasks[1].cancel()

    first = await take(engine)
    await push(link, prefix, *['{"task": "t", "args": [1]}'] * 2)
    going.set()
    second = await tasks[0] + await take(engine)

    assert [json.loads(lease.body)["args"] for lease in first] == [[n % 3] for n in range(10)]
    assert len({lease.id for lease in [*first, *second]}) == 12
    await late.close()
    await dying.close()


async def test_what_stands_at_doors_is_listed_after_the_others(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L5.6: page by page, the oldest of each queue first; what is no job as well."""
    await engine.put(
        [a_job(id=f"put-{n}", queue=queue) for n, queue in enumerate(["default", "mail", "none"])]
    )
    pushes = [f'{{"task": "t{n % 2}", "id": "pushed-{n}"}}' for n in range(600)]
    await push(link, prefix, *pushes)
    await push(link, prefix, '{"task": "mail"}', "no job", queue="mail")

    infos = await listed(engine, Filter(), 250)

    assert [info.id for info in infos] == [
        *("put-0", "put-1", "put-2"),
        *(f"pushed-{n}" for n in range(600)),
        *("", ""),
    ]
    assert {info.state for info in infos} == {State.READY}
    assert [(info.queue, info.task) for info in infos[-2:]] == [("mail", "mail"), ("mail", "(broken)")]
    assert wire.decode(infos[-2].body).task == "mail"  # as `propolis check` looks at it
    assert infos[-1].body == b"no job"
    counted = await engine.queues()
    for queue in ("default", "mail"):
        assert len(await listed(engine, Filter(queue=queue), 7)) == counted[queue].ready
    assert len(await listed(engine, Filter(queue="default", task="t1", state=State.READY), 299)) == 300
    for where in (
        Filter(state=State.DEAD),
        Filter(reason="broken"),
        Filter(scheduled=True),
        Filter(batch="b"),
    ):
        assert await listed(engine, where, 10) == []
    assert len(await take(engine, 1000)) == 500 + 1
    assert len(await listed(engine, Filter(queue="default", state=State.READY), 1000)) == 100


async def test_large_pushes_come_in_small_bites() -> None:
    """L5.6: however many there are, an exchange moves no more than a few at once."""
    with redis() as server:
        engine = await RedisEngine(target_of(Address(server.url))).open()
        large = '{"task": "t", "args": ["' + "x" * 200_000 + '"]}'
        server.ask("LPUSH", "propolis:{default}:incoming", *[large] * 100)
        before = int(server.info("stats")["total_net_output_bytes"])

        [lease] = await take(engine, 1)

        assert len(lease.body) > 200_000
        assert int(server.info("stats")["total_net_output_bytes"]) - before < 2_500_000
        taken = 1
        while got := await take(engine, 10):
            taken += len(got)
        assert taken == 100
        await engine.close()


async def test_what_stands_at_the_door_is_counted_and_dropped(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L5.6, I8."""
    await engine.put([a_job()])
    await push(link, prefix, *['{"task": "t"}'] * 3)
    counts = (await engine.queues())["default"]
    assert (counts.ready, counts.put, counts.total) == (4, 4, 4)

    assert await engine.drop("default") == 4
    assert await engine.queues() == {}
    assert await keys(link, prefix) <= COUNTERS


async def test_lost_pushed_and_waiting_jobs_are_taken_once_by_thirty_two_who_race(
    engine: RedisEngine, link: RedisLink, valkey_url: str, prefix: str
) -> None:
    """S4.2, S4.3: whatever way a job comes from."""
    target = target_of(Address(valkey_url))
    many = [await RedisEngine(target, prefix=f"{prefix}:").open() for _ in range(32)]
    lost = [a_job(n) for n in range(40)]
    await engine.put(lost)
    assert len(await engine.lease({"default": 40}, span=timedelta(0), holder="gone")) == 40
    waiting = [a_job(n) for n in range(40)]
    await engine.put(waiting)
    await push(link, prefix, *['{"task": "pushed"}'] * 40)

    async def race(handle: RedisEngine) -> list[Lease]:
        taken: list[Lease] = []
        while True:
            await handle.sweep()
            if not (got := await take(handle, 3)):
                return taken
            taken += got

    found = [lease for leases in await asyncio.gather(*map(race, many)) for lease in leases]
    assert len(found) == len({lease.id for lease in found}) == 120
    assert {job.id for job in [*lost, *waiting]} <= {lease.id for lease in found}
    assert {lease.losses for lease in found if lease.id in {job.id for job in lost}} == {1}
    for each in many:
        await each.close()


async def test_a_push_wakes_an_idle_worker(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """L1."""
    await engine.wait(["default"], 0.05)
    waiter = asyncio.create_task(engine.wait(["default"], 20))
    await asyncio.sleep(0)

    await push(link, prefix, '{"task": "t"}')

    assert await waiter is True
    assert len(await take(engine)) == 1


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="there is no redis-cli here")
async def test_a_job_can_come_from_redis_cli_and_is_run(valkey_url: str, prefix: str) -> None:
    """S1.1."""
    ran = await run_until_called(
        f"{valkey_url}?prefix={prefix}:",
        ["redis-cli", "-u", valkey_url, "LPUSH", f"{prefix}:{{default}}:incoming", _PUSHED],
    )
    assert ran == "from outside"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
async def test_a_job_can_come_from_node_and_is_run(valkey_url: str, prefix: str) -> None:
    """S1.1: with nothing but a socket."""
    host, _, port = valkey_url.removeprefix("redis://").partition("/")[0].partition(":")
    key = f"{prefix}:{{default}}:incoming"
    ran = await run_until_called(
        f"{valkey_url}?prefix={prefix}:", ["node", "-e", _NODE, host, port, key, _PUSHED]
    )
    assert ran == "from outside"


_PUSHED = '{"task": "greet", "args": ["from outside"]}'
_NODE = """
const [host, port, key, payload] = process.argv.slice(1);
const parts = ["LPUSH", key, payload];
const bulk = (part) => `$${Buffer.byteLength(part)}\\r\\n${part}\\r\\n`;
const command = `*${parts.length}\\r\\n` + parts.map(bulk).join("");
const socket = require("net").connect(port, host, () => socket.write(command));
socket.on("data", () => socket.end());
"""


async def run_until_called(url: str, command: list[str]) -> str:
    """What the task was given by a job that another program pushed while the worker was idle."""
    app = App(url)
    called: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @app.task(name="greet")
    async def greet(text: str) -> None:
        called.set_result(text)

    worker = Worker(app, Settings())
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True, timeout=30)
    both: list[asyncio.Future[Any]] = [called, running]
    await asyncio.wait(both, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    worker.stop()
    await running
    await app.aclose()
    return called.result()

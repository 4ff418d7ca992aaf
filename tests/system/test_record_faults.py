"""Records and feeds while answers are lost, connections break and the server is killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from propolis.core.ids import new_id
from propolis.core.protocols import Feeds, Records
from propolis.core.records import Change, Record, Swap, Swapped
from propolis.engines import open_engine
from propolis.engines.shared import feed_verbs
from propolis.errors import EngineUnavailable, OutcomeUnknown
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.binaries import free_port
from propolis.testing.servers.proxy import Proxy
from propolis.testing.servers.redis import SLOTS, redis
from propolis.testing.servers.serving import postgres

Server = Any  # a PostgresServer or a RedisServer: both have a URL and a port, and can be killed


@contextmanager
def one_node() -> Iterator[Server]:
    """A cluster of one node, which an app with shards takes for any other."""
    settings = {"cluster-enabled": "yes", "cluster-port": free_port(), "cluster-require-full-coverage": "no"}
    with redis(durable=True, settings=settings) as node:
        node.ask("CLUSTER", "ADDSLOTS", *range(SLOTS))
        while "cluster_state:ok" not in node.ask("CLUSTER", "INFO"):
            time.sleep(0.01)
        yield node


SERVERS: dict[str, Callable[[], AbstractContextManager[Server]]] = {
    "postgres": partial(postgres, durable=True),
    "redis": partial(redis, durable=True),
    "shards": one_node,
}


@pytest.fixture(scope="module", params=list(SERVERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(kind: str) -> Iterator[Server]:
    with SERVERS[kind]() as started:
        yield started


@pytest.fixture
def url(kind: str, server: Server) -> str:
    return f"redis+cluster://127.0.0.1:{server.port}?shards=4" if kind == "shards" else str(server.url)


@pytest_asyncio.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as opened:
        yield opened


@pytest_asyncio.fixture
async def direct(url: str) -> AsyncIterator[Any]:
    opened = await open_engine(url)
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def engine(kind: str, url: str, server: Server, direct: Any, proxy: Proxy) -> AsyncIterator[Any]:
    """Through the proxy.  The node of a cluster says where it is: from now on, that it is there."""
    assert direct.durability is not None  # it has asked before
    if kind == "shards":
        server.ask("CONFIG", "SET", "cluster-announce-port", proxy.port)
    opened = await open_engine(url.replace(f":{server.port}", f":{proxy.port}"))
    yield opened
    await opened.close()
    if kind == "shards":
        server.ask("CONFIG", "SET", "cluster-announce-port", 0)


def stored(value: bytes, expected: int | None = None, *, name: str) -> Swap:
    change = Change(kind="k", name=name, value=value, expected=expected)
    return Swap(changes=(change,), puts=(a_job(queue=name),))


async def found(engine: Records, name: str) -> Record | None:
    read = await engine.records("k", names=[name])
    return read.records[0] if read.records else None


async def jobs_put(engine: Any, queue: str) -> int:
    await engine.sweep()  # it sends on what a call has left behind that was to go to another shard
    count: int = (await engine.queues())[queue].put
    return count


async def surely(engine: Records, swap: Swap) -> Swapped:
    """As a careful caller does it: the same call again until it is answered."""
    token = new_id()
    while True:
        try:
            [answer] = await engine.swap([swap], token=token)
        except (EngineUnavailable, OutcomeUnknown):
            await asyncio.sleep(0.01)
        else:
            return answer


async def test_a_swap_whose_answer_is_lost_answers_the_same_when_it_is_repeated(
    engine: Any, direct: Any, proxy: Proxy
) -> None:
    """F15: also with its refusal, and it puts its job once."""
    name = new_id()
    await engine.swap([Swap()])  # from now on Redis knows the script
    for n in range(3):
        token = f"lost-{n}-{name}"
        before = await found(direct, name)
        version = before.version if before else 0
        swaps = [stored(b"%d" % n, version, name=name), stored(b"never", version, name=name)]
        proxy.lose_answer_to(token.encode())
        with pytest.raises(OutcomeUnknown):
            await engine.swap(swaps, token=token)
        after = await found(direct, name)
        assert after is not None
        answers = await engine.swap(swaps, token=token)
        assert [answer.version for answer in answers] == [after.version, None]
        assert await found(direct, name) == after
        assert await jobs_put(direct, name) == n + 1
    assert proxy.lost == 3


async def test_a_record_that_many_count_with_loses_no_step_while_connections_break(
    engine: Any, direct: Any, proxy: Proxy
) -> None:
    """F16."""
    name = new_id()

    async def count_up() -> None:
        steps = 0
        while steps < 5:
            try:
                record = await found(engine, name)
            except EngineUnavailable:
                continue
            value, version = (int(record.value), record.version) if record else (0, 0)
            answer = await surely(engine, stored(b"%d" % (value + 1), version, name=name))
            steps += answer.version is not None

    counting = asyncio.gather(*(count_up() for _ in range(3)))
    for _ in range(10):
        proxy.reset()
        await asyncio.wait([counting], timeout=0.05)  # the pace of the faults, not a wait for something
    await counting
    record = await found(direct, name)
    assert record is not None
    assert record.value == b"15"
    assert await jobs_put(direct, name) == 15


async def test_a_follower_misses_nothing_while_its_connections_break(
    engine: Any, direct: Any, proxy: Proxy
) -> None:
    feed, sent = new_id(), [b"%d" % n for n in range(40)]
    seen: list[bytes] = []

    async def follow() -> None:
        after = 0
        while len(seen) < len(sent):
            try:
                page = (await engine.follow({feed: after}, limit=3, wait=600))[feed]
            except EngineUnavailable:
                continue
            assert not page.gap
            seen.extend(entry.value for entry in page.entries)
            after = page.after

    following = asyncio.create_task(follow())
    for n, value in enumerate(sent):
        assert await direct.publish(feed, [value]) is not None
        if n % 4 == 0:
            proxy.reset()
        elif n % 4 == 2:
            proxy.swallow_an_answer()
    await following
    assert seen == sent


async def test_a_publish_raises_nothing_whatever_happens_on_the_way(
    engine: Any, direct: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_verbs, "WITHIN", 0.3)
    feed = new_id()
    assert isinstance(engine, Feeds)
    before = await direct.publish(feed, [b"before"])
    proxy.lose_answer_to(feed.encode())
    assert await engine.publish(feed, [b"perhaps"]) is None
    proxy.black_hole()
    assert await engine.publish(feed, [b"perhaps"]) is None
    proxy.restore()
    await proxy.refuse()
    assert await engine.publish(feed, [b"never"]) is None
    assert engine.dropped == 3
    await proxy.accept()

    monkeypatch.setattr(feed_verbs, "WITHIN", 60.0)
    while (after := await engine.publish(feed, [b"after"])) is None:
        pass
    page = (await direct.follow({feed: before}))[feed]
    values = {entry.number: entry.value for entry in page.entries}
    assert (values.pop(after), page.gap) == (b"after", False)
    assert set(values.values()) <= {b"perhaps"}  # the server may have heard it, also late


async def test_after_kill_9_what_was_swapped_is_there_and_no_number_comes_back(
    server: Server, direct: Any
) -> None:
    """F11, I3."""
    name = new_id()
    kept, removed = [await surely(direct, stored(b"1", 0, name=each)) for each in (name, f"{name}-removed")]
    gone = Change(kind="k", name=f"{name}-removed", value=None)
    last = await surely(direct, Swap(changes=(gone,)))
    number = await direct.publish(name, [b"1"])
    server.kill()
    with pytest.raises((OutcomeUnknown, EngineUnavailable)):
        await direct.swap([stored(b"2", kept.version, name=name)])
    assert await direct.publish(name, [b"2"]) is None
    server.start()  # it dies with the thread that starts it, so this one it is

    again = await surely(direct, stored(b"3", 0, name=f"{name}-removed"))
    assert removed.version < last.version < again.version  # type: ignore[operator]  # none was refused
    record = await found(direct, name)
    assert record is not None
    assert (record.value, record.version) == (b"1", kept.version)
    while (later := await direct.publish(name, [b"3"])) is None:
        pass
    assert later > number
    page = (await direct.follow({name: number}, wait=600))[name]
    assert [entry.value for entry in page.entries] == [b"3"]

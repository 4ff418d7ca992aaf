"""L7: what others have written to our keys stops no queue, and no script fails half-way because of it."""

from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta

import msgspec
import pytest

from propolis.core import wire
from propolis.core.batch import Batch
from propolis.core.job import Dead, Done, Lease, Retried, State, Unknown
from propolis.core.protocols import Engine, Filter, Rule, RuleKind, Scope
from propolis.core.records import Change, Swap
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.engine import RedisEngine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

KEYS_OF_A_QUEUE = (
    "line:0",
    "void:0",
    "tidied:0",
    "front",
    "ranks",
    "scheduled",
    "running",
    "tally",
    "holds",
    "dead",
)
KEYS_OF_AN_APP = (
    "state",
    "leases",
    "bundles",
    "bundled",
    "expiring",
    "keep",
    "queues",
    "timed",
    "unique",
    "known",
)
MORE_KEYS = (
    "rules",
    "rates",
    "prefixes",
    "buckets",
    "refills",
    "limits",
    "removals",
    "parked",
    "deaths",
    "tokens",
    "seq",
    "sweepers",
    "batch_ends",
)


async def take(engine: Engine, limit: int = 100, span: timedelta = SPAN) -> list[Lease]:
    return await engine.lease({"default": limit}, span=span, holder=HOLDER)


async def work(engine: Engine) -> set[str]:
    """Put, lease and settle some of all kinds of jobs; the ids that were run to their end."""
    await engine.put([a_job(id="plain"), a_job(id="high", priority=1)])
    await engine.put([a_job(id="unique", unique="u", chosen=True), a_job(id="later", delay_ms=1)])
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, "paused"))
    ran: set[str] = set()
    for _ in range(10):
        await engine.sweep(by="me")
        leases = await take(engine)
        outcomes: list[tuple[Lease, Done | Retried]] = [
            (lease, Done() if lease.attempt > 1 or lease.id != "high" else Retried()) for lease in leases
        ]
        lost = await engine.settle(outcomes)
        ran |= {lease.id for lease, end in outcomes if end == Done() and lease not in lost}
        if ran == {"plain", "high", "unique", "later"}:
            break
    return ran


@pytest.mark.parametrize(
    "name", [*(f"{{default}}:{each}" for each in KEYS_OF_A_QUEUE), *KEYS_OF_AN_APP, *MORE_KEYS]
)
async def test_a_key_of_another_type_is_set_aside_and_told(
    engine: RedisEngine, link: RedisLink, prefix: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """L7, F27, F56: and its queue goes on."""
    key = f"{prefix}:{name}"
    await link.command("DEL", key)
    if name == "seq":
        await link.command("RPUSH", key, "not ours")
    else:
        await link.command("SET", key, "not ours")

    assert await work(engine) == {"plain", "high", "unique", "later"}

    with caplog.at_level(logging.ERROR):
        await engine.sweep()
    broken = await link.command("HGETALL", f"{prefix}:broken")
    for aside in broken[::2]:
        assert aside.startswith(f"{key}:broken:".encode())
    assert len(broken) <= 2
    aside = await link.command("KEYS", f"{key}:broken:*".replace("{", "\\{"))
    assert len(aside) == len(broken) // 2


@pytest.mark.parametrize(
    "name",
    [
        "{default}:line:0",
        "{default}:void:0",
        "{default}:ranks",
        "{default}:tally",
        "jobs",
        "queues",
        "known",
        "tokens",
        "seq",
        "caps",
    ],
)
async def test_one_job_stands_once_whichever_key_is_of_another_type(
    engine: RedisEngine, link: RedisLink, prefix: str, name: str
) -> None:
    """L7: what a put of one job has begun is taken back before it is done with care."""
    await link.command("RPUSH" if name == "seq" else "SET", f"{prefix}:{name}", "not ours")

    [receipt] = await engine.put([a_job(id="one")], token="token")

    assert receipt.created
    counts = (await engine.queues())["default"]
    assert (counts.ready, counts.put) == (1, 1)
    [again] = await engine.put([a_job(id="one")], token="token")
    assert not again.created
    assert [lease.id for lease in await take(engine)] == ["one"]
    assert await link.command("HLEN", f"{prefix}:broken") == 1


async def test_one_job_stands_once_where_its_queue_counted_no_number(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    await link.command("HSET", f"{prefix}:{{default}}:tally", "put", "many")

    [receipt] = await engine.put([a_job(id="one")], token="token")

    assert receipt.created
    assert (await engine.queues())["default"].put == 1
    assert [lease.id for lease in await take(engine)] == ["one"]


def damaged(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


async def drained(engine: Engine) -> set[str]:
    """Whatever can be leased is, and ends; the ids of those that ran to their end."""
    ran: set[str] = set()
    for _ in range(40):
        await engine.sweep()
        leases = await take(engine)
        if not leases:
            return ran
        broken = [lease for lease in leases if lease.task == "(broken)"]
        sound = [lease for lease in leases if lease not in broken]
        lost = await engine.settle([(lease, Unknown()) for lease in broken])
        lost += await engine.settle([(lease, Done()) for lease in sound])
        ran |= {lease.id for lease in sound if lease not in lost}
    raise AssertionError("something comes back for ever")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("what", ["jobs", "state"])
async def test_a_damaged_job_goes_to_the_shelf_or_runs_and_the_others_run(
    engine: RedisEngine, link: RedisLink, prefix: str, what: str, seed: int
) -> None:
    """L7, F56: one bit is flipped in what is known of one job."""
    chance = random.Random(seed)
    jobs = [a_job(id="one"), a_job(id="two", unique="u"), a_job(id="three", key="k"), a_job(id="four")]
    jobs.append(a_job(id="due", due_at=await engine.now()))
    members = [a_job(id=f"member-{n}", batch="b", member=n) for n in range(3)]
    await engine.put(jobs)
    await engine.put_batch(Batch(id="b"), members)
    await engine.settle([(lease, Retried()) for lease in await take(engine, 4)])
    ids = await link.command("HKEYS", f"{prefix}:{what}")
    victim = chance.choice(sorted(ids))
    before = await link.command("HGET", f"{prefix}:{what}", victim)
    await link.command("HSET", f"{prefix}:{what}", victim, damaged(before, chance))

    assert await drained(engine) >= {job.id for job in (*jobs, *members)} - {victim.decode()}

    assert {info.id for info in (await engine.find(Filter())).jobs} <= {victim.decode()}
    await engine.put([a_job(id="afterwards")])
    assert [lease.id for lease in await take(engine)] == ["afterwards"]


@pytest.mark.parametrize("junk", [b"", b"junk", b"Xtask\nx\ny\n{}\n", b"M\n1\n1\n{}\n"])
async def test_a_job_that_cannot_be_read_is_kept_with_its_bytes_and_the_reason(
    engine: RedisEngine, link: RedisLink, prefix: str, junk: bytes
) -> None:
    """L7, F56."""
    await engine.put([a_job(id="bad"), a_job(id="good")])
    await link.command("HSET", f"{prefix}:jobs", "bad", junk)
    await drained(engine)
    info = await engine.get("bad")
    assert info is not None
    assert (info.state, info.reason, info.body, info.queue) == (State.DEAD, "broken", junk, "default")
    assert info.error is not None
    assert "cannot be read" in info.error.message
    counts = (await engine.queues())["default"]
    assert (counts.dead, counts.total) == (1, 1)
    assert await engine.delete(["bad"]) == [True]


async def test_a_damaged_run_is_reaped(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """L7, F56: also where its bundle does not know its jobs any more."""
    await engine.put([a_job(id="one"), a_job(id="two")])
    await take(engine, span=timedelta(0))
    await link.command("HSET", f"{prefix}:{{default}}:running", "one", "junk")
    [bundle] = await link.command("HKEYS", f"{prefix}:bundled")
    await link.command("HSET", f"{prefix}:bundled", bundle, "junk")
    assert (await engine.sweep()).reaped == 2
    assert {lease.id for lease in await take(engine)} == {"one", "two"}


async def test_a_damaged_record_is_set_aside(engine: RedisEngine, link: RedisLink, prefix: str) -> None:
    """L7, F56: the others of its kind are read, and it can be written again."""
    await engine.swap(
        [Swap(changes=(Change(kind="k", name=name, value=b"v", expected=0),)) for name in ("a", "b")]
    )
    await link.command("HSET", f"{prefix}:records:k", "a", msgspec.msgpack.encode([1, 2]))
    assert [record.name for record in (await engine.records("k")).records] == ["b"]
    assert await link.command("HGET", f"{prefix}:broken", "k\na") == msgspec.msgpack.encode([1, 2])
    [swapped] = await engine.swap([Swap(changes=(Change(kind="k", name="a", value=b"v", expected=0),))])
    assert swapped.version is not None


async def test_a_batch_whose_callbacks_are_damaged_ends(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L7, F56."""
    back = a_job(id="back", chosen=True)
    await engine.put_batch(Batch(id="b", on_finished=back), [a_job(batch="b", member=0)])
    await link.command("HSET", f"{prefix}:batch:b", "calls", "\xc1", "waiting", "many")
    [lease] = await take(engine)
    assert await engine.settle([(lease, Dead())]) == []
    status = await engine.batch("b")
    assert status is not None
    assert status.finished_at is not None


async def test_a_damaged_job_keeps_no_room_under_a_limit(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L7: when it goes to the shelf, another one starts."""
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, "tests.echo", 1))
    await engine.put([a_job(id="one"), a_job(id="two")])
    [lease] = await take(engine)
    await link.command("HSET", f"{prefix}:state", "one", b"\xc1 no MessagePack")

    await engine.settle([(lease, Done())])

    assert [lease.id for lease in await take(engine)] == ["two"]


async def test_a_push_that_cannot_be_put_is_set_aside_and_the_others_come_in(
    engine: RedisEngine, link: RedisLink, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """L7: it leaves the door once it is written down."""
    await engine.put([a_job(id="first")])
    pushes = [wire.encode(a_job(id=name)) for name in ("bad", "good")]
    await link.command("LPUSH", f"{prefix}:{{default}}:incoming", *pushes)
    no_draft = msgspec.msgpack.encode({"job": {"id": "bad", "queue": "default"}})
    assert await engine._call("take_in", "default", pushes[0], no_draft) == 1
    with caplog.at_level(logging.ERROR):
        await engine.sweep()
    assert "was set aside" in caplog.text
    assert await drained(engine) == {"first", "good"}
    assert (await link.command("HKEYS", f"{prefix}:broken")) == [
        f"{prefix}:{{default}}:incoming\n".encode() + pushes[0]
    ]


@pytest.mark.parametrize("damage", ["text", [1, 2], {"a": 1}, True, 1.5, None])
@pytest.mark.parametrize("field", ["version", "at", "expires", "value"])
async def test_a_record_of_which_a_field_is_damaged_is_no_script_error(
    engine: RedisEngine, link: RedisLink, prefix: str, field: str, damage: object
) -> None:
    """L7: neither where it is read nor where it is changed."""
    hour = timedelta(hours=1)
    changes = [Change(kind="k", name=name, value=b"v", at=-hour, expires_in=hour) for name in ("a", "b")]
    await engine.swap([Swap(changes=tuple(changes))])
    record = msgspec.msgpack.decode(await link.command("HGET", f"{prefix}:records:k", "a"))
    await link.command("HSET", f"{prefix}:records:k", "a", msgspec.msgpack.encode({**record, field: damage}))
    await engine.sweep()
    assert "b" in {record.name for record in (await engine.records("k", due=True)).records}
    assert "b" in {record.name for record in (await engine.records("k")).records}
    [swapped] = await engine.swap([Swap(changes=(Change(kind="k", name="a", value=b"v"),))])
    assert swapped.version is not None


async def test_a_job_that_was_put_at_no_time_is_not_the_oldest(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L7: one such job hid the ages of all queues."""
    await engine.put([a_job(id="odd")])
    lines = (await link.command("HGET", f"{prefix}:jobs", "odd")).split(b"\n")
    lines[1] = b"9" * 19
    await link.command("HSET", f"{prefix}:jobs", "odd", b"\n".join(lines))

    assert await engine.oldest(["default"]) == {}


@pytest.mark.parametrize("value", ["junk", "9" * 40, "nan"])
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("latest", None),
        ("behind", None),
        ("{default}:tally", "put"),
        ("{default}:tally", "deleted"),
        ("batch:together", "born"),
        ("batch:together", "widest"),
    ],
)
async def test_a_number_that_cannot_be_stops_nothing(
    engine: RedisEngine, link: RedisLink, prefix: str, name: str, field: str | None, value: str
) -> None:
    """L7, F56: neither sweeps nor leases nor looks, and the queue counts again what is there."""
    await work(engine)
    await engine.put_batch(Batch(id="together"), [a_job(id="member", batch="together")])
    key = f"{prefix}:{name}"
    await (link.command("SET", key, value) if field is None else link.command("HSET", key, field, value))

    assert await drained(engine) == {"member"}
    assert [member.id for member in await engine.members("together", limit=9)] == ["member"]
    await engine.repair(mend=True)
    assert await engine.repair(mend=False) == []


async def test_names_that_are_no_text_stop_neither_sweeps_nor_looks(
    engine: RedisEngine, link: RedisLink, prefix: str
) -> None:
    """L7: each sweep raised, and so nothing was promoted or reaped any more."""
    await link.command("ZADD", f"{prefix}:parked", 0, b"\xff\xfe", 0, b"default\ntests.echo")
    swept = await engine.sweep()
    assert swept.parked == (("default", "tests.echo"),)


async def test_repair_ends_where_queues_have_no_order(
    engine: RedisEngine, link: RedisLink, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: where scores differ, the server's order by name means nothing."""
    monkeypatch.setattr("propolis.engines.redis.repair.BITE", 2)
    queues = [f"q{n}" for n in range(9)]
    await engine.put([a_job(id=queue, queue=queue) for queue in queues])
    await link.command("ZADD", f"{prefix}:queues", -1, "q5")
    async with asyncio.timeout(20):
        for mend in (False, True):
            await engine.repair(mend=mend)

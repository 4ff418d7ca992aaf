"""Tokens of puts that nobody will repeat are not kept for their day."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from propolis import App
from propolis.app.client.puts import SPENT_AT_ONCE
from propolis.core.envelope import Envelope
from propolis.core.job import Done
from propolis.core.protocols import Engine, Receipt, Remote
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.redis.client.target import target_of
from propolis.engines.redis.engine import RedisEngine
from propolis.engines.redis.shards.engine import ShardedEngine
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.errors import (
    EngineClosed,
    EngineUnavailable,
    MemoryFull,
    OutcomeUnknown,
    PropolisError,
    QueueFull,
)
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import settle_one, take_one


@pytest.fixture(params=["postgres", "redis", "shards"])
def made(request: pytest.FixtureRequest) -> Engine:
    if request.param == "postgres":
        url, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
        return PostgresEngine(url, schema=schema)
    target = target_of(Address(request.getfixturevalue("valkey_url")))
    prefix = request.getfixturevalue("prefix")
    if request.param == "redis":
        return RedisEngine(target, prefix=f"{prefix}:")
    return ShardedEngine(target, ShardMap(4), prefix=f"{{{prefix}}}:")


@pytest_asyncio.fixture
async def engine(made: Engine) -> AsyncIterator[Engine]:
    yield await made.open()
    await made.close()


async def _is_known(engine: Engine, job: Envelope, token: str) -> bool:
    [receipt] = await engine.put([job], token=token)
    return not receipt.created


async def test_a_token_that_is_spent_is_forgotten_and_no_other(engine: Engine) -> None:
    """I1: only who made the put can know that nobody repeats it."""
    assert isinstance(engine, Remote)
    jobs = {token: a_job() for token in ("one", "two", "three")}
    for token, job in jobs.items():
        await engine.put([job], token=token)
        await settle_one(engine, await take_one(engine), Done())
    await engine.forget_tokens(["one", "three", "never heard of"])
    await engine.forget_tokens([])
    assert [await _is_known(engine, job, token) for token, job in jobs.items()] == [False, True, False]


class AtTheOtherEnd(MemoryEngine):
    """As at the other end of a wire, on which the first answer to these puts is lost."""

    remote, in_order = True, False

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.lost = lost
        self.spent: list[str] = []
        self.forgotten: list[str] = []
        self.forgets = True

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        assert token is not None
        receipts = await super().put(jobs, token=token)
        self.spent.append(token)
        if len(self.spent) in self.lost:
            raise OutcomeUnknown("nobody knows")
        return receipts

    async def forget_tokens(self, tokens: Sequence[str]) -> None:
        if not self.forgets:
            raise EngineUnavailable("not now")
        self.forgotten += tokens


async def _put(engine: AtTheOtherEnd, times: int) -> None:
    app = App("memory://")
    app.client._engine = engine

    @app.task
    async def ping() -> None: ...

    for _ in range(times):
        await ping.aenqueue()
    for _ in range(3):
        await asyncio.sleep(0)  # what nobody waits for has its turn
    assert len(await app.jobs.afind(limit=times + 1)) == times


async def test_what_was_answered_at_once_is_spent() -> None:
    """So an engine knows no more tokens than so many of each process, and not those of a day."""
    engine = AtTheOtherEnd()
    await _put(engine, 3 * SPENT_AT_ONCE + 5)
    assert engine.forgotten == engine.spent[: 3 * SPENT_AT_ONCE]


async def test_a_put_that_was_repeated_may_come_late_and_its_token_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("propolis.app.client.puts.REPEAT_AFTER", (0.001,))
    engine = AtTheOtherEnd(7)
    await _put(engine, SPENT_AT_ONCE + 1)
    assert engine.spent[6] == engine.spent[7]
    assert engine.spent[7] not in engine.forgotten
    assert len(engine.forgotten) == SPENT_AT_ONCE


@pytest.mark.parametrize("error", [EngineClosed(), MemoryFull("default", "there"), QueueFull("default", 1)])
async def test_after_a_lost_answer_no_error_means_that_nothing_was_put(
    monkeypatch: pytest.MonkeyPatch, error: PropolisError
) -> None:
    """Or else it would be put again, with another token; and whoever believes it does so himself."""
    monkeypatch.setattr("propolis.app.client.puts.REPEAT_AFTER", (0.001,))
    engine = AtTheOtherEnd(1)
    put, calls = AtTheOtherEnd.put, 0

    async def refuse_the_second(
        self: AtTheOtherEnd, jobs: Sequence[Envelope], *, token: str | None = None
    ) -> list[Receipt]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error
        return await put(self, jobs, token=token)

    monkeypatch.setattr(AtTheOtherEnd, "put", refuse_the_second)
    app = App("memory://")
    app.client._engine = engine

    @app.task
    async def ping() -> None: ...

    answers = await asyncio.gather(ping.aenqueue(), ping.aenqueue(), return_exceptions=True)
    assert [type(answer) for answer in answers] == [OutcomeUnknown, OutcomeUnknown]
    assert [answer.__cause__ for answer in answers if isinstance(answer, OutcomeUnknown)] == [error] * 2
    assert len(await app.jobs.afind()) == 2


async def test_nobody_is_harmed_if_the_engine_is_away_when_it_should_forget() -> None:
    engine = AtTheOtherEnd()
    engine.forgets = False
    await _put(engine, SPENT_AT_ONCE + 1)

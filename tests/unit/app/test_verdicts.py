"""`Discard`: no further attempt, and the ending of the error strategy."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from propolis import App, Discard
from propolis.core.job import JobInfo
from propolis.strategies import Strategy, archive, dead, delete, repeat, repeat_forever
from propolis.values import State
from propolis.worker import Mode, Settings, Worker


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("memory://")
    yield app
    await app.aclose()


async def discarded(app: App, job_id: str) -> JobInfo | None:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    return await app.jobs.aget(job_id)


async def test_what_is_discarded_is_dead_by_default(app: App) -> None:
    @app.task
    async def charge() -> None:
        raise Discard("the card was stolen")

    record = await discarded(app, (await charge.aenqueue()).id)
    assert record is not None
    assert (record.state, record.attempts) == (State.DEAD, 1)
    assert record.error is not None
    assert (record.error.type, record.error.message) == ("Discard", "the card was stolen")


@pytest.mark.parametrize("strategy", [dead, repeat(5).then(dead), repeat_forever("1s")], ids=str)
async def test_what_is_discarded_is_not_run_again(app: App, strategy: Strategy) -> None:
    @app.task(on_error=strategy)
    async def charge() -> Discard:
        return Discard("never")

    record = await discarded(app, (await charge.aenqueue()).id)
    assert record is not None
    assert (record.state, record.attempts) == (State.DEAD, 1)


async def test_the_nearest_rule_for_errors_has_the_ending_of_what_is_discarded(app: App) -> None:
    @app.task(on_error={Discard: archive.keep("1h"), Exception: repeat(5).then(delete)})
    async def charge() -> None:
        raise Discard("never")

    record = await discarded(app, (await charge.aenqueue()).id)
    assert record is not None
    assert (record.state, record.attempts) == (State.DEAD, 1)


@pytest.mark.parametrize("strategy", [delete, repeat(5).then(delete)], ids=["delete", "repeat then delete"])
async def test_the_reason_of_what_is_deleted_is_in_the_log(
    app: App, strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=strategy, name="charge")
    async def charge() -> None:
        raise Discard("the card was stolen")

    with caplog.at_level(logging.ERROR, logger="propolis.worker"):
        assert await discarded(app, (await charge.aenqueue()).id) is None
    [message] = [record.getMessage() for record in caplog.records]
    assert "charge" in message
    assert message.endswith("Discard: the card was stolen")

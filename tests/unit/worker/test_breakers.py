"""Breakers as users declare them, in the real worker on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from propolis import App, Discard
from propolis.core.job import DONE
from propolis.errors import BadSetting
from propolis.strategies import breaker, dead, fixed, repeat
from propolis.values import BreakerChange, BreakerState, Scope
from propolis.worker import Settings, Worker
from propolis.worker.sweeping.breaker_watch import MAX_PLACES, BreakerWatch


class Bank:
    """A task whose other side may be away."""

    def __init__(self, **options: Any) -> None:
        self.app = app = App("memory://")
        self.away = True
        self.runs = 0
        self.changes: list[BreakerChange] = []

        @app.task(
            name="charge",
            on_error=repeat(1000, fixed("1s")).then(dead),
            breaker=breaker(**{"of": 4, "pause": "30s", **options}),
        )
        async def charge(card: int) -> None:
            self.runs += 1
            if self.away:
                raise ConnectionError("the bank does not answer")

        @app.on_breaker
        async def note(change: BreakerChange) -> None:
            self.changes.append(change)

        self.charge = charge

    @property
    def states(self) -> list[BreakerState]:
        return [change.state for change in self.changes]


async def test_a_task_that_fails_is_paused_tried_one_at_a_time_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bank = Bank()
    async with bank.app.test() as t:
        for card in range(5):
            await bank.charge.aenqueue(card)
        await t.advance("8s")
        assert bank.states == [BreakerState.OPEN]
        before = bank.runs
        [job] = [info for info in await bank.app.jobs.afind() if info.attempts][:1]
        await t.advance("20s")
        assert bank.runs == before  # nothing begins
        [reason, *_] = await bank.app.jobs.aexplain(job.id)
        assert reason.startswith("task 'charge' is paused by breaker since ")
        assert reason.endswith("runs failed within 60 s")
        await t.advance("15s")
        assert bank.states == [BreakerState.OPEN] * 2  # what tried again has failed
        assert bank.runs <= before + 5  # one at a time, and none of them twice
        bank.away = False
        await t.advance("1m")
        assert bank.states == [BreakerState.OPEN, BreakerState.OPEN, BreakerState.CLOSED]
        assert await bank.app.jobs.afind() == []
        assert await bank.app.queues.arules() == []
    messages = [record.getMessage() for record in caplog.records if "breaker" in record.getMessage()]
    assert [message.partition(": ")[0] for message in messages] == [
        "the breaker of charge is open for 0:00:30",
        "the breaker of charge is open for 0:00:30",
        "the breaker of charge is closed",
    ]


async def test_a_killed_worker_leaves_nothing_open_for_ever() -> None:
    bank = Bank()
    async with bank.app.test() as t:
        for card in range(5):
            await bank.charge.aenqueue(card)
        await t.advance("8s")
        assert bank.states == [BreakerState.OPEN]
        await t.kill_worker()
        bank.away = False
        await t.advance("2m")
        assert await bank.app.jobs.afind() == []
        assert await bank.app.queues.arules() == []


async def test_a_hook_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bank = Bank()

    @bank.app.on_breaker
    def fail(change: BreakerChange) -> None:
        raise ValueError(change.task)

    async with bank.app.test() as t:
        await bank.charge.many(range(5)).aenqueue()
        await t.advance("8s")
        assert [rule.scope for rule in await bank.app.queues.arules()] == [Scope.TASK, Scope.TASK]
    assert "fail for breaker raised" in caplog.text


async def test_a_discarded_job_says_nothing_of_others() -> None:
    app = App("memory://")

    @app.task(name="t", breaker=breaker(of=2))
    async def t_(n: int) -> None:
        raise Discard("bad card")

    async with app.test() as t:
        await t_.many(range(10)).aenqueue()
        await t.advance("20s")
        assert await app.queues.arules() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"failures": "0%"}, 'such as "50%" or 0.5'),
        ({"failures": "101%"}, "give a share"),
        ({"failures": 1.5}, "give a share"),
        ({"failures": "50"}, "give a share"),
        ({"failures": True}, "give a share"),
        ({"failures": "many%"}, "give a share"),
        ({"failures": None}, "give a share"),
        ({"of": 0}, "how many runs are enough"),
        ({"of": True}, "how many runs are enough"),
        ({"within": "2h"}, "a second to an hour"),
        ({"pause": 0}, "a second to an hour"),
        ({"pause": "soon"}, "is not a duration"),
        ({"per": "queue"}, 'write "task" or "key"'),
    ],
)
def test_a_breaker_that_makes_no_sense_cannot_be_made(options: Any, words: str) -> None:
    with pytest.raises(BadSetting) as refused:
        breaker(**options)
    assert words in str(refused.value)


def test_a_share_is_written_in_per_cent_or_as_a_number() -> None:
    assert breaker(failures="50%") == breaker(failures=0.5) == breaker()
    assert breaker(failures="100%").share == breaker(failures=1).share == 1.0


def test_a_task_takes_no_other_value_as_its_breaker() -> None:
    wrong: Any = "50%"
    with pytest.raises(BadSetting, match=r"write breaker\(…\)"):
        App("memory://").task(breaker=wrong)


async def test_the_memory_of_a_worker_is_bounded() -> None:
    bank = Bank(per="key")
    engine = await bank.app.ready()
    watch = BreakerWatch(engine, [], clock=lambda: 0.0)
    for n in range(MAX_PLACES + 10):
        job: Any = type("AJob", (), {"envelope": bank.charge.using(key=f"k{n}").job(1)})
        watch.count(bank.charge, job, None)
        watch.count(bank.charge, job, DONE)
    assert len(watch._tallies) == MAX_PLACES
    await bank.app.aclose()


async def test_an_app_without_breakers_has_nobody_who_counts() -> None:
    app = App("memory://")

    @app.task
    async def plain() -> None: ...

    worker = Worker(app, Settings(), driven=True)
    assert worker._breaker_watch(await app.ready()) is None
    await app.aclose()

"""Breakers, by what several workers count and write, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.schedules.acting import Make

from propolis import App
from propolis.app.context import Job
from propolis.app.operate.breakers import KIND, BreakerChange, BreakerPlace, read_counted
from propolis.contract import Records
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Error, Outcome, Retried, Snoozed
from propolis.core.protocols import Engine, Rule, RuleKind, Scope, task_key
from propolis.core.records import Change, Swap, Swapped
from propolis.engines import piece_of
from propolis.strategies import breaker
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import put_one, settle_one, take
from propolis.values import BreakerState
from propolis.worker.sweeping.breaker_watch import BreakerWatch

TASK = "tests.echo"
FAILED = Retried(delay=timedelta(0), error=Error("ConnectionError", "no"))


class Fleet:
    """Several workers on one engine; each has a watch of its own, and they share the clock."""

    def __init__(self, engine: Engine, clock: FakeClock, **options: Any) -> None:
        self.engine = engine
        self.clock = clock
        self.app = App("memory://")
        self.changes: list[BreakerChange] = []
        self.declared = breaker(**{"failures": "50%", "of": 4, "within": "1m", "pause": "30s", **options})

        @self.app.task(name=TASK, breaker=self.declared)
        async def echo() -> None: ...

        self.task = echo
        self.began = clock.now
        self.watches = [self.watch() for _ in range(3)]

    def seconds(self) -> float:
        return (self.clock.now - self.began).total_seconds() + 100.0

    def watch(self, engine: Any = None) -> BreakerWatch:
        return BreakerWatch(engine or self.engine, [self.changes.append], clock=self.seconds)

    def ends(self, worker: int, *outcomes: Outcome | None, key: str | None = None) -> None:
        for outcome in outcomes:
            job: Any = Job.__new__(Job)
            job.envelope = Envelope(id="x", task=TASK, key=key)
            self.watches[worker].count(self.task, job, outcome)

    async def beat(self, seconds: int = 1) -> None:
        """Every worker, once a second."""
        for _ in range(seconds):
            for watch in self.watches:
                await watch.beat()
            self.clock.advance("1s")

    async def rules(self) -> list[tuple[RuleKind, Scope, str, str]]:
        return [(rule.kind, rule.scope, rule.name, rule.by) for rule in await self.engine.rules()]

    async def record(self) -> Any:
        read = await piece_of(self.engine, Records).records(KIND)
        return read_counted(read.records[0]) if read.records else None

    @property
    def states(self) -> list[BreakerState]:
        return [change.state for change in self.changes]


@pytest.fixture
def fleet(engine: Engine, clock: FakeClock) -> Fleet:
    return Fleet(engine, clock)


PAUSED = (RuleKind.PAUSE, Scope.TASK, TASK, "breaker")
ONE_AT_A_TIME = (RuleKind.LIMIT, Scope.TASK, TASK, "breaker")


async def opened(fleet: Fleet) -> None:
    fleet.ends(0, FAILED, FAILED)
    fleet.ends(1, Done(), FAILED, FAILED)
    await fleet.beat(7)
    assert fleet.states == [BreakerState.OPEN]


async def test_it_opens_by_what_several_workers_have_counted(fleet: Fleet, engine: Engine) -> None:
    fleet.ends(0, FAILED, FAILED)  # alone, neither of them has seen enough
    fleet.ends(1, Done(), FAILED)
    assert await fleet.rules() == []
    await fleet.beat(7)
    assert await fleet.rules() == [ONE_AT_A_TIME, PAUSED]
    [change] = fleet.changes  # one of them says so
    assert (change.task, change.key, change.state, change.failed, change.runs) == (
        TASK,
        None,
        BreakerState.OPEN,
        3,
        4,
    )
    limit, pause = await engine.rules()
    assert (limit.n, pause.why) == (1, "3 of 4 runs failed within 60 s")
    assert pause.until is not None
    assert pause.at is not None
    assert pause.until - pause.at == timedelta(seconds=30)


async def test_what_goes_well_elsewhere_counts_before_it_is_judged(fleet: Fleet) -> None:
    """One worker without a network must not stop a fleet: 4 of 12 are no half."""
    fleet.ends(0, *[FAILED] * 4)
    fleet.ends(1, *[Done()] * 4)
    fleet.ends(2, *[Done()] * 4)
    await fleet.beat(60)
    assert fleet.changes == []
    assert await fleet.rules() == []


async def test_too_few_runs_are_not_judged_and_old_ones_are_forgotten(fleet: Fleet) -> None:
    fleet.ends(0, FAILED, FAILED, FAILED)
    await fleet.beat(65)
    fleet.ends(0, FAILED)
    await fleet.beat(20)
    assert fleet.changes == []


async def test_all_is_well_without_a_write(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Sequence[Swap]] = []
    records = piece_of(fleet.engine, Records)
    swap = records.swap

    async def counted(swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        written.append(swaps)
        return await swap(swaps, token=token)

    monkeypatch.setattr(fleet.engine, "swap", counted)
    for _ in range(30):
        fleet.ends(0, *[Done()] * 100)
        await fleet.beat()
    assert written == []
    fleet.ends(1, FAILED)
    for _ in range(75):
        fleet.ends(0, Done())
        await fleet.beat()
    assert 2 <= len(written) <= 20  # as long as the failure counts, and then it is forgotten
    assert await fleet.record() is None
    before = len(written)
    fleet.ends(0, Done())
    await fleet.beat(10)
    assert len(written) == before


@pytest.mark.parametrize(
    "outcome", [None, Snoozed(timedelta(0)), Dead(reason="failed", error=Error("Discard", "bad card"))]
)
async def test_what_says_nothing_of_others_is_not_counted(fleet: Fleet, outcome: Outcome | None) -> None:
    fleet.ends(0, *[outcome] * 10)
    await fleet.beat(10)
    assert (fleet.changes, await fleet.record()) == ([], None)


async def test_while_it_is_open_nothing_begins_and_then_one_at_a_time(
    fleet: Fleet, engine: Engine, clock: FakeClock
) -> None:
    await opened(fleet)
    for _ in range(3):
        await put_one(engine, task=TASK)
    assert await take(engine) == []
    clock.advance("31s")  # no worker does anything for it
    await engine.sweep()
    [one] = await take(engine)
    assert await take(engine) == []
    await settle_one(engine, one, Done())
    fleet.ends(2, Done())  # by a worker that did not know of it
    await fleet.beat(6)
    assert fleet.states == [BreakerState.OPEN, BreakerState.CLOSED]
    assert (await fleet.rules(), await fleet.record()) == ([], None)
    assert len(await take(engine)) == 2


async def test_what_fails_when_it_tries_again_opens_it_again(fleet: Fleet, clock: FakeClock) -> None:
    await opened(fleet)
    clock.advance("31s")
    fleet.ends(1, FAILED)
    await fleet.beat(2)
    assert fleet.states == [BreakerState.OPEN] * 2
    [limit, pause] = await fleet.engine.rules()
    assert pause.why == limit.why == "what tried again has failed"


async def test_what_ends_while_it_is_open_says_nothing_new(fleet: Fleet) -> None:
    await opened(fleet)
    fleet.ends(0, *[FAILED] * 10)
    fleet.ends(1, *[Done()] * 10)
    await fleet.beat(5)
    assert fleet.states == [BreakerState.OPEN]
    counted = await fleet.record()
    assert counted.parts == {}


async def test_it_closes_by_itself_where_nobody_is_left(fleet: Fleet, clock: FakeClock) -> None:
    """kill -9 of all workers, at any time: a pause, a limit and a record with an end."""
    await opened(fleet)
    clock.advance("61s")
    await fleet.engine.sweep()
    assert (await fleet.rules(), await fleet.record()) == ([], None)
    fleet.watches = [fleet.watch()]
    fleet.ends(0, FAILED)  # it counts from the beginning
    await fleet.beat(7)
    assert fleet.states == [BreakerState.OPEN]


async def test_who_dies_between_the_rules_and_the_record_leaves_a_pause_with_an_end(
    fleet: Fleet, clock: FakeClock
) -> None:
    class Dies:
        def __init__(self, engine: Any) -> None:
            self.engine, self.swaps = engine, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> Any:
            if await self.engine.rules():
                raise ConnectionError
            return await self.engine.swap(swaps, token=token)

        async def records(self, kind: str, **asked: Any) -> Any:
            return await self.engine.records(kind, **asked)

    fleet.watches[0] = fleet.watch(Dies(fleet.engine))
    fleet.ends(0, *[FAILED] * 4)
    for _ in range(8):
        await fleet.watches[0].beat()
        clock.advance("1s")
    assert await fleet.rules() == [ONE_AT_A_TIME, PAUSED]
    assert fleet.changes == []
    fleet.ends(1, FAILED)  # another one finds what it has counted, and goes on
    await fleet.beat(2)
    assert fleet.states == [BreakerState.OPEN]


async def test_what_an_operator_has_set_stays(fleet: Fleet, clock: FakeClock) -> None:
    engine = fleet.engine
    await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK, TASK, by="anna"))
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, TASK, 7, by="ben"))
    await opened(fleet)
    clock.advance("31s")
    fleet.ends(0, Done())
    await fleet.beat(6)
    assert fleet.states == [BreakerState.OPEN, BreakerState.CLOSED]
    assert [(rule.by, rule.n, rule.until) for rule in await engine.rules()] == [
        ("ben", 7, None),
        ("anna", 0, None),
    ]


async def test_a_breaker_per_key_pauses_the_task_of_one_key(engine: Engine, clock: FakeClock) -> None:
    fleet = Fleet(engine, clock, per="key")
    fleet.ends(0, FAILED, FAILED, FAILED, FAILED, key="tenant:7")
    fleet.ends(1, *[Done()] * 5, key="tenant:8")
    fleet.ends(1, *[FAILED] * 5)  # without a key nobody is to be paused
    fleet.ends(1, *[FAILED] * 5, key="tenant:*")  # and this one is reserved
    await fleet.beat(7)
    place = (RuleKind.PAUSE, Scope.TASK_KEY, task_key(TASK, "tenant:7"), "breaker")
    assert await fleet.rules() == [place]
    [change] = fleet.changes
    assert (change.key, change.failed) == ("tenant:7", 4)


async def test_a_record_that_cannot_be_read_is_written_anew(fleet: Fleet) -> None:
    """L7."""
    records = piece_of(fleet.engine, Records)
    await records.swap([Swap(changes=(Change(kind=KIND, name=TASK, value=b"{", expected=0),))])
    await opened(fleet)


async def test_a_record_that_cannot_be_written_keeps_no_other_breaker_closed(
    engine: Engine, clock: FakeClock
) -> None:
    """L7."""

    class Damaged:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> Any:
            if swaps[0].changes[0].name == bad:
                raise ConnectionError
            return await piece_of(engine, Records).swap(swaps, token=token)

        async def records(self, kind: str, **asked: Any) -> Any:
            return await piece_of(engine, Records).records(kind, **asked)

    fleet, bad = Fleet(engine, clock, per="key"), BreakerPlace(TASK, "tenant:1").record
    fleet.watches = [fleet.watch(Damaged())]
    for key in ("tenant:1", "tenant:2"):
        fleet.ends(0, *[FAILED] * 4, key=key)
    await fleet.beat(20)
    assert [change.key for change in fleet.changes] == ["tenant:2"]


async def test_an_engine_that_does_not_answer_loses_no_runs(fleet: Fleet, make: Make) -> None:
    class Away:
        async def records(self, *_: Any, **__: Any) -> Any:
            raise ConnectionError

    fleet.watches[0] = watch = fleet.watch(Away())
    fleet.ends(0, *[FAILED] * 4)
    await fleet.beat(3)
    watch._engine = fleet.engine
    await fleet.beat(8)
    assert fleet.states == [BreakerState.OPEN]

"""From strategy to outcome to the final place of the job, on both engines that need no server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
from msgspec import Struct

from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.job import Crashed, JobInfo, Lease, Outcome, State
from propolis.core.policy import FAILED, TIMED_OUT, Policy, after_failure, after_success
from propolis.core.protocols import Engine, Note
from propolis.core.strategy import Strategy, archive, dead, delete, fixed, repeat, repeat_forever
from propolis.core.transitions import MAX_LOSSES, Retention
from propolis.engines.memory import MemoryEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.samples import HOLDER, SPAN, a_job

KEEP = timedelta(days=7)  # what `archive` says by default
FOR_EVER = 7  # runs after which a test believes it
RETENTION = Retention()

Make = Callable[[Path, FakeClock], Engine]
ENGINES: dict[str, Make] = {
    "memory": lambda path, clock: MemoryEngine(clock=clock, retention=RETENTION),
    "sqlite": lambda path, clock: SQLiteEngine(path / "jobs.db", clock=clock, retention=RETENTION),
}


class Place(Struct, frozen=True):
    """Where a job is found when nothing more happens to it by itself."""

    state: State | None
    kept: timedelta | None = None
    runs: int = 1


GONE = Place(None)
ON_THE_DEAD_SHELF = Place(State.DEAD, RETENTION.dead_for)
ARCHIVED_AS_DEAD = Place(State.DEAD, KEEP)

SUCCESS: dict[str, tuple[Strategy, Place]] = {
    "delete": (delete, GONE),
    "archive": (archive, Place(State.DONE, KEEP)),
}
ERROR: dict[str, tuple[Strategy, Place]] = {
    "delete": (delete, GONE),
    "archive": (archive, ARCHIVED_AS_DEAD),
    "dead": (dead, ON_THE_DEAD_SHELF),
    "repeat 2 else archive": (repeat(2).then(archive), Place(State.DEAD, KEEP, runs=3)),
    "repeat 1 else delete": (repeat(1).then(delete), Place(None, runs=2)),
    "repeat 3 else dead": (repeat(3, "1s"), Place(State.DEAD, RETENTION.dead_for, runs=4)),
}
TIMEOUT: dict[str, tuple[Strategy, Place]] = {
    "delete": (delete, GONE),
    "archive": (archive, ARCHIVED_AS_DEAD),
    "repeat": (repeat_forever("1s"), Place(State.READY, runs=FOR_EVER)),
    "repeat 1 else archive": (repeat(1).then(archive), Place(State.DEAD, KEEP, runs=2)),
    "repeat 2 else delete": (repeat(2, fixed("1m")).then(delete), Place(None, runs=3)),
}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=list(ENGINES))
async def engine(request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path) -> AsyncIterator[Engine]:
    engine = await ENGINES[request.param](tmp_path, clock).open()
    yield engine
    await engine.close()


class Runner:
    """A worker without concurrency: it runs the one job there is, each time with the fate it is told."""

    def __init__(self, engine: Engine, clock: FakeClock, policy: Policy) -> None:
        self.engine = engine
        self.clock = clock
        self.policy = policy
        self.leases: list[Lease] = []

    async def put(self) -> Envelope:
        job = a_job()
        await self.engine.put([job])
        return job

    async def run(self, fate: str) -> bool:
        """Run the job if it is still there; False if it is not."""
        self.clock.advance("1h")
        leases = await self.engine.lease({"default": 1}, span=SPAN, holder=HOLDER)
        for lease in leases:
            self.leases.append(lease)
            await self._end(lease, fate)
        return bool(leases)

    async def run_out(self, fate: str) -> None:
        while len(self.leases) < FOR_EVER and await self.run(fate):
            pass

    async def _end(self, lease: Lease, fate: str) -> None:
        if fate == "loss":
            assert await self.engine.note([Note(lease, began=True)]) == []
            self.clock.advance(SPAN)
            assert (await self.engine.sweep()).reaped == 1
        else:
            assert await self.engine.settle([(lease, self._outcome(lease, fate))]) == []

    def _outcome(self, lease: Lease, fate: str) -> Outcome:
        match fate:
            case "crash":
                return Crashed()
            case "success":
                return after_success(self.policy.on_success)
            case "error":
                return after_failure(self.policy.on_error, lease, random=_never, reason=FAILED)
            case "timeout":
                return after_failure(self.policy.on_timeout, lease, random=_never, reason=TIMED_OUT)
        raise AssertionError(fate)

    async def place(self, job: Envelope) -> Place:
        info = await self.engine.get(job.id)
        state = info.state if info else None
        return Place(state, _kept(info), len(self.leases))


def _never() -> float:
    raise AssertionError("no strategy of these tests draws at random")


def _kept(info: JobInfo | None) -> timedelta | None:
    if info is None or info.keep_until is None or info.ended_at is None:
        return None
    return info.keep_until - info.ended_at


@pytest.mark.parametrize(
    ("success", "error", "timeout"),
    list(product(SUCCESS, ERROR, TIMEOUT)),
    ids=lambda name: name.replace(" ", "-"),
)
async def test_each_strategy_decides_the_place_of_its_own_jobs(
    engine: Engine, clock: FakeClock, success: str, error: str, timeout: str
) -> None:
    """S0.25, S0.26, S0.27, T4, T5, T6."""
    policy = Policy(SUCCESS[success][0], ERROR[error][0], TIMEOUT[timeout][0])
    expected = {"success": SUCCESS[success][1], "error": ERROR[error][1], "timeout": TIMEOUT[timeout][1]}

    places = {}
    for fate in expected:
        runner = Runner(engine, clock, policy)
        job = await runner.put()
        await runner.run_out(fate)
        places[fate] = await runner.place(job)

    assert places == expected


@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.parametrize("fate", ["error", "timeout"])
async def test_repeat_runs_once_more_than_it_says(
    engine: Engine, clock: FakeClock, times: int, fate: str
) -> None:
    """S0.28, I6."""
    runner = Runner(engine, clock, Policy(on_error=repeat(times), on_timeout=repeat(times)))
    job = await runner.put()

    await runner.run_out(fate)

    info = await engine.get(job.id)
    assert info is not None
    assert (info.state, info.reason) == (State.DEAD, FAILED if fate == "error" else TIMED_OUT)
    assert len(runner.leases) == info.attempts == info.failures == times + 1


@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.parametrize("fate", ["crash", "loss"])
async def test_crashes_and_losses_are_not_counted_as_repetitions(
    engine: Engine, clock: FakeClock, fate: str, times: int
) -> None:
    """S0.28, S0.29, T8, T8b, I6: and a retry forgets the losses."""
    runner = Runner(engine, clock, Policy(on_error=repeat(times)))
    job = await runner.put()
    await runner.run(fate)
    await runner.run(fate)

    await runner.run_out("error")

    info = await engine.get(job.id)
    assert info is not None
    assert (info.state, info.reason) == (State.DEAD, FAILED)
    assert (info.attempts, info.failures) == (times + 3, times + 1)
    losses = 2 if fate == "loss" and not times else 0
    assert (info.losses, info.crashes) == (losses, 2 if fate == "crash" else 0)


@pytest.mark.parametrize(
    ("fates", "state", "reason", "counters"),
    [
        (["error", "crash", "error", "crash", "error"], State.DEAD, "failed", (5, 3, 2)),
        (["crash", "error", "success"], State.DONE, None, (3, 1, 1)),
        (["error", "timeout"], State.DEAD, "timeout", (2, 2, 0)),
        (["timeout", "error", "error"], State.DEAD, "failed", (3, 3, 0)),
        (["timeout", "crash", "timeout"], State.DEAD, "timeout", (3, 2, 1)),
        (["error", "error", "success"], State.DONE, None, (3, 2, 0)),
        (["crash", "crash", "crash"], State.DEAD, "crashed", (3, 0, 3)),
        (["error", "crash", "crash", "crash"], State.DEAD, "crashed", (4, 1, 3)),
        (["loss", "error", "loss", "crash", "success"], State.DONE, None, (5, 1, 1)),
        (["loss"] * MAX_LOSSES, State.DEAD, "lost", (MAX_LOSSES, 0, 0)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
async def test_four_counters_are_never_mixed_up(
    engine: Engine,
    clock: FakeClock,
    fates: list[str],
    state: State,
    reason: str | None,
    counters: tuple[int, int, int],
) -> None:
    """S0.28, S0.29, T8, T8b, I6: errors may be repeated twice, timeouts once; the rest is the engine's."""
    policy = Policy(on_success=archive, on_error=repeat(2), on_timeout=repeat(1))
    runner = Runner(engine, clock, policy)
    job = await runner.put()

    for fate in fates:
        assert await runner.run(fate)

    info = await engine.get(job.id)
    assert info is not None
    assert (info.state, info.reason) == (state, reason)
    assert (info.attempts, info.failures, info.crashes) == counters
    assert not await runner.run("success")


async def test_a_repetition_waits_for_its_backoff_and_keeps_its_id(engine: Engine, clock: FakeClock) -> None:
    """S0.30, T5, I2."""
    runner = Runner(engine, clock, Policy(on_error=repeat(3, lambda repetition: f"{repetition}m")))
    job = await runner.put()
    for repetition in (1, 2, 3):
        await runner.run("error")
        info = await engine.get(job.id)
        assert info is not None
        assert info.due_at == clock.now + timedelta(minutes=repetition)

    assert {lease.id for lease in runner.leases} == {job.id}


async def test_repetitions_may_run_on_another_queue(engine: Engine, clock: FakeClock) -> None:
    """S0.26, T5."""
    runner = Runner(engine, clock, Policy(on_error=repeat(1).on("slow")))
    await runner.put()
    await runner.run("error")

    [lease] = await engine.lease({"default": 1, "slow": 1}, span=SPAN, holder=HOLDER)

    assert (lease.queue, lease.attempt) == ("slow", 2)


async def test_what_a_job_says_goes_before_what_its_task_says(engine: Engine, clock: FakeClock) -> None:
    """S0.25, S0.26, S0.27, I14."""
    job = a_job(on_success=archive, on_error=delete)
    await engine.put([job])
    [lease] = await engine.lease({"default": 1}, span=SPAN, holder=HOLDER)

    policy = Policy().overridden(wire.decode(lease.body))
    await engine.settle([(lease, after_failure(policy.on_error, lease, random=_never))])

    assert (policy.on_success, policy.on_timeout) == (archive, Policy().on_timeout)
    assert await engine.get(job.id) is None

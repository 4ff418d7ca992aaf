"""A clock that goes back, beside a model of the time that really passes (L2); and engines that are wrong.

`check_clock` is the entry, as `check_engine` is for jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec import Struct

from propolis.core.job import JobInfo, Lease, Retried, State
from propolis.core.protocols import Engine, Filter, Swept
from propolis.testing.clock import FakeClock
from propolis.testing.engines.lives import live
from propolis.testing.engines.machine import Difference, MadeCall
from propolis.testing.engines.mutants.wrapped import Wrapped
from propolis.testing.engines.samples import HOLDER, a_job

T = TypeVar("T")

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
SPANS = (15 * SECOND, 15 * SECOND, 10 * MINUTE)
DELAYS = (MINUTE, 4 * HOUR)
ADVANCES = (SECOND, 15 * SECOND, 5 * MINUTE, HOUR)
STEPS = (SECOND / 2, 50 * SECOND, 97.5 * MINUTE, 50 * 24 * HOUR)
EARLY, LATE = SECOND, MINUTE  # by how much a delay may be shorter or longer after each step
AT_ONCE = SECOND / 10
SWEEPER = "sweeper-1"
ALL = 1000


def check_clock(
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 200,
    steps: int = 40,
    seed: int | None = None,
    shrink: bool = True,
) -> None:
    """Hold an engine to what is promised where the clock goes back: see `check_engine`."""

    live(lambda: ClockMachine(make), examples, steps, seed, shrink=shrink)


class ModelWait(Struct):
    """A job that waits: until really so much time has passed, or until a moment that was given."""

    until: timedelta | None = None
    due_at: datetime | None = None
    steps: int = 0  # how often the clock went back since
    in_line: bool = False


class ModelRun(Struct):
    """A job that runs, and when its lease really ends."""

    lease: Lease
    span: timedelta
    until: timedelta


class ClockMachine(RuleBasedStateMachine):
    """The calls, and what must be true after each sweep.  `passed` is how much time really has."""

    def __init__(self, make: Callable[[FakeClock], Engine]) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.latest = self.clock.now
        self.passed = timedelta(0)
        self.calls: list[MadeCall] = []
        self.waiting: dict[str, ModelWait] = {}
        self.running: dict[str, ModelRun] = {}
        self.made = 0
        self.engine = make(self.clock)
        self.runner = asyncio.Runner()
        self._run(self.engine.open())

    def teardown(self) -> None:
        with self.runner:
            self._run(self.engine.close())

    # --- jobs --------------------------------------------------------------------------------

    @rule()
    def put(self) -> None:
        self._put()

    @rule(delay=st.sampled_from(DELAYS))
    def put_delayed(self, delay: timedelta) -> None:
        job_id = self._put(delay_ms=delay // timedelta(milliseconds=1))
        self.waiting[job_id] = ModelWait(until=self.passed + delay)

    @rule(delay=st.sampled_from(DELAYS))
    def put_for_a_moment(self, delay: timedelta) -> None:
        due_at = self.clock.now + delay
        self.waiting[self._put(due_at=due_at)] = ModelWait(due_at=due_at)

    def _put(self, **fields: Any) -> str:
        self.made += 1
        job = a_job(id=f"job-{self.made}", **fields)
        self._ask("put", [job])
        return job.id

    @rule(span=st.sampled_from(SPANS), limit=st.sampled_from([1, 1, 3]))
    def lease(self, span: timedelta, limit: int) -> None:
        for lease in self._ask("lease", {"default": limit}, span=span, holder=HOLDER):
            self._begin(lease, span)

    def _begin(self, lease: Lease, span: timedelta) -> None:
        waits = self.waiting.pop(lease.id, ModelWait())
        self._compare(f"that {lease.id} does not wait any more", [], self._early(waits))
        self.running[lease.id] = ModelRun(lease, span, self.passed + span)

    def _early(self, waits: ModelWait) -> list[object]:
        """What it still has to wait for."""
        if waits.until is not None and waits.until > self.passed + EARLY * waits.steps:
            return [waits.until - self.passed]
        return [] if waits.due_at is None or waits.due_at <= self.latest else [waits.due_at]

    @rule(pick=st.integers(0, 5), span=st.sampled_from(SPANS))
    def renew(self, pick: int, span: timedelta) -> None:
        if self.running:
            runs = self._picked(pick)
            [renewal] = self._ask("renew", [runs.lease], span=span)
            self._compare("the end of a lease that was renewed", self.clock.now + span, renewal.until)
            runs.span, runs.until = span, self.passed + span

    @rule(pick=st.integers(0, 5), delay=st.sampled_from(DELAYS))
    def retry(self, pick: int, delay: timedelta) -> None:
        if self.running:
            lease = self._picked(pick).lease
            self._compare("the leases that are lost", [], self._ask("settle", [(lease, Retried(delay))]))
            del self.running[lease.id]
            self.waiting[lease.id] = ModelWait(until=self.passed + delay)

    def _picked(self, pick: int) -> ModelRun:
        return [*self.running.values()][pick % len(self.running)]

    # --- time --------------------------------------------------------------------------------

    @rule(span=st.sampled_from(ADVANCES))
    def advance(self, span: timedelta) -> None:
        self.calls.append(MadeCall("clock.advance", (span,), {}))
        self.clock.advance(span)
        self.passed += span
        self.latest = max(self.latest, self.clock.now)
        self._sweep_on(ALL)

    @rule(step=st.sampled_from(STEPS), limit=st.sampled_from([1, 2, ALL]), between=st.booleans())
    def step_back(self, step: timedelta, limit: int, between: bool) -> None:
        self._sweep_on(ALL)  # as somebody did in the second before
        self.calls.append(MadeCall("clock.set_back", (step,), {}))
        self.clock.set_back(step)
        for waits in self.waiting.values():
            waits.steps += 1
        if between:
            self.put_delayed(DELAYS[1])
        self._sweep_on(limit)

    def _sweep_on(self, limit: int) -> None:
        """Until nobody has to come back at once."""
        for _ in range(ALL):
            again_in = self._ask("sweep", limit=limit, by=SWEEPER).again_in
            if again_in is None or again_in > AT_ONCE:
                break
        jobs = self._run(self.engine.find(Filter(), limit=ALL)).jobs
        for info in jobs:
            if info.id in self.running:
                self._check_lease(info, self.running[info.id])
            elif info.id in self.waiting:
                self._check_wait(info, self.waiting[info.id])

    # --- comparing ---------------------------------------------------------------------------

    def _check_lease(self, info: JobInfo, runs: ModelRun) -> None:
        over = runs.until <= self.passed
        if info.state is not State.RUNNING:
            self._compare(f"that the lease of {info.id} is over", True, over)
            del self.running[info.id]
            return
        assert info.lease_until is not None
        left = info.lease_until - self.clock.now
        is_whole = over or left >= runs.until - self.passed
        self._compare(f"that {info.id} is leased for a span at most", True, left <= runs.span + SECOND)
        self._compare(f"that the lease of {info.id} is not cut", True, is_whole)

    def _check_wait(self, info: JobInfo, waits: ModelWait) -> None:
        waits.in_line = waits.in_line or info.due_at <= self.clock.now
        if waits.in_line:  # and stays there
            return
        if waits.due_at is not None:
            self._compare(f"the moment that {info.id} was given", waits.due_at, info.due_at)
        elif waits.until is not None:
            right, left = waits.until - self.passed, info.due_at - self.clock.now
            least, most = right - EARLY * waits.steps, max(right, -LATE) + LATE * waits.steps
            self._compare(f"that {info.id} waits as long as it should", True, least <= left <= most)

    def _ask(self, verb: str, *args: object, **options: object) -> Any:
        self.calls.append(MadeCall(verb, args, options))
        return self._run(getattr(self.engine, verb)(*args, **options))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.get_loop().run_until_complete(call)

    def _compare(self, what: str, expected: object, found: object) -> None:
        if expected != found:
            calls = "\n    ".join(map(str, self.calls))
            raise Difference(f"{what} must be\n    {expected!r}\nand is\n    {found!r}\nafter\n    {calls}")


# --- mutants ----------------------------------------------------------------------------------------


class Timed(Wrapped):
    """Passes sweeps on, and knows the largest time at which there was one."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.latest = clock.now

    async def sweep(self, *, limit: int = ALL, by: str | None = None) -> Swept:
        behind = max(self.latest - self.clock.now, timedelta(0))
        self.latest = max(self.latest, self.clock.now)
        return await self.sweep_behind(behind, limit, by)

    async def sweep_behind(self, behind: timedelta, limit: int, by: str | None) -> Swept:  # noqa: ARG002
        return await self.engine.sweep(limit=limit, by=by)


class StepBackKeepsLeases(Timed):
    """Whoever sweeps waits for the clock to come as far as it was."""

    async def sweep_behind(self, behind: timedelta, limit: int, by: str | None) -> Swept:
        return Swept() if behind > SECOND else await self.engine.sweep(limit=limit, by=by)


class StepBackCutsLeases(Timed):
    """What runs is lost at once where the clock goes back."""

    async def sweep_behind(self, behind: timedelta, limit: int, by: str | None) -> Swept:
        if behind > SECOND:
            self.latest = self.clock.now
            running = await self.every(Filter(state=State.RUNNING))
            await self.engine.settle([(self.newest[info.id], Retried(timedelta(0))) for info in running])
        return await self.engine.sweep(limit=limit, by=by)


class FollowsTwice(Timed):
    """What waits is brought forward at each sweep, as long as the clock is behind."""

    given = False

    async def sweep_behind(self, behind: timedelta, limit: int, by: str | None) -> Swept:
        swept = await self.engine.sweep(limit=limit, by=by)
        if behind > SECOND:
            for info in await self.every(Filter(scheduled=True)):
                if (b'"due_at"' in info.body) is self.given:
                    await self.engine.reschedule(info.id, info.due_at - behind)
        return swept


class GivenTimeFollows(FollowsTwice):
    """So is what was given a moment."""

    given = True


CLOCK_MUTANTS: dict[str, type[Timed]] = {
    "a step back keeps leases": StepBackKeepsLeases,
    "a step back cuts leases": StepBackCutsLeases,
    "a delay that follows twice": FollowsTwice,
    "a given time that follows": GivenTimeFollows,
}

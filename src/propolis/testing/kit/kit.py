"""`app.test()`: the real worker on the memory engine, in virtual time.

Nothing is emulated.  Jobs are leased, run, renewed and settled by the worker that runs in production; the
test only decides when it works and what its clock shows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

import msgspec

from propolis.app.client.blocking import Background
from propolis.app.client.handle import Handle
from propolis.app.context import Job
from propolis.app.operate.schedule_records import KIND
from propolis.app.registry import Next, Registry
from propolis.app.task import Task
from propolis.app.verdicts import Verdict
from propolis.core import wire
from propolis.core.clock import span_us
from propolis.core.duration import Duration, duration
from propolis.core.envelope import Envelope
from propolis.core.job import Event, Identity, JobInfo, Lease, Outcome, State
from propolis.core.protocols import Engine
from propolis.testing.clock import START, FakeClock
from propolis.testing.kit.driven import DrivenWorker, RememberingEngine
from propolis.worker import Lane, Settings
from propolis.worker.attempt import Stop
from propolis.worker.keeper import BEATS

T = TypeVar("T")

AnyTask = Task[..., Any] | str
AnyJob = Handle[Any] | str
Lend = Callable[[Engine], AbstractContextManager[None]]
Wanted = Callable[[Lease], bool]

MAX_RUNS = 10_000  # in one instant, after which we believe that it would never end
GIVE_UP_AFTER = 10.0  # real seconds in which no run ends, until `drain` does not believe in them any more
MORE_TURNS = 10  # of the event loop, for what has just been set off to show
SHOWN = 20  # jobs in the message of a failed assertion


class Hold:
    """Catches one run: lets it go as far as it can by itself, and keeps it from being settled."""

    def __init__(self, wanted: Wanted, *, wake: Callable[[], None]) -> None:
        self._wanted = wanted
        self._wake = wake
        self._caught: Identity | None = None
        self.at_end = False
        self.let_go = asyncio.Event()

    def catches(self, lease: Lease) -> bool:
        return self._caught is None and self._wanted(lease)

    def keeps(self, lease: Lease) -> bool:
        """Has this run come to its end, and goes on only when we say so?"""
        return self.at_end and self._caught == (lease.id, lease.fence)

    async def run(self, job: Job, call: Next) -> Any:
        self._caught = (job.id, job.fence)
        try:
            return await call()
        finally:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # what is stopped from outside is not held up
                self.at_end = True
                self._wake()
                await self.let_go.wait()


class Inspecting:
    """What a test can ask, whether it is asynchronous or not."""

    def __init__(self, clock: FakeClock, engine: RememberingEngine, errors: list[BaseException]) -> None:
        self.clock = clock
        self.engine = engine
        self.errors = errors  # what jobs have raised; verdicts are not among them

    @property
    def now(self) -> datetime:
        return self.clock.now

    def jobs(self, *, task: AnyTask | None = None, state: State | None = None) -> list[JobInfo]:
        """Every job of this test, also those that have ended and gone, in the order of their puts."""
        name = None if task is None else _name(task)
        return [
            info
            for info in self.engine.all_jobs()
            if (name is None or info.task == name) and (state is None or info.state is state)
        ]

    def job(self, job: AnyJob) -> JobInfo:
        """What is known of a job, or was last known if it has gone; `LookupError` if there never was one."""
        found = [info for info in self.engine.all_jobs() if info.id == _id(job)]
        if not found:
            raise LookupError(f"no job {_id(job)} was put while this app.test() was there")
        return found[-1]

    def outcome(self, job: AnyJob) -> Outcome | None:
        """How its last run ended; None if none has ended (a run that crashed has no outcome)."""
        return self.engine.outcomes.get(self.job(job).id)

    def history(self, job: AnyJob) -> tuple[Event, ...]:
        """Why it ran again, if it did."""
        return self.job(job).history

    def assert_enqueued(
        self,
        task: Task[..., Any],
        *args: Any,
        queue: str | None = None,
        delay: Duration | None = None,
        count: int | None = None,
        **kwargs: Any,
    ) -> None:
        """That a job of this task was put, whatever became of it; with `count`, exactly so many.

        Without arguments, any will do; with some, they are compared as the task would get them.
        """
        __tracebackhide__ = True
        found = self._enqueued(task, args, kwargs, queue, delay)
        if (not found) if count is None else (len(found) != count):
            wanted = _shown_call(task, args, kwargs, queue, delay)
            times = "was not enqueued" if count is None else f"was enqueued {len(found)} times, not {count}"
            raise AssertionError(f"{wanted} {times}; {self._shown_jobs()}")

    def assert_not_enqueued(
        self,
        task: Task[..., Any],
        *args: Any,
        queue: str | None = None,
        delay: Duration | None = None,
        **kwargs: Any,
    ) -> None:
        __tracebackhide__ = True
        if self._enqueued(task, args, kwargs, queue, delay):
            wanted = _shown_call(task, args, kwargs, queue, delay)
            raise AssertionError(f"{wanted} was enqueued; {self._shown_jobs()}")

    def _enqueued(
        self,
        task: Task[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        queue: str | None,
        delay: Duration | None,
    ) -> list[JobInfo]:
        decode = task.signature.decode
        wanted = decode(*task.signature.encode(args, kwargs)) if args or kwargs else None
        found = []
        for info in self.jobs(task=task):
            job = wire.decode(info.body)
            if (
                (wanted is None or decode(job.args, job.kwargs) == wanted)
                and (queue is None or job.queue == queue)
                and (delay is None or _delay(info, job) == duration(delay))
            ):
                found.append(info)
        return found

    def _shown_jobs(self) -> str:
        infos = self.engine.all_jobs()
        if not infos:
            return "nothing was enqueued"
        lines = [_shown_job(info) for info in infos[:SHOWN]]
        if len(infos) > SHOWN:
            lines.append(f"... and {len(infos) - SHOWN} more")
        return "\n  ".join([f"enqueued were ({len(infos)}):", *lines])


class Kit(Inspecting):
    """An app under test.  Nothing runs but in `drain`, `advance`, `kill_worker` and `lose_lease`."""

    def __init__(
        self,
        registry: Registry,
        lend: Lend,
        *,
        start: datetime | None = None,
        slots: int = 10,
        patience: Duration = "250ms",
    ) -> None:
        clock = FakeClock(START if start is None else start)
        super().__init__(clock, RememberingEngine(clock=clock), [])
        self._registry = registry
        self._lend = lend
        self._slots = slots
        self._patience = duration(patience).total_seconds()
        self._start_us = clock.now_us()
        self._tick_us = 0.0
        self._workers = 0
        self._hold: Hold | None = None
        self._seen: dict[tuple[str, int, Stop | None], float] = {}
        self._stack = ExitStack()

    # --- entering and leaving ------------------------------------------------------------

    async def __aenter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._lend(self.engine))
            await self._start_worker()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._stack:
            await self._worker.end()

    def __enter__(self) -> SyncKit:
        self._sync = SyncKit(self)
        return self._sync

    def __exit__(self, *_: object) -> None:
        self._sync.close()

    async def _start_worker(self) -> None:
        self._workers += 1
        settings = Settings(
            lanes=(Lane(self._queues(), self._slots),),
            holder=f"worker-{self._workers}",
            isolate_suspects=False,  # what a test kills has not harmed anybody
        )
        self._renewed_every = span_us(settings.lease) // BEATS
        self._worker = DrivenWorker(self._registry, settings, clock=self._seconds, driven=True)
        self._worker.around = self._around
        await self._worker.start()

    def _queues(self) -> dict[str, int]:
        declared = {task.options.queue for task in self._registry.tasks.values()}
        return dict.fromkeys(sorted(declared | {"default"}), 1)

    async def _around(self, job: Job, call: Next) -> Any:
        """Around every run, outside of all that the app itself puts around it."""
        try:
            if self._hold is not None and self._hold.catches(job.lease):
                return await self._hold.run(job, call)
            return await call()
        except (asyncio.CancelledError, Verdict):
            raise
        except BaseException as error:
            self.errors.append(error)
            raise

    # --- the verbs -----------------------------------------------------------------------

    async def drain(self, *, limit: int = MAX_RUNS) -> int:
        """Work until nothing is ready, running or unsettled; returns how many runs that took.

        Time stands still.  `AssertionError` after `limit` runs, and for a job that does not end.
        """
        self._seen.clear()
        await self._look_at_the_clock()
        return await self._work(self._until_all_have_ended(), limit)

    async def advance(self, span: Duration, *, limit: int = MAX_RUNS) -> int:
        """Move the clock, stopping wherever something is to happen; returns how many runs there were.

        At each stop what is due runs, what runs for too long is timed out, leases are renewed, and those of
        killed workers end.  A run that waits for something goes on waiting.
        """
        self._seen.clear()
        end_us = self.clock.now_us() + span_us(duration(span))
        runs = await self._instant(limit)
        while (now_us := self.clock.now_us()) < end_us:
            next_us = await self._next_us(end_us)
            self.clock.advance(timedelta(microseconds=next_us - now_us))
            runs += await self._instant(limit)
        return runs

    async def kill_worker(self, during: AnyTask | None = None) -> None:
        """End the worker as `kill -9` would, and start another one.

        With `during`, a job of that task is running then: it has got as far as it could by itself, to its end
        if it did not have to wait, and nothing of it is recorded.  It runs again when its lease is over.
        """
        if during is not None:
            name = _name(during)
            await self._catch(lambda lease: lease.task == name, f"job of {name}")
        await self._worker.kill()
        await self._start_worker()

    async def lose_lease(self, job: AnyJob) -> None:
        """Take the lease of a job away while it runs, as a stalled machine or network would.

        A run that still goes on is stopped; one that has come to its end is refused when it is settled.
        Either way the job is ready to run again.
        """
        job_id = _id(job)
        hold = await self._catch(lambda lease: lease.id == job_id, f"job {job_id}")
        [taken] = [lease for lease, _ in self._worker.runs() if lease.id == job_id]
        await self.engine.renew([taken], span=timedelta(0))  # it ends now, and its worker does not know
        await self.engine.sweep()
        hold.let_go.set()
        if not hold.at_end:
            await self._renew()
        self._seen.clear()
        await self._work(lambda: self._left_to(lambda lease: lease is taken))

    # --- work ----------------------------------------------------------------------------

    async def _work(self, wait: Callable[[], float], limit: int | None = None) -> int:
        """Let the worker work for as long as `wait` asks for more (real) time.

        With a limit it leases, else it only goes on with what it has.  Returns the number of runs.
        """
        first = self.engine.runs.copy()
        if limit is not None:
            self._worker.resume()
        try:
            while True:
                self._worker.serve(self.engine.queue_names())
                await self._worker.check()
                self._refuse_endless(first, limit)
                if (seconds := wait()) > 0:
                    await self._worker.moved(seconds)
                elif not await self._moves_on():
                    return self.engine.runs.total() - first.total()
        finally:
            self._worker.pause()

    async def _moves_on(self) -> bool:
        """Is there more to do after all?  A run may just have been woken by the end of another."""
        before = self.engine.runs.total()
        for _ in range(MORE_TURNS):
            await asyncio.sleep(0)
        return (
            self._worker.serve(self.engine.queue_names())
            or self._worker.unsettled
            or self._worker.starting
            or self.engine.runs.total() != before
        )

    def _refuse_endless(self, first: Counter[str], limit: int | None) -> None:
        since = self.engine.runs - first
        if limit is not None and since.total() > limit:
            worst = ", ".join(f"{task} ({runs} times)" for task, runs in since.most_common(3))
            raise AssertionError(
                f"there is no end of it: {since.total()} runs at {self.now:%Y-%m-%d %H:%M:%S}, and the clock "
                f"stands still; mostly {worst}.  Give what comes again a delay, or raise limit="
            )

    def _until_all_have_ended(self) -> Callable[[], float]:
        loop = asyncio.get_running_loop()
        runs, since = self.engine.runs.total(), loop.time()

        def wait() -> float:
            nonlocal runs, since
            if not self._worker.busy:
                return 0.0
            if runs != self.engine.runs.total():
                runs, since = self.engine.runs.total(), loop.time()
            left = since + GIVE_UP_AFTER - loop.time()
            if left <= 0:
                raise AssertionError(self._shown_stuck())
            return left

        return wait

    def _until_all_wait(self) -> float:
        if self._worker.starting:
            return self._patience
        return self._left_to(lambda lease: self._hold is None or not self._hold.keeps(lease))

    def _left_to(self, wanted: Wanted) -> float:
        """For how much longer (real time) we expect these runs to go on by themselves."""
        now = asyncio.get_running_loop().time()
        first = [
            self._seen.setdefault((lease.id, lease.fence, stop), now)
            for lease, stop in self._worker.runs()
            if wanted(lease)
        ]
        return max((seen + self._patience - now for seen in first), default=0.0)

    def _shown_stuck(self) -> str:
        names = ", ".join(f"{lease.task} ({lease.id})" for lease, _ in self._worker.runs())
        return (
            f"no run has ended for {GIVE_UP_AFTER:.0f} s, and these go on: {names}.  If they wait for a "
            f"timeout, advance() the clock instead; if for the test, let them go first"
        )

    async def _catch(self, wanted: Wanted, what: str) -> Hold:
        """Have such a job running, not further than to its end."""
        self._seen.clear()
        hold = self._hold = Hold(wanted, wake=self._worker.wake)
        try:
            await self._look_at_the_clock()
            await self._work(self._until_all_wait, MAX_RUNS)
        finally:
            self._hold = None
        if not any(wanted(lease) for lease, _ in self._worker.runs()):
            raise AssertionError(f"no {what} is running, nor ready to be run; {self._shown_jobs()}")
        return hold

    # --- time ----------------------------------------------------------------------------

    def _seconds(self) -> float:
        """The clock of the worker."""
        return (self.clock.now_us() - self._start_us + self._tick_us) / 1_000_000

    async def _instant(self, limit: int) -> int:
        await self._look_at_the_clock()
        return await self._work(self._until_all_wait, limit)

    async def _look_at_the_clock(self) -> None:
        # A sum of floats may be a little more than the instant that it stands for, but not a microsecond.
        self._tick_us = 0.5
        self._worker.tick()
        self._tick_us = 0.0
        await self._renew()
        await self._worker.beat()
        while KIND in (await self.engine.sweep()).records_due and await self._worker.fire():
            pass

    async def _renew(self) -> None:
        await self._worker.renew()
        await asyncio.sleep(0)  # it tells the loop of lost leases as if from another thread

    async def _next_us(self, end_us: int) -> int:
        """The next instant at which something is to happen, at most this one."""
        now_us = self.clock.now_us()
        moments = [end_us]
        if (next_in := (await self.engine.sweep()).next_in) is not None:
            moments.append(now_us + span_us(next_in))
        if (seconds := self._worker.next_moment) is not None:
            moments.append(self._start_us + round(seconds * 1_000_000))
        if self._worker.busy:
            beats = (now_us - self._start_us) // self._renewed_every
            moments.append(self._start_us + (beats + 1) * self._renewed_every)
        return max(min(moments), now_us + 1)


class SyncKit(Inspecting):
    """The same for tests that are plain functions: the worker has an event loop in a thread of its own."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.clock, kit.engine, kit.errors)
        self._kit = kit
        self._background = Background()
        with ExitStack() as stack:
            stack.callback(self._background.stop)
            self._wait(kit.__aenter__())
            stack.pop_all()

    def close(self) -> None:
        try:
            self._wait(self._kit.__aexit__())
        finally:
            self._background.stop()

    def drain(self, *, limit: int = MAX_RUNS) -> int:
        return self._wait(self._kit.drain(limit=limit))

    def advance(self, span: Duration, *, limit: int = MAX_RUNS) -> int:
        return self._wait(self._kit.advance(span, limit=limit))

    def kill_worker(self, during: AnyTask | None = None) -> None:
        self._wait(self._kit.kill_worker(during))

    def lose_lease(self, job: AnyJob) -> None:
        self._wait(self._kit.lose_lease(job))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._background.wait(coroutine)


# --- values for people and comparisons ---------------------------------------------------


def _name(task: AnyTask) -> str:
    return task if isinstance(task, str) else task.name


def _id(job: AnyJob) -> str:
    return job if isinstance(job, str) else job.id


def _delay(info: JobInfo, job: Envelope) -> timedelta:
    """How long after its put the job was to wait, as its producer said."""
    if job.due_at is not None:
        return job.due_at - info.put_at
    return timedelta(milliseconds=job.delay_ms)


def _shown_call(
    task: Task[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    queue: str | None,
    delay: Duration | None,
) -> str:
    call = _shown_arguments(list(args), kwargs) if args or kwargs else "(...)"
    options = [f" in queue {queue!r}"] if queue is not None else []
    options += [f" with a delay of {duration(delay)}"] if delay is not None else []
    return f"{task.name}{call}{''.join(options)}"


def _shown_job(info: JobInfo) -> str:
    job = wire.decode(info.body)
    call = _shown_arguments(msgspec.json.decode(job.args), msgspec.json.decode(job.kwargs))
    delay = f", delay {delay}" if (delay := _delay(info, job)) else ""
    return f"{info.task}{call} in queue {job.queue!r}{delay}: {info.state.value}"


def _shown_arguments(args: list[Any], kwargs: dict[str, Any]) -> str:
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"

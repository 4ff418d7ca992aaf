"""The app: where tasks are declared, and everything else is reached from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from msgspec.structs import replace

from skep import schedule
from skep.batches import BatchHandle, BatchReport, Callback, NewBatch, Plan, plan_batch
from skep.broker import Durability, Engine
from skep.clock import Clock
from skep.commands import run_line, run_program
from skep.duration import Duration, milliseconds
from skep.errors import BadSetting
from skep.flow.run import FlowRun
from skep.job import MAX_CRASHES
from skep.job import Job as Envelope
from skep.operations import Batches, Jobs, Queues
from skep.policy import Policy
from skep.registry import Registry
from skep.schedule import MisfireName, OverlapName
from skep.schedules import Declared, Schedules
from skep.signature import Provided
from skep.strategy import Strategy
from skep.task import AsyncTask, Call, ErrorRules, Options, SyncTask, Task, names_around, task_name

if TYPE_CHECKING:  # no loop is broken by this: importing skep loads neither an engine nor a worker
    from skep.testing.kit import Kit

P = ParamSpec("P")
R = TypeVar("R")
# Not Provided itself: a first parameter of type object is an argument.
J = TypeVar("J", bound=Provided)
K = TypeVar("K", bound=Provided)

DEFAULTS = Policy()


class TaskDecorator(Protocol):
    """What `@app.task(...)` does to a function.

    A first parameter of type `Job` or `Transaction` is the worker's to give, and so are two of them.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[Concatenate[J, K, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[Concatenate[J, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[J, K, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[J, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


S = TypeVar("S", bound=Task[..., Any] | Call[..., Any])


class ScheduleDecorator(Protocol):
    """What `@app.cron(...)` does: a task stays what it is, and a function becomes a task."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a task is also callable: the first match is meant
        self, task: S, /
    ) -> S: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, task: Callable[Concatenate[J, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, task: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, task: Callable[Concatenate[J, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, task: Callable[P, R], /) -> SyncTask[P, R]: ...


class App(Registry):
    """`App("sqlite:///jobs.db")`: tasks and jobs on the engine that the URL names.

    Nothing is opened before it is needed.  `durability` is a floor: an engine that keeps less is refused.
    """

    def __init__(
        self,
        url: str,
        *,
        durability: Durability | None = None,
        clock: Clock | None = None,
        check_arguments: bool = True,
    ) -> None:
        super().__init__(url, durability=durability, clock=clock)
        self.jobs = Jobs(self)
        self.queues = Queues(self)
        self.batches = Batches(self)
        self.schedules = Schedules(self, self.declared_schedules)
        self._check_arguments = check_arguments
        self._lent = False

    @overload
    def task(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[Concatenate[J, K, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[Concatenate[J, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(  # type: ignore[overload-overlap]  # a coroutine is also an R: the first match is meant
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[J, K, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[J, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        timeout: Duration | None = None,
        on_success: Strategy = ...,
        on_error: Strategy | ErrorRules = ...,
        on_timeout: Strategy = ...,
        result_ttl: Duration | None = None,
        max_crashes: int = ...,
        isolate: Literal["process"] | None = None,
        abandon: bool = False,
        memory_limit: int | None = None,
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        timeout: Duration | None = None,
        on_success: Strategy = DEFAULTS.on_success,
        on_error: Strategy | ErrorRules = DEFAULTS.on_error,
        on_timeout: Strategy = DEFAULTS.on_timeout,
        result_ttl: Duration | None = None,
        max_crashes: int = MAX_CRASHES,
        isolate: Literal["process"] | None = None,
        abandon: bool = False,
        memory_limit: int | None = None,
    ) -> Any:
        """Declare a task: `@app.task`, or `@app.task(queue="mail", timeout="30s", …)`.

        `isolate="process"` runs it in a child process, killed at its timeout or at `memory_limit` bytes.
        `on_error` may also be a mapping from exception classes to strategies; the nearest class wins.
        """
        rules = tuple(on_error.items()) if isinstance(on_error, Mapping) else ()
        general = DEFAULTS.on_error if isinstance(on_error, Mapping) else on_error
        options = Options(
            name=name or "",
            queue=queue,
            priority=priority,
            timeout_ms=None if timeout is None else milliseconds(timeout),
            result_ttl_ms=None if result_ttl is None else milliseconds(result_ttl),
            max_crashes=max_crashes,
            policy=Policy(on_success=on_success, on_error=general, on_timeout=on_timeout),
            error_rules=rules,
            isolate=isolate,
            abandon=abandon,
            memory_limit=memory_limit,
            check_arguments=self._check_arguments,
        )

        def declare(function: Callable[..., Any], frames_up: int = 1) -> Task[..., Any]:
            kind: type[Task[..., Any]] = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
            named = replace(options, name=name or task_name(function))
            task = kind(function, named, self, names_around(function, frames_up))
            self.register(task)
            return task

        return declare if function is None else declare(function, frames_up=2)

    def batch(
        self,
        calls: Iterable[Envelope] = (),
        *,
        callback: Callback | None = None,
        on_succeeded: Callback | None = None,
        on_failed: Callback | None = None,
        linger: Duration = "7d",
        delay: Duration | None = None,
        at: datetime | None = None,
        note: str = "",
        batch_id: str | None = None,
        parent: BatchHandle | str | None = None,
        open_for: Duration = "1d",
        seal: bool = True,
    ) -> NewBatch:
        """Many jobs with one end: `await app.batch(resize.many(paths), callback=report)`.

        `callback` is put when the last member has ended, `on_succeeded` besides if all are done, and
        `on_failed` when the first one is dead or cancelled; each at most once, in the step that ends that
        member.  A callback with a parameter of type `BatchReport` gets one; for arguments of its own give
        `task.job(…)`.

        Also `.enqueue()`, `async with` and `with`: see `NewBatch`.  The members wait for `delay` or `at`.
        With `seal=False` more can be added through the handle until it is sealed, for at most `open_for`.
        """
        plan = plan_batch(
            callback=callback,
            on_succeeded=on_succeeded,
            on_failed=on_failed,
            linger=linger,
            open_for=open_for,
            delay=delay,
            at=at,
            note=note,
            batch_id=batch_id,
            parent=parent.id if isinstance(parent, BatchHandle) else parent,
        )
        self._check_report_is_there(plan)
        return NewBatch(self, plan, calls, seal=seal)

    def flow(self, flow_id: str) -> FlowRun[Any]:
        """A flow that was started elsewhere, by its id."""
        return FlowRun(self, flow_id)

    def _check_report_is_there(self, plan: Plan) -> None:
        if plan.batch.linger_ms:
            return
        for job in (plan.batch.on_finished, plan.batch.on_succeeded, plan.batch.on_failed):
            task = None if job is None else self.tasks.get(job.task)
            if task is not None and BatchReport in task.signature.provided.values():
                raise BadSetting(
                    f"with linger=0 the batch is gone before {task.name} can read its BatchReport: let it "
                    f"linger for a while, or give a callback that does without"
                )

    def test(self, *, start: datetime | None = None, slots: int = 10, patience: Duration = "250ms") -> Kit:
        """`async with app.test() as t:` (or `with`, in plain tests): the real worker, in virtual time.

        Meanwhile everything goes to a memory engine of its own.  The clock stands at `start` until the test
        moves it; a job that runs for `patience` of real time is taken to wait for that.
        """
        from skep.testing.kit import Kit

        return Kit(self, self._lent_to, start=start, slots=slots, patience=patience)

    def cron(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        misfire: MisfireName = "once",
        misfire_limit: int = 100,
        misfire_after: Duration = "1m",
        overlap: OverlapName = "allow",
        jitter: Duration = 0,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> ScheduleDecorator:
        """Run a task at the times of a cron expression: `@app.cron("0 9 * * mon-fri", tz="Europe/Paris")`.

        It stands above `@app.task(…)`, or above a plain function, which becomes a task.  `name` is that of
        the schedule, by default the task's; `args` and `kwargs` are what the task is called with.  The
        policies are told in docs/schedules.md.
        """
        plan = schedule.cron(
            expression,
            tz=tz,
            misfire=misfire,
            misfire_limit=misfire_limit,
            misfire_after=misfire_after,
            overlap=overlap,
            jitter=jitter,
        )
        return self._scheduled(plan, name, args, kwargs)

    def every(
        self,
        period: Duration,
        *,
        anchor: datetime | None = None,
        misfire: MisfireName = "once",
        misfire_limit: int = 100,
        misfire_after: Duration = "1m",
        overlap: OverlapName = "allow",
        jitter: Duration = 0,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> ScheduleDecorator:
        """Run a task periodically: `@app.every("15m")`, on the quarter hours.  See `cron` for the rest."""
        plan = schedule.every(
            period,
            anchor=anchor,
            misfire=misfire,
            misfire_limit=misfire_limit,
            misfire_after=misfire_after,
            overlap=overlap,
            jitter=jitter,
        )
        return self._scheduled(plan, name, args, kwargs)

    def _scheduled(
        self,
        plan: schedule.Plan,
        name: str | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> ScheduleDecorator:
        def declare(given: Any) -> Any:
            declare_task: Any = self.task()
            task = given if isinstance(given, Task | Call) else declare_task(given, frames_up=2)
            self.declare_schedule(Declared(name or task.name, plan, task, args, dict(kwargs or {})))
            return task

        return declare

    async def aclose(self) -> None:
        """Let go of the engine; using the app again opens it again.  The engine of a test is the test's."""
        if not self._lent:
            await super().aclose()

    @contextmanager
    def _lent_to(self, engine: Engine) -> Iterator[None]:
        """Everything goes to this engine, which is open; afterwards to the app's own again."""
        with self._lock:
            if self._lent:
                raise BadSetting("this app is being tested already: leave the first test() before the next")
            own = self.url, self._engine, self._opened
            # The URL too: a fork must not find its way to the real jobs.
            self.url, self._engine, self._opened, self._lent = "memory://", engine, True, True
        try:
            yield
        finally:
            with self._lock:
                self.url, self._engine, self._opened = own
                self._lent = False

    def command(
        self,
        name: str,
        *,
        shell: bool = False,
        queue: str = "default",
        priority: int = 0,
        timeout: Duration | None = None,
        on_success: Strategy = DEFAULTS.on_success,
        on_error: Strategy | ErrorRules = DEFAULTS.on_error,
        on_timeout: Strategy = DEFAULTS.on_timeout,
        result_ttl: Duration | None = None,
        max_crashes: int = MAX_CRASHES,
    ) -> AsyncTask[..., str]:
        """Declare a task that runs a program: `resize.enqueue(["convert", …], env={…}, stdin="…")`.

        With `shell=True` its first argument is a line of shell instead of a list.  Its result is the end of
        what it wrote to its standard output; see `skep.commands`.
        """
        function: Callable[..., Coroutine[Any, Any, str]] = run_line if shell else run_program
        declare = self.task(
            name=name,
            queue=queue,
            priority=priority,
            timeout=timeout,
            on_success=on_success,
            on_error=on_error,
            on_timeout=on_timeout,
            result_ttl=result_ttl,
            max_crashes=max_crashes,
        )
        task: AsyncTask[..., str] = declare(function)
        return task

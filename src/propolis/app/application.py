"""The app: tasks are declared with it, and everything else is reached from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from msgspec.structs import replace

from propolis.app.batch.new_batch import BatchHandle, NewBatch
from propolis.app.batch.plan import BatchOptions, plan_batch
from propolis.app.commands.run import Run, check_free_form, declared, no_program, run_line, run_program
from propolis.app.flow.run import FlowRun
from propolis.app.operate.batches import StoredBatches
from propolis.app.operate.jobs import Jobs
from propolis.app.operate.limits import LimitSettings
from propolis.app.operate.queues import Queues
from propolis.app.operate.schedules import Declared, Schedules
from propolis.app.operate.workers import Workers
from propolis.app.registry import Registry
from propolis.app.signature import Provided
from propolis.app.task import (
    AsyncTask,
    Call,
    CommandOptions,
    SyncTask,
    Task,
    TaskOptions,
    declared_options,
    names_around,
    task_name,
)
from propolis.core import schedule
from propolis.core.clock import Clock
from propolis.core.duration import Duration
from propolis.core.envelope import Envelope, check_options
from propolis.core.protocols import Durability, Engine
from propolis.core.schedule import SchedulePolicies
from propolis.errors import BadSetting

if TYPE_CHECKING:  # no loop is broken by this: importing propolis loads neither an engine nor a worker
    from propolis.testing.kit.kit import Kit

P = ParamSpec("P")
R = TypeVar("R")
# Not Provided itself: a first parameter of type object is an argument.
J = TypeVar("J", bound=Provided)
K = TypeVar("K", bound=Provided)


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

    Nothing is opened before it is needed.  `durability` is a floor, as in "power": an engine that keeps
    less is refused.  `needs` are pieces of the contract, such as `propolis.contract.Limits`: an engine
    that lacks one is refused when the app opens it, and not at the first call.  `actor` is who pauses and
    blocks through it, by default the user of the process and the machine.
    """

    def __init__(
        self,
        url: str,
        *,
        durability: Durability | str | None = None,
        clock: Clock | None = None,
        check_arguments: bool = True,
        needs: Iterable[type] = (),
        actor: str | None = None,
    ) -> None:
        super().__init__(url, durability=durability, clock=clock)
        self.client.actor = actor
        self.client.needs.update(dict.fromkeys(needs, "as it says"))
        self.jobs = Jobs(self.client)
        self.queues = Queues(self.client)
        self.limits = LimitSettings(self.client)
        self.batches = StoredBatches(self.client)
        self.schedules = Schedules(self.client, self.declared_schedules)
        self.workers = Workers(self.client)
        self._check_arguments = check_arguments

    async def ready(self) -> Engine:
        """Open the engine now, not at the first job; a second time this does nothing."""
        return await self.client.ready()

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
    def task(self, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...

    def task(self, function: Callable[..., Any] | None = None, /, **given: Unpack[TaskOptions]) -> Any:
        """Declare a task: `@app.task`, or `@app.task(queue="mail", timeout="30s", …)`.

        `isolate="process"` runs it in a child process, killed at its timeout or at `memory_limit` bytes.
        `on_error` may also be a mapping from exception classes to strategies; the nearest class wins.
        `retries=5` is short for `on_error=repeat(5, exponential("2s", cap="10m")).then(dead)`.
        """
        options = declared_options(given, check_arguments=self._check_arguments)

        def declare(function: Callable[..., Any], frames_up: int = 1) -> Task[..., Any]:
            if isinstance(function, Task):
                raise BadSetting(
                    f"{function.name} is a task already, whose options would be lost: declare it once, and "
                    f"put @app.cron(…) or @app.every(…) above @app.task(…)"
                )
            kind: type[Task[..., Any]] = AsyncTask if inspect.iscoroutinefunction(function) else SyncTask
            named = replace(options, name=options.name or task_name(function))
            task = kind(function, named, self.client, names_around(function, frames_up))
            self.register(task)
            return task

        return declare if function is None else declare(function, frames_up=2)

    def batch(
        self,
        calls: Iterable[Envelope] = (),
        *,
        parent: BatchHandle | str | None = None,
        seal: bool = True,
        **options: Unpack[BatchOptions],
    ) -> NewBatch:
        """Many jobs with one end: `await app.batch(resize.many(paths), callback=report)`.

        `callback` is put when the last member has ended, `on_succeeded` besides if all are done, and
        `on_failed` when the first one is dead or cancelled; each at most once, in the step that ends that
        member.  A callback with a parameter of type `BatchReport` gets one; for arguments of its own give
        `task.job(…)`.

        Also `.enqueue()`, `async with` and `with`: see `NewBatch`.  The members wait for `delay` or `at`.
        With `seal=False` more can be added through the handle until it is sealed, for at most `open_for`.
        """
        plan = plan_batch(options, parent=parent.id if isinstance(parent, BatchHandle) else parent)
        return NewBatch(self.client, plan, calls, seal=seal)

    def flow(self, flow_id: str) -> FlowRun[Any]:
        """A flow that was started elsewhere, by its id."""
        return FlowRun(self.client, flow_id)

    def test(self, *, start: datetime | None = None, slots: int = 10, patience: Duration = "250ms") -> Kit:
        """`async with app.test() as t:` (or `with`, in plain tests): the real worker, in virtual time.

        Meanwhile everything goes to a memory engine of its own.  The clock stands at `start` until the test
        moves it; a job that runs for `patience` of real time is taken to wait for that.
        """
        from propolis.testing.kit.kit import Kit

        return Kit(self, self.client.lent_to, start=start, slots=slots, patience=patience)

    def cron(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **policies: Unpack[SchedulePolicies],
    ) -> ScheduleDecorator:
        """Run a task at the times of a cron expression: `@app.cron("0 9 * * mon-fri", tz="Europe/Paris")`.

        It stands above `@app.task(…)`, or above a plain function, which becomes a task.  `name` is that of
        the schedule, by default the task's; `args` and `kwargs` are what the task is called with.  The
        policies are described in docs/schedules.md.
        """
        return self._scheduled(schedule.cron(expression, tz=tz, **policies), name, args, kwargs)

    def every(
        self,
        period: Duration,
        *,
        anchor: datetime | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **policies: Unpack[SchedulePolicies],
    ) -> ScheduleDecorator:
        """Run a task periodically: `@app.every("15m")`, on the quarter hours.  See `cron` for the rest."""
        return self._scheduled(schedule.every(period, anchor=anchor, **policies), name, args, kwargs)

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

    def command(
        self,
        name: str,
        program: Sequence[str] | None = None,
        *,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        unsafe_any_program: bool = False,
        shell: bool = False,
        **options: Unpack[CommandOptions],
    ) -> AsyncTask[..., str]:
        """Declare a task that runs a program: `app.command("resize", ["convert", "{source}", "{target}"])`.

        A job brings a value for each place, by name: `resize.enqueue(source="a.png", target="b.png")`.  Each
        is text or a number, and stays inside of its argument.  One that would begin its argument with a dash
        is refused, unless its place is written `{source:any}`.  `stdin` may have places too; `env` is fixed.

        With `unsafe_any_program=True` instead of a program a job brings all of it, `run.enqueue(["ls", "-l"],
        env={…}, stdin="…")`, or with `shell=True` a line of shell: then whoever can write to the storage can
        run anything that the worker may run.

        The result is the end of what the program wrote to its standard output; any exit code but 0 is a
        `CommandFailed`.
        """
        if unsafe_any_program:
            check_free_form(name, program, env, stdin)
            function: Run = run_line if shell else run_program
        elif program is None or shell:
            raise no_program(name)
        else:
            function = declared(name, program, env or {}, stdin)
        check_options("command()", CommandOptions, options)
        task: AsyncTask[..., str] = self.task(name=name, **options)(function)
        return task

"""What a worker knows of an app: its client, tasks, schedules, hooks and middleware."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from propolis.app.client.client import Client
from propolis.app.context import Job
from propolis.app.operate.declared_limits import needed_for
from propolis.app.operate.schedules import Declared
from propolis.app.task import Task
from propolis.core.clock import Clock
from propolis.core.protocols import Durability, Engine, LendsTransactions, Limits, Records, Rules
from propolis.core.schedule import Overlap
from propolis.engines.address import masked
from propolis.errors import BadSetting, NoTransactions, UnknownTask

F = TypeVar("F", bound=Callable[..., Any])

Next = Callable[[], Any]  # to be awaited; in a plain middleware it gives the value itself
Middleware = Callable[[Job, Next], Any]

END_EVENTS = ("finished", "timeout", "error", "dead", "lost")
EVENTS = ("fetched", *END_EVENTS, "startup", "shutdown", "breaker")


class Registry:
    """The names that jobs may use, and the hooks that hear of jobs."""

    def __init__(
        self, url: str, *, durability: Durability | str | None = None, clock: Clock | None = None
    ) -> None:
        self.client = Client(url, durability=durability, clock=clock)
        self.state = SimpleNamespace()
        self.tasks: dict[str, Task[..., Any]] = {}
        self.client.tasks = self.tasks
        self.hooks: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        self.middlewares: list[Middleware] = []
        self.declared_schedules: dict[str, Declared] = {}
        self.hooked = False  # does anybody want to hear how jobs end?  Asked for every job

    @property
    def url(self) -> str:
        return self.client.url

    @url.setter
    def url(self, url: str) -> None:
        self.client.url = url

    async def aclose(self) -> None:
        """Let go of the engine; using the app again opens it again.  The engine of a test is the test's."""
        await self.client.aclose()

    def close(self) -> None:
        """`aclose`, for synchronous code."""
        self.client.close()

    def register(self, task: Task[..., Any]) -> None:
        known = self.tasks.get(task.name)
        if known is not None and known.function is not task.function:
            raise BadSetting(f"there is already a task named {task.name!r}: give one of them another name=")
        self.tasks[task.name] = task
        self.client.needs |= needed_for(task)
        if task.options.breaker is not None:
            self.client.needs |= {Records: "for its breakers", Rules: "for its breakers"}

    def task_named(self, name: str) -> Task[..., Any]:
        task = self.tasks.get(name)
        if task is None:
            raise UnknownTask(name)
        return task

    def check(self) -> None:
        """`BadSetting` now for every task whose signature could not work, and every wrong schedule."""
        for task in self.tasks.values():
            task.check()
        for declared in self.declared_schedules.values():
            declared.schedule()

    def declare_schedule(self, declared: Declared) -> None:
        known = self.declared_schedules.get(declared.name)
        if known is not None and known != declared:
            raise BadSetting(
                f"there is already a schedule named {declared.name!r}: give one of them another name="
            )
        self.declared_schedules[declared.name] = declared
        self.client.needs[Records] = "for its schedules"
        if declared.plan.overlap is Overlap.QUEUE_ONE:
            self.client.needs[Limits] = f'for overlap="queue-one" of schedule {declared.name!r}'

    def check_engine(self, engine: Engine) -> None:
        """`BadSetting` now for a task that asks for what this engine does not have."""
        for task in self.tasks.values():
            if task.transactional and not isinstance(engine, LendsTransactions):
                raise NoTransactions(task.name, masked(self.url))

    # --- hooks: a coroutine function, or a plain one, which runs in the thread of the job ----------------

    def on_fetched(self, hook: F) -> F:
        """hook(job): a job was leased and is about to run."""
        return self._add("fetched", hook)

    def on_finished(self, hook: F) -> F:
        """hook(job, result): it succeeded."""
        return self._add("finished", hook)

    def on_timeout(self, hook: F) -> F:
        """hook(job): it ran out of time."""
        return self._add("timeout", hook)

    def on_error(self, hook: F) -> F:
        """hook(job, error): it raised, or failed by a verdict."""
        return self._add("error", hook)

    def on_dead(self, hook: F) -> F:
        """hook(job, reason): this run was its last.  (Broken, expired and crashed jobs have no such run.)"""
        return self._add("dead", hook)

    def on_lost(self, hook: F) -> F:
        """hook(job): its lease was lost, and what it did may be done again elsewhere."""
        return self._add("lost", hook)

    def on_breaker(self, hook: F) -> F:
        """hook(change): this worker has opened or closed a breaker; called with a `BreakerChange`, once."""
        return self._add("breaker", hook)

    def on_startup(self, hook: F) -> F:
        """hook(state): a worker process starts; leave in `state` what its jobs share."""
        return self._add("startup", hook)

    def on_shutdown(self, hook: F) -> F:
        """hook(state): a worker process ends."""
        return self._add("shutdown", hook)

    def middleware(self, wrap: Middleware) -> Middleware:
        """wrap(job, call): around every run, where it runs; the first one declared is the outermost.

        A plain function runs in the thread of its job, and `call()` gives it the value.
        """
        self.middlewares.append(wrap)
        return wrap

    def _add(self, event: str, hook: F) -> F:
        self.hooks[event].append(hook)
        self.hooked = self.hooked or event in END_EVENTS
        return hook

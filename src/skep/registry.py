"""What a worker knows of an app: its tasks, hooks, middleware and dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from skep.address import masked
from skep.broker import Durability, Engine, LendsTransactions
from skep.clock import Clock
from skep.context import Job
from skep.errors import BadSetting, NoTransactions, UnknownTask
from skep.producer import Producer
from skep.schedules import Declared
from skep.task import Task

F = TypeVar("F", bound=Callable[..., Any])

Next = Callable[[], Awaitable[Any]]
Middleware = Callable[[Job, Next], Awaitable[Any]]

EVENTS = ("fetched", "finished", "timeout", "error", "dead", "lost", "startup", "shutdown")


class Registry(Producer):
    """The names that jobs may use, and who wants to hear of them."""

    def __init__(self, url: str, *, durability: Durability | None = None, clock: Clock | None = None) -> None:
        super().__init__(url, durability=durability, clock=clock)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.hooks: dict[str, list[Callable[..., Any]]] = {event: [] for event in EVENTS}
        self.middlewares: list[Middleware] = []
        self.declared_schedules: dict[str, Declared] = {}
        self._hooked = False

    @property
    def hooked(self) -> bool:
        """Does anybody want to hear how jobs end?"""
        return self._hooked

    def register(self, task: Task[..., Any]) -> None:
        known = self.tasks.get(task.name)
        if known is not None and known.function is not task.function:
            raise BadSetting(f"there is already a task named {task.name!r}: give one of them another name=")
        self.tasks[task.name] = task

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

    def check_engine(self, engine: Engine) -> None:
        """`BadSetting` now for a task that asks for what this engine does not have."""
        for task in self.tasks.values():
            if task.transactional and not isinstance(engine, LendsTransactions):
                raise NoTransactions(task.name, masked(self.url))

    # --- hooks: each may be a plain function or a coroutine function -----------------------

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
        """hook(job, error): it raised, or said so by a verdict."""
        return self._add("error", hook)

    def on_dead(self, hook: F) -> F:
        """hook(job, reason): this run was its last.  (Broken, expired and crashed jobs have no such run.)"""
        return self._add("dead", hook)

    def on_lost(self, hook: F) -> F:
        """hook(job): its lease was lost, and what it did may be done again elsewhere."""
        return self._add("lost", hook)

    def on_startup(self, hook: F) -> F:
        """hook(state): a worker process starts; leave in `state` what its jobs share."""
        return self._add("startup", hook)

    def on_shutdown(self, hook: F) -> F:
        """hook(state): a worker process ends."""
        return self._add("shutdown", hook)

    def middleware(self, wrap: Middleware) -> Middleware:
        """wrap(job, call): around every run; the first one declared is the outermost."""
        self.middlewares.append(wrap)
        return wrap

    def _add(self, event: str, hook: F) -> F:
        self.hooks[event].append(hook)
        self._hooked = True
        return hook

"""Tasks: functions that can be called later, and everything that can be said about one such call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from skep import wire
from skep.broker import Receipt
from skep.duration import Duration, milliseconds
from skep.errors import BadSetting, BrokenPayload
from skep.flow.steps import Flow, Single
from skep.handle import Handle
from skep.job import MAX_CRASHES, Job, UniqueUntil, new_id
from skep.policy import Policy
from skep.producer import Producer, bundles
from skep.signature import Signature, decoder_for, encode_value
from skep.strategy import Archive, Bury, Delete, Repeat, Strategy
from skep.transaction import Transaction

P = ParamSpec("P")
Q = ParamSpec("Q")
X = TypeVar("X")
X_contra = TypeVar("X_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Upgrade = Callable[[list[Any], dict[str, Any]], tuple[list[Any], dict[str, Any]] | None]
ErrorRules = Mapping[type[BaseException], Strategy]


class Options(Struct, frozen=True, kw_only=True):
    """How a task is run, as declared."""

    name: str
    queue: str = "default"
    priority: int = 0
    timeout_ms: int | None = None
    result_ttl_ms: int | None = None
    max_crashes: int = MAX_CRASHES
    policy: Policy = Policy()
    error_rules: tuple[tuple[type[BaseException], Strategy], ...] = ()
    isolate: str | None = None
    abandon: bool = False
    memory_limit: int | None = None
    check_arguments: bool = True


_AS_THEY_ARE = (
    "queue",
    "priority",
    "unique",
    "unique_until",
    "key",
    "batch",
    "on_success",
    "on_error",
    "on_timeout",
    "headers",
)


class Using(Struct, frozen=True, kw_only=True):
    """What one call says differently."""

    delay: Duration | UnsetType = UNSET
    at: datetime | UnsetType = UNSET
    expires: Duration | datetime | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    timeout: Duration | UnsetType = UNSET
    result_ttl: Duration | UnsetType = UNSET
    job_id: str | UnsetType = UNSET
    unique: str | UnsetType = UNSET
    unique_until: UniqueUntil | UnsetType = UNSET
    key: str | UnsetType = UNSET
    batch: str | UnsetType | None = UNSET
    on_success: Strategy | UnsetType = UNSET
    on_error: Strategy | UnsetType = UNSET
    on_timeout: Strategy | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    tx: Any = UNSET

    def fields(self) -> dict[str, Any]:
        """As fields of a `Job`."""
        given = {name: value for name in _AS_THEY_ARE if (value := getattr(self, name)) is not UNSET}
        if self.delay is not UNSET:
            given["delay_ms"] = milliseconds(self.delay)
        if self.at is not UNSET:
            given["due_at"] = self.at
        if isinstance(self.expires, datetime):
            given["expires_at"] = self.expires
        elif self.expires is not UNSET:
            given["expires_in_ms"] = milliseconds(self.expires)
        if self.timeout is not UNSET:
            given["timeout_ms"] = milliseconds(self.timeout)
        if self.result_ttl is not UNSET:
            given["result_ttl_ms"] = milliseconds(self.result_ttl)
        if self.job_id is not UNSET:
            given |= {"id": self.job_id, "chosen": True}
        return given


class Taking(Protocol[X_contra, Q, R_co]):
    """What takes an X first.  For the type of steps: mypy finds no X in a `Task[Concatenate[X, Q], R]`."""

    def enqueue(self, first: X_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> Handle[R_co]: ...


class Call(Generic[P, R_co]):
    """A task with the circumstances of a call: `task.using(delay="5m")`."""

    def __init__(self, task: Task[P, R_co], using: Using) -> None:
        self._task = task
        self._using = using
        self._fields = using.fields()
        if using.delay is not UNSET and using.at is not UNSET:
            raise BadSetting("give a delay or a time, not both")
        if using.timeout is not UNSET:
            check_timeout(task.function, replace(task.options, timeout_ms=milliseconds(using.timeout)))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """The job that `enqueue` would put.  With tx= it is refused: a job does not know of transactions."""
        check_put_here(self._task.name, self._using.tx)
        return self._task.make_job(args, kwargs, self._fields)

    @overload
    def step(self, *args: P.args, **kwargs: P.kwargs) -> Flow[Any, R_co]: ...
    @overload
    def step(self: Taking[X, Q, R], *args: Q.args, **kwargs: Q.kwargs) -> Flow[X, R]: ...
    def step(self, *args: Any, **kwargs: Any) -> Flow[Any, Any]:
        """This task as a step of a flow.

        The first step of a flow has all its arguments; the others get the result of the step before them
        as the first one, and have only the others here.
        """
        for name in ("job_id", "batch", "tx"):
            if getattr(self._using, name) is not UNSET:
                raise BadSetting(f"{name}= is of no use to a step: its flow decides on that")
        return Flow((Single(self, args, kwargs),))

    # --- as the maker of a step --------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def producer(self) -> Producer:
        return self._task.producer

    @property
    def result_kind(self) -> Any:
        return self._task.signature.result_kind

    def first_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        return self._task.make_job(args, kwargs, self._fields)

    def later_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Job:
        signature = self._task.signature
        encoded, named = signature.encode_later(args, kwargs, check=self._task.options.check_arguments)
        return self._task.job_with(encoded, named, self._fields)

    def check_fits(self, job: Job) -> None:
        if self._task.options.check_arguments:
            try:
                self._task.arguments(job)
            except BrokenPayload as error:
                raise TypeError(f"{self._task.name}: {error}") from error

    def many(self, calls: Iterable[Any]) -> Many[R_co]:
        """One job per element, all under these circumstances."""
        return Many(self._task, calls, self._fields, self._using.tx)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        job = self._task.make_job(args, kwargs, self._fields)
        if self._using.tx is UNSET:
            return self._task.handle(await self._task.producer.aput(job))
        [receipt] = await self._task.producer.aput_in(self._using.tx, [job])
        return self._task.handle(receipt)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        job = self._task.make_job(args, kwargs, self._fields)
        producer = self._task.producer
        if self._using.tx is UNSET:
            return self._task.handle(producer.wait(producer.aput(job)))
        [receipt] = producer.put_in(self._using.tx, [job])
        return self._task.handle(receipt)


class Many(Generic[R_co]):
    """Many calls of one task, made one after another as they are needed."""

    def __init__(
        self, task: Task[..., R_co], calls: Iterable[Any], fields: dict[str, Any], tx: Any = UNSET
    ) -> None:
        self._task = task
        self._calls = calls
        self._fields = fields
        self._tx = tx

    def __iter__(self) -> Iterator[Job]:
        check_put_here(self._task.name, self._tx)
        return self._jobs()

    def _jobs(self) -> Iterator[Job]:
        for call in self._calls:
            args = call if isinstance(call, tuple) else (call,)
            yield self._task.make_job(args, {}, self._fields)

    async def aenqueue(self) -> list[Handle[R_co]]:
        """Put them in bundles; each bundle wholly or not at all, and with tx= all of them so.

        What is wrong with one of them is found before any is put, unless an iterator makes them as they are
        needed.
        """
        if self._tx is not UNSET:
            return [handle async for handle in self.astream()]
        receipts = await self._task.producer.aput_many(self._made())
        return [self._task.handle(receipt) for receipt in receipts]

    def enqueue(self) -> list[Handle[R_co]]:
        """The same for synchronous code."""
        if self._tx is not UNSET or not self._all_there:  # an iterator may belong to this thread
            return list(self.stream())
        producer = self._task.producer
        return [self._task.handle(receipt) for receipt in producer.wait(producer.aput_many(self._made()))]

    async def astream(self) -> AsyncIterator[Handle[R_co]]:
        """The same, handle by handle: of what an iterator makes, only one bundle is in memory at a time.

        They are put as far as somebody asks for their handles, and to the end of that bundle.
        """
        producer = self._task.producer
        for bundle in bundles(self._made()):
            put = producer.aput_many(bundle) if self._tx is UNSET else producer.aput_in(self._tx, bundle)
            for receipt in await put:
                yield self._task.handle(receipt)

    def stream(self) -> Iterator[Handle[R_co]]:
        """The same for synchronous code."""
        producer = self._task.producer
        for bundle in bundles(self._made()):
            if self._tx is UNSET:
                receipts = producer.wait(producer.aput_many(bundle))
            else:
                receipts = producer.put_in(self._tx, bundle)
            yield from map(self._task.handle, receipts)

    @property
    def _all_there(self) -> bool:
        return isinstance(self._calls, Collection)

    def _made(self) -> Iterator[Job]:
        """As they are asked for.  Where all calls are there, all arguments are looked at now."""
        if not self._all_there:
            return self._jobs()
        encode, check = self._task.signature.encode, self._task.options.check_arguments
        encoded = [
            encode(call if isinstance(call, tuple) else (call,), {}, check=check) for call in self._calls
        ]
        return (self._task.job_with(args, kwargs, self._fields) for args, kwargs in encoded)


class Task(Generic[P, R_co]):
    """A function that stays callable and can also be enqueued."""

    __name__: str

    def __init__(
        self,
        function: Callable[P, Any],
        options: Options,
        producer: Producer,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        check_function(function)
        check_strategies(options)
        wire.check(
            Job(
                id="x",
                task=options.name,
                queue=options.queue,
                priority=options.priority,
                max_crashes=options.max_crashes,
            )
        )
        check_timeout(function, options)
        self.function = function
        self.options = options
        self.producer = producer
        self.signature = Signature(function, names)
        self._upgrades: list[Upgrade] = []
        self.is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        return self.options.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function, here and now."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    @cached_property
    def simple(self) -> bool:
        """Can it be called as it is: a coroutine function that asks the worker for nothing?"""
        return self.is_async and self.options.isolate is None and not self.signature.provided

    @cached_property
    def transactional(self) -> bool:
        """Does it run, and end, in a transaction of the engine's?"""
        return self.signature.asks_for(Transaction)

    def check(self) -> None:
        """`BadSetting` for what cannot work, now that every annotation can be resolved."""
        self.signature.check()
        if self.transactional and (not self.is_async or self.options.isolate is not None):
            raise BadSetting(
                f"{self.name}: a Transaction belongs to the event loop of the worker: make the task "
                f"`async def`, without isolate="
            )

    @cached_property
    def _plain(self) -> Call[P, R_co]:
        return Call(self, Using())

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Put a job that calls this task; returns when the engine has acknowledged it."""
        return await self._plain.aenqueue(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """The same for synchronous code."""
        return self._plain.enqueue(*args, **kwargs)

    def using(
        self,
        *,
        delay: Duration | UnsetType = UNSET,
        at: datetime | UnsetType = UNSET,
        expires: Duration | datetime | UnsetType = UNSET,
        queue: str | UnsetType = UNSET,
        priority: int | UnsetType = UNSET,
        timeout: Duration | UnsetType = UNSET,
        result_ttl: Duration | UnsetType = UNSET,
        job_id: str | UnsetType = UNSET,
        unique: str | UnsetType = UNSET,
        unique_until: UniqueUntil | UnsetType = UNSET,
        key: str | UnsetType = UNSET,
        batch: str | UnsetType | None = UNSET,
        on_success: Strategy | UnsetType = UNSET,
        on_error: Strategy | UnsetType = UNSET,
        on_timeout: Strategy | UnsetType = UNSET,
        headers: dict[str, str] | UnsetType = UNSET,
        tx: Any = UNSET,
    ) -> Call[P, R_co]:
        """This task, called under other circumstances than declared.

        `batch` makes the job a member of an open batch; `job.emit(task.using(batch=job.batch), …)` adds one
        to the batch of the running job, also if that is sealed.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        return Call(self, Using(**given))

    def many(self, calls: Iterable[Any]) -> Many[R_co]:
        """One job per element: a tuple is the arguments, anything else is the one argument."""
        return self._plain.many(calls)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """The job that `enqueue` would put."""
        return self._plain.job(*args, **kwargs)

    @overload
    def step(self, *args: P.args, **kwargs: P.kwargs) -> Flow[Any, R_co]: ...
    @overload
    def step(self: Taking[X, Q, R], *args: Q.args, **kwargs: Q.kwargs) -> Flow[X, R]: ...
    def step(self, *args: Any, **kwargs: Any) -> Flow[Any, Any]:
        """This task as a step of a flow: `fetch.step(url) | parse.step()`.

        The first step of a flow has all its arguments; the others get the result of the step before them
        as the first one, and have only the others here.
        """
        return self._plain.step(*args, **kwargs)

    def make_job(self, args: tuple[Any, ...], kwargs: dict[str, Any], fields: dict[str, Any]) -> Job:
        encoded, named = self.signature.encode(args, kwargs, check=self.options.check_arguments)
        return self.job_with(encoded, named, fields)

    def job_with(self, args: Raw, kwargs: Raw, fields: dict[str, Any]) -> Job:
        options = self.options
        job = Job(
            id=fields["id"] if "id" in fields else new_id(),
            task=options.name,
            queue=options.queue,
            priority=options.priority,
            max_crashes=options.max_crashes,
            args=args,
            kwargs=kwargs,
        )
        return replace(job, **fields) if fields else job

    def handle(self, receipt: Receipt) -> Handle[R_co]:
        return Handle(self.producer, receipt.id, self._result_decoder, created=receipt.created)

    @cached_property
    def _result_decoder(self) -> msgspec.json.Decoder[Any]:
        return decoder_for(self.signature.result_kind)

    def upgrade(self, function: Upgrade) -> Upgrade:
        """Declare how arguments of older code become those of today.

        `function(args, kwargs)` gets the plain JSON values of a job that does not fit the signature, and
        returns new ones, or None if it cannot help.  So jobs put before a deployment run after it.
        """
        self._upgrades.append(function)
        return function

    def arguments(self, job: Job) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with for this job; `BrokenPayload` if nothing makes it fit."""
        try:
            return self.signature.decode(job.args, job.kwargs)
        except BrokenPayload:
            for upgrade in self._upgrades:
                newer = upgrade(wire.decode_args(job.args), wire.decode_args(job.kwargs))
                if newer is not None:
                    return self.signature.decode(Raw(encode_value(newer[0])), Raw(encode_value(newer[1])))
            raise

    def strategy_for(self, error: BaseException, policy: Policy) -> Strategy:
        """The rule for the nearest class of this error, or the task's strategy for errors."""
        rules = dict(self.options.error_rules)
        for kind in type(error).__mro__:
            if kind in rules:
                return rules[kind]
        return policy.on_error


class AsyncTask(Task[P, R_co]):
    """A task made of a coroutine function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R_co]:
        result: Coroutine[Any, Any, R_co] = super().__call__(*args, **kwargs)
        return result


class SyncTask(Task[P, R_co]):
    """A task made of a plain function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        result: R_co = super().__call__(*args, **kwargs)
        return result


def task_name(function: Callable[..., Any]) -> str:
    """module.function; for the script that is being run, the name under which others import it."""
    module = function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        if main.__spec__ is not None:
            module = main.__spec__.name.removesuffix(".__main__")
        elif getattr(main, "__file__", None):
            module = Path(str(main.__file__)).stem
    return f"{module}.{function.__qualname__}".replace(".<locals>", "")


def names_around(function: Callable[..., Any], frames_up: int) -> dict[str, Any] | None:
    """The local names where a function inside a function was declared: its annotations may use them."""
    if "<locals>" not in function.__qualname__:
        return None
    return dict(sys._getframe(frames_up + 1).f_locals)


def check_function(function: Callable[..., Any]) -> None:
    if inspect.isclass(function) or not hasattr(function, "__qualname__"):
        raise BadSetting(f"{function!r} cannot be a task: give a function or a coroutine function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadSetting(f"{function.__qualname__} is a generator: nobody would run it to its end")


def check_put_here(name: str, tx: Any) -> None:
    """Only `enqueue` puts a job in a transaction; wherever else it went, tx= would be forgotten."""
    if tx is not UNSET:
        raise BadSetting(
            f"{name}: tx= goes with enqueue() and aenqueue() only: a batch, a schedule, a callback and what "
            f"is emitted are put in a step of their own, whether or not that transaction commits"
        )


def check_strategies(options: Options) -> None:
    """What is not a strategy would be found out only when a job has failed."""
    policy = options.policy
    if not isinstance(policy.on_success, Delete | Archive):
        raise BadSetting(f"{options.name}: on_success={policy.on_success!r}: use delete or archive")
    rules = [("on_error", rule) for _, rule in options.error_rules]
    for name, strategy in [("on_error", policy.on_error), ("on_timeout", policy.on_timeout), *rules]:
        if not isinstance(strategy, Delete | Archive | Bury | Repeat):
            raise BadSetting(f"{options.name}: {name}={strategy!r}: use dead, delete, archive or repeat(…)")
        if isinstance(strategy, Repeat) and strategy.queue is not None:
            wire.check_queue(strategy.queue)
    for kind, _ in options.error_rules:
        if BaseException not in getattr(kind, "__mro__", ()):
            raise BadSetting(f"{options.name}: on_error has a rule for {kind!r}, which is no exception class")


def check_timeout(function: Callable[..., Any], options: Options) -> None:
    """A timeout must be a promise: a thread cannot be stopped from outside."""
    if options.isolate not in (None, "process"):
        raise BadSetting(
            f'{options.name}: isolate={options.isolate!r} is unknown: the only kind is "process"'
        )
    in_thread = options.isolate is None and not inspect.iscoroutinefunction(function)
    if options.timeout_ms is not None and in_thread and not options.abandon:
        raise BadSetting(
            f"{options.name}: a plain function runs in a thread, which nothing can stop at its timeout: make "
            f'it `async def`, or say isolate="process" to have it killed, or abandon=True to let it run on'
        )

"""Tasks: functions that can be called later, with the options of a task and of one call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import msgspec
from msgspec import UNSET, Raw, Struct
from msgspec.structs import replace

from propolis.app.client.client import Client
from propolis.app.client.handle import Handle
from propolis.app.client.puts import bundles
from propolis.app.flow.steps import Flow, Single
from propolis.app.made_names import MadeNames
from propolis.app.operate.breakers import Breaker
from propolis.app.operate.declared_limits import Limit
from propolis.app.signature import Signature, decoder_for, encode_value
from propolis.app.transaction import Transaction
from propolis.core import wire
from propolis.core.duration import Duration, duration, milliseconds
from propolis.core.envelope import MAX_CRASHES, Envelope, UniqueUntil, check_options
from propolis.core.ids import new_id
from propolis.core.policy import Policy, bounded, retried
from propolis.core.protocols import Receipt
from propolis.core.strategy import Archive, Bury, Delete, Repeat, Strategy
from propolis.errors import BadCall, BadSetting, BrokenPayload, DuplicateJob

P = ParamSpec("P")
Q = ParamSpec("Q")
X = TypeVar("X")
X_contra = TypeVar("X_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Upgrade = Callable[[list[Any], dict[str, Any]], tuple[list[Any], dict[str, Any]] | None]
ErrorRules = Mapping[type[BaseException], Strategy]

DEFAULTS = Policy()


class CommandOptions(TypedDict, total=False):
    """How the jobs of a task are run, whether a function or a program does the work."""

    queue: str
    priority: int
    timeout: Duration | None
    max_timeout: Duration | None
    retries: int
    on_success: Strategy
    on_error: Strategy | ErrorRules
    on_timeout: Strategy
    result_ttl: Duration | None
    max_crashes: int
    key: str
    unique: tuple[str, ...]
    unique_until: UniqueUntil
    limit: Limit
    breaker: Breaker


class TaskOptions(CommandOptions, total=False):
    """What `@app.task(…)` takes."""

    name: str | None
    isolate: Literal["process"] | None
    abandon: bool
    memory_limit: int | None
    env: Mapping[str, str]


class Options(Struct, frozen=True, kw_only=True):
    """How a task is run, as declared."""

    name: str
    queue: str = "default"
    priority: int = 0
    timeout_ms: int | None = None
    max_timeout_ms: int | None = None  # of any job, whatever it asks for itself
    result_ttl_ms: int | None = None
    max_crashes: int = MAX_CRASHES
    policy: Policy = DEFAULTS
    error_rules: tuple[tuple[type[BaseException], Strategy], ...] = ()
    isolate: str | None = None
    abandon: bool = False
    memory_limit: int | None = None
    env: Mapping[str, str] = {}  # what its jobs have in a child process, besides PATH and the like
    key: str | None = None  # a template, whose names are parameters
    unique: tuple[str, ...] | None = None  # parameters
    unique_until: UniqueUntil = UniqueUntil.ENDED
    limit: Limit | None = None
    breaker: Breaker | None = None
    check_arguments: bool = True


_OPTIONS_AS_THEY_ARE = TaskOptions.__optional_keys__ & frozenset(Options.__struct_fields__) - {"name"}


def declared_options(given: TaskOptions, *, check_arguments: bool) -> Options:
    """The options of a task whose name may not be known yet."""
    check_options("task()", TaskOptions, given)
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in _OPTIONS_AS_THEY_ARE}
    timeout, result_ttl = given.get("timeout"), given.get("result_ttl")
    max_timeout = given.get("max_timeout", timeout)
    for name, kind in (("limit", Limit), ("breaker", Breaker)):
        if not isinstance(given.get(name), kind | None):
            raise BadSetting(f"{name}={given.get(name)!r}: write {name}(…), from propolis.strategies")
    on_error = _on_error(given)
    general, rules = (DEFAULTS.on_error, on_error) if isinstance(on_error, Mapping) else (on_error, {})
    return Options(
        name=given.get("name") or "",
        timeout_ms=None if timeout is None else milliseconds(timeout),
        max_timeout_ms=None if max_timeout is None else milliseconds(max_timeout),
        result_ttl_ms=None if result_ttl is None else milliseconds(result_ttl),
        policy=Policy(
            on_success=given.get("on_success", DEFAULTS.on_success),
            on_error=general,
            on_timeout=given.get("on_timeout", DEFAULTS.on_timeout),
        ),
        error_rules=tuple(rules.items()),
        check_arguments=check_arguments,
        **fields,
    )


def _on_error(given: TaskOptions) -> Strategy | ErrorRules:
    if "retries" not in given:
        return given.get("on_error", DEFAULTS.on_error)
    if "on_error" in given:
        raise BadSetting(
            "retries= and on_error= both decide what follows an error: give one of them, for example "
            'on_error=repeat(5, exponential("2s")).then(archive)'
        )
    return retried(given["retries"])


class CallOptions(TypedDict, total=False):
    """What one call may have otherwise than its task declares: `task.using(…)`."""

    delay: Duration
    at: datetime
    expires: Duration | datetime
    queue: str
    priority: int
    timeout: Duration
    result_ttl: Duration
    job_id: str
    unique: str | tuple[str, ...] | None
    unique_until: UniqueUntil
    on_conflict: Literal["keep", "refuse"]
    key: str | None
    batch: str | None
    on_success: Strategy
    on_error: Strategy
    on_timeout: Strategy
    headers: dict[str, str]
    wait: Duration
    tx: Any


_AS_THEY_ARE = CallOptions.__optional_keys__ & frozenset(Envelope.__struct_fields__)


_SPECIAL = frozenset({"key", "unique", "tx", "wait", "on_conflict"})  # what a call has to do more for


def call_fields(options: CallOptions) -> dict[str, Any]:
    """The options of a call as fields of its envelope."""
    check_options("using()", CallOptions, options)
    if "delay" in options and "at" in options:
        raise BadSetting("give a delay or a time, not both")
    fields: dict[str, Any] = {name: value for name, value in options.items() if name in _AS_THEY_ARE}
    if "delay" in options:
        fields["delay_ms"] = milliseconds(options["delay"])
    if "at" in options:
        fields["due_at"] = options["at"]
    if "expires" in options:
        expires = options["expires"]
        if isinstance(expires, datetime):
            fields["expires_at"] = expires
        else:
            fields["expires_in_ms"] = milliseconds(expires)
    if "timeout" in options:
        fields["timeout_ms"] = milliseconds(options["timeout"])
    if "result_ttl" in options:
        fields["result_ttl_ms"] = milliseconds(options["result_ttl"])
    if "job_id" in options:
        fields |= {"id": options["job_id"], "chosen": True}
    if "unique" in options and isinstance(options["unique"], tuple):
        del fields["unique"]  # it is made for each call
    return fields


class Taking(Protocol[X_contra, Q, R_co]):
    """What takes an X first.  For the type of steps: mypy finds no X in a `Task[Concatenate[X, Q], R]`."""

    def enqueue(self, first: X_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> Handle[R_co]: ...


class Call(Generic[P, R_co]):
    """A task with the circumstances of a call: `task.using(delay="5m")`."""

    def __init__(self, task: Task[P, R_co], options: CallOptions) -> None:
        self._task = task
        self._options = options
        self._fields = call_fields(options)
        self._names = task.made_names
        self._tx: Any = UNSET
        self._wait: float | None = None
        self._put_only = self._refuses = False
        if not _SPECIAL.isdisjoint(options):
            self._names = task.names_under(options)
            self._tx = options.get("tx", UNSET)
            self._wait = seconds_to_wait(task.name, options)
            self._refuses = refuses_conflicts(task.name, options)
            self._put_only = self._tx is not UNSET or self._wait is not None or self._refuses
        if task.unique_fields:
            self._fields = task.unique_fields | self._fields
        check_within(task.options, options)
        if "timeout" in options:
            check_timeout(task.function, replace(task.options, timeout_ms=self._fields["timeout_ms"]))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Envelope:
        """The job that `enqueue` would put.  With tx= it is refused: a job does not know of transactions."""
        if self._put_only:
            check_put_here(self._task.name, self._tx, self._wait)
            check_alone(self._task.name, self._refuses)
        return self._task.make_job(args, kwargs, self._fields, self._names)

    @overload
    def step(self, *args: P.args, **kwargs: P.kwargs) -> Flow[Any, R_co]: ...
    @overload
    def step(self: Taking[X, Q, R], *args: Q.args, **kwargs: Q.kwargs) -> Flow[X, R]: ...
    def step(self, *args: Any, **kwargs: Any) -> Flow[Any, Any]:
        """This task as a step of a flow.

        The first step of a flow has all its arguments; the others get the result of the step before them
        as the first one, and have only the others here.
        """
        for name in ("job_id", "batch", "tx", "wait", "on_conflict"):
            if name in self._options:
                raise BadSetting(f"{name}= is of no use to a step: its flow decides on that")
        return Flow((Single(self, args, kwargs),))

    # --- as the maker of a step --------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def client(self) -> Client:
        return self._task.client

    @property
    def result_kind(self) -> Any:
        return self._task.signature.result_kind

    def first_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Envelope:
        return self._task.make_job(args, kwargs, self._fields, self._names)

    def later_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Envelope:
        signature = self._task.signature
        encoded, named = signature.encode_later(args, kwargs, check=self._task.options.check_arguments)
        job = self._task.job_with(encoded, named, self._fields)
        return job if self._names is None else self._names.later(job)

    def check_fits(self, job: Envelope) -> None:
        if self._task.options.check_arguments:
            try:
                self._task.arguments(job)
            except BrokenPayload as error:
                raise TypeError(f"{self._task.name}: {error}") from error

    def many(self, calls: Iterable[Any]) -> Many[R_co]:
        """One job per element, all under these circumstances."""
        check_alone(self._task.name, self._refuses)
        return Many(self, calls)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        job = self._task.make_job(args, kwargs, self._fields, self._names)
        if self._refuses:
            check_unique(self._task.name, job)
        if self._tx is UNSET:
            receipt = await self._task.client.aput(job, wait=self._wait)
        else:
            [receipt] = await self._task.client.aput_in(self._tx, [job])
        return self._handle(job, receipt)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        job = self._task.make_job(args, kwargs, self._fields, self._names)
        if self._refuses:
            check_unique(self._task.name, job)
        client = self._task.client
        if self._tx is UNSET:
            receipt = client.wait(client.aput(job, wait=self._wait))
        else:
            [receipt] = client.put_in(self._tx, [job])
        return self._handle(job, receipt)

    def _handle(self, job: Envelope, receipt: Receipt) -> Handle[R_co]:
        """The id of another job says that there is one; its own, that this put was repeated."""
        if self._refuses and receipt.id != job.id:
            raise DuplicateJob(self._task.name, job.unique, receipt.id)
        return self._task.handle(receipt)


class Many(Generic[R_co]):
    """Many calls of one task, made one after another as they are needed."""

    def __init__(self, call: Call[..., R_co], calls: Iterable[Any]) -> None:
        self._task = call._task
        self._calls = calls
        self._fields = call._fields
        self._names = call._names
        self._tx = call._tx
        self._wait = call._wait

    def __iter__(self) -> Iterator[Envelope]:
        check_put_here(self._task.name, self._tx, self._wait)
        return self._jobs()

    def _jobs(self) -> Iterator[Envelope]:
        for call in self._calls:
            args = call if isinstance(call, tuple) else (call,)
            yield self._task.make_job(args, {}, self._fields, self._names)

    async def aenqueue(self) -> list[Handle[R_co]]:
        """Put them in bundles; each bundle wholly or not at all, and with tx= all of them so.

        What is wrong with one of them is found before any is put, unless an iterator makes them as they are
        needed.
        """
        if self._tx is not UNSET:
            return [handle async for handle in self.astream()]
        receipts = await self._task.client.aput_many(self._made(), wait=self._wait)
        return [self._task.handle(receipt) for receipt in receipts]

    def enqueue(self) -> list[Handle[R_co]]:
        """The same for synchronous code."""
        if self._tx is not UNSET or not self._all_there:  # an iterator may belong to this thread
            return list(self.stream())
        client = self._task.client
        receipts = client.wait(client.aput_many(self._made(), wait=self._wait))
        return [self._task.handle(receipt) for receipt in receipts]

    async def astream(self) -> AsyncIterator[Handle[R_co]]:
        """The same, handle by handle: of what an iterator makes, only one bundle is in memory at a time.

        They are put as far as somebody asks for their handles, and to the end of that bundle.
        """
        client = self._task.client
        for bundle in bundles(self._made()):
            if self._tx is UNSET:
                receipts = await client.aput_many(bundle, wait=self._wait)
            else:
                receipts = await client.aput_in(self._tx, bundle)
            for receipt in receipts:
                yield self._task.handle(receipt)

    def stream(self) -> Iterator[Handle[R_co]]:
        """The same for synchronous code."""
        client = self._task.client
        for bundle in bundles(self._made()):
            if self._tx is UNSET:
                receipts = client.wait(client.aput_many(bundle, wait=self._wait))
            else:
                receipts = client.put_in(self._tx, bundle)
            yield from map(self._task.handle, receipts)

    @property
    def _all_there(self) -> bool:
        return isinstance(self._calls, Collection)

    def _made(self) -> Iterator[Envelope]:
        """As they are asked for.  Where all calls are there, all arguments are checked now."""
        if not self._all_there:
            return self._jobs()
        encode, check = self._task.signature.encode, self._task.options.check_arguments
        encoded = [
            encode(call if isinstance(call, tuple) else (call,), {}, check=check) for call in self._calls
        ]
        return (self._task.job_with(args, kwargs, self._fields, self._names) for args, kwargs in encoded)


class Task(Generic[P, R_co]):
    """A function that stays callable and can also be enqueued."""

    __name__: str

    def __init__(
        self,
        function: Callable[P, Any],
        options: Options,
        client: Client,
        names: Mapping[str, Any] | None = None,
    ) -> None:
        check_function(function)
        check_strategies(options)
        wire.check(
            Envelope(
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
        self.client = client
        self.signature = Signature(function, names)
        self.made_names = self._declared_names()
        is_usual = options.unique_until is UniqueUntil.ENDED
        self.unique_fields: dict[str, Any] = {} if is_usual else {"unique_until": options.unique_until}
        self._upgrades: list[Upgrade] = []
        self.is_async = is_async(function)
        functools.update_wrapper(self, function)

    def _declared_names(self) -> MadeNames | None:
        key, unique = self.options.key, self.options.unique
        if key is None and unique is None:
            return None
        return MadeNames(self.name, self.signature, key=key, unique=unique)

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def declared_limit(self) -> Limit | None:
        return self.options.limit

    @property
    def makes_keys(self) -> bool:
        return self.options.key is not None

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
        return self.asks_for(Transaction)

    def asks_for(self, kind: type) -> bool:
        """Does it, or a dependency of it, want this from the worker?"""
        return self.signature.asks_for(kind)

    def check(self) -> None:
        """`BadSetting` for what cannot work, now that every annotation can be resolved."""
        self.signature.check()
        if self.made_names is not None:
            self.made_names.check()
        if self.transactional and (not self.is_async or self.options.isolate is not None):
            raise BadSetting(
                f"{self.name}: a Transaction belongs to the event loop of the worker: make the task "
                f"`async def`, without isolate="
            )

    @cached_property
    def _plain(self) -> Call[P, R_co]:
        return Call(self, CallOptions())

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Put a job that calls this task; returns when the engine has acknowledged it."""
        return await self._plain.aenqueue(*args, **kwargs)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """The same for synchronous code."""
        return self._plain.enqueue(*args, **kwargs)

    def using(self, **options: Unpack[CallOptions]) -> Call[P, R_co]:
        """This task, called under other circumstances than declared.

        `key` and `unique` win over what the task makes of its arguments; None is for none.

        `batch` makes the job a member of an open batch; `job.emit(task.using(batch=job.batch), …)` adds one
        to the batch of the running job, also if that is sealed.
        """
        return Call(self, options)

    def many(self, calls: Iterable[Any]) -> Many[R_co]:
        """One job per element: a tuple is the arguments, anything else is the one argument."""
        return self._plain.many(calls)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Envelope:
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

    def names_under(self, options: CallOptions) -> MadeNames | None:
        """What is made of the arguments of a call that may say otherwise."""
        if "key" not in options and "unique" not in options:
            return self.made_names
        key = None if "key" in options else self.options.key
        unique = options.get("unique", self.options.unique)
        if isinstance(unique, str):
            unique = None
        if key is None and unique is None:
            return None
        return MadeNames(self.name, self.signature, key=key, unique=unique)

    def make_job(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fields: dict[str, Any],
        names: MadeNames | None = None,
    ) -> Envelope:
        encoded, named = self.signature.encode(args, kwargs, check=self.options.check_arguments)
        return self.job_with(encoded, named, fields, names)

    def job_with(
        self, args: Raw, kwargs: Raw, fields: dict[str, Any], names: MadeNames | None = None
    ) -> Envelope:
        options = self.options
        if names is not None:
            fields = fields | names.fields(args, kwargs)
        job = Envelope(
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
        return Handle(self.client, receipt.id, self._result_decoder, created=receipt.created)

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

    def arguments(self, job: Envelope) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with for this job; `BrokenPayload` if nothing makes it fit."""
        try:
            return self.signature.decode(job.args, job.kwargs)
        except BrokenPayload:
            for upgrade in self._upgrades:
                newer = upgrade(wire.decode_args(job.args), wire.decode_args(job.kwargs))
                if newer is not None:
                    return self.signature.decode(Raw(encode_value(newer[0])), Raw(encode_value(newer[1])))
            raise

    def timeout_ms(self, job: Envelope) -> int | None:
        """The job's own, or that of its task; in any case no more than the task lets a job have."""
        own, most = job.timeout_ms or self.options.timeout_ms, self.options.max_timeout_ms
        if own is None or most is None:
            return own or most
        return min(own, most)

    def policy_for(self, job: Envelope) -> Policy:
        if job.on_error is None and job.on_timeout is None and job.on_success is None:  # asked for every job
            return self.options.policy
        return self.options.policy.overridden(job, [rule for _, rule in self.options.error_rules])

    def rule_for(self, kind: type[BaseException]) -> type[BaseException] | None:
        """The nearest class of this one for which there is a rule."""
        kinds = {ruled for ruled, _ in self.options.error_rules}
        return next((each for each in kind.__mro__ if each in kinds), None)


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


def is_async(function: Callable[..., Any]) -> bool:
    """Also of an object whose call is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  # its class, not whether it can be called
    )


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
    if "<locals>" not in getattr(function, "__qualname__", ""):
        return None
    return dict(sys._getframe(frames_up + 1).f_locals)


def check_function(function: Callable[..., Any]) -> None:
    if inspect.isclass(function) or not hasattr(function, "__qualname__"):
        raise BadSetting(f"{function!r} cannot be a task: give a function or a coroutine function")
    if isinstance(function, functools.partial):
        raise BadSetting(f"{function!r} cannot be a task: a function that calls it can")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise BadSetting(f"{function.__qualname__} is a generator: nobody would run it to its end")


def check_put_here(name: str, tx: Any, wait: float | None) -> None:
    """Only `enqueue` puts a job in a transaction, or waits for room; wherever else it went, that is lost."""
    if tx is not UNSET or wait is not None:
        option = "wait" if tx is UNSET else "tx"
        why = "where nobody waits" if tx is UNSET else "whether or not that transaction commits"
        raise BadSetting(
            f"{name}: {option}= goes with enqueue() and aenqueue() only: a batch, a schedule, a callback and "
            f"what is emitted are put in a step of their own, {why}"
        )


def check_alone(name: str, refuses: bool) -> None:
    """Of many jobs that are put together some may be there already, and the others are put."""
    if refuses:
        raise BadSetting(
            f'{name}: on_conflict="refuse" goes with enqueue() and aenqueue() of one job: among many, look '
            f"at `created` of their handles"
        )


def check_unique(name: str, job: Envelope) -> None:
    if job.unique is None:
        raise BadSetting(
            f'{name}: on_conflict="refuse" of what?  Give unique= as well, here or with the task'
        )


def refuses_conflicts(name: str, options: CallOptions) -> bool:
    on_conflict = options.get("on_conflict", "keep")
    if on_conflict not in ("keep", "refuse"):
        raise BadSetting(f'{name}: on_conflict={on_conflict!r} is unknown: write "keep" or "refuse"')
    return on_conflict == "refuse"


def seconds_to_wait(name: str, options: CallOptions) -> float | None:
    """How long a call may wait where its queue is full."""
    if "wait" not in options:
        return None
    if "tx" in options:
        raise BadCall(
            f"{name}: who waits for room in a transaction keeps it open, and others with it: leave wait= "
            f"out, and try the whole transaction again where it raises QueueFull"
        )
    return duration(options["wait"]).total_seconds()


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


def check_within(options: Options, asked: CallOptions) -> None:
    """A job may ask for less than its task lets it have, and not for more."""
    timeout, most = asked.get("timeout"), options.max_timeout_ms
    if timeout is not None and most is not None and milliseconds(timeout) > most:
        raise BadSetting(
            f"{options.name}: timeout={timeout!r} is more than the {most / 1000:g} s that its jobs may have: "
            f"declare the task with max_timeout="
        )
    rules = [strategy for _, strategy in options.error_rules]
    policy = options.policy
    for name, declared in (("on_error", [policy.on_error, *rules]), ("on_timeout", [policy.on_timeout])):
        strategy = asked.get(name)
        if isinstance(strategy, Repeat) and bounded(strategy, declared) != strategy:
            raise BadSetting(
                f"{options.name}: {name}={strategy!r} repeats more often than the task is declared to: "
                f"declare {name}= for the task with as many repetitions as a job may ask for"
            )


def check_timeout(function: Callable[..., Any], options: Options) -> None:
    """A timeout must be a promise: a thread cannot be stopped from outside."""
    if options.isolate not in (None, "process"):
        raise BadSetting(
            f'{options.name}: isolate={options.isolate!r} is unknown: the only kind is "process"'
        )
    timeout_ms, most = options.timeout_ms, options.max_timeout_ms
    if timeout_ms is not None and most is not None and timeout_ms > most:
        raise BadSetting(f"{options.name}: its timeout is more than its max_timeout")
    in_thread = options.isolate is None and not is_async(function)
    if (timeout_ms or most) is not None and in_thread and not options.abandon:
        raise BadSetting(
            f"{options.name}: a plain function runs in a thread, which nothing can stop at its timeout: make "
            f'it `async def`, or say isolate="process" to have it killed, or abandon=True to let it run on'
        )

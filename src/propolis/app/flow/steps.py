"""Flows as users write them: `fetch.step(url) | parse.step() | each(score.step()) | total.step()`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from msgspec import Struct
from msgspec.structs import replace

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.client.puts import retry_until_answered
from propolis.app.flow import shape
from propolis.app.flow.continuation import TEMPLATE, Continuation, Fan, Gather, following, with_continuation
from propolis.app.flow.run import FlowRun, batch_ids
from propolis.app.made_names import KEY_HEADER
from propolis.app.signature import encode_value
from propolis.core import wire
from propolis.core.batch import Batch, callback_id
from propolis.core.duration import Duration, milliseconds
from propolis.core.envelope import Envelope
from propolis.core.ids import derive_id, new_id
from propolis.core.protocols import Batches
from propolis.errors import BadCall, BadSetting, FlowBroken

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
X = TypeVar("X")
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Begin:
    """The type of what a complete flow needs before it: nothing."""


class Maker(Protocol):
    """A task, or one with its circumstances."""

    @property
    def name(self) -> str: ...

    @property
    def client(self) -> Client: ...

    @property
    def result_kind(self) -> Any: ...

    def first_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Envelope:
        """With all its arguments; `TypeError` if they do not fit."""
        ...

    def later_job(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Envelope:
        """With all but the first one, which the step before will give."""
        ...

    def check_fits(self, job: Envelope) -> None:
        """`TypeError` if the task cannot be called with the arguments of this job."""
        ...


class Single(Struct, frozen=True):
    """One task with the arguments that are known now."""

    maker: Maker
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def later(self) -> Envelope:
        return replace(self.maker.later_job(self.args, self.kwargs), id=TEMPLATE)


class Side(Struct, frozen=True):
    """Chains side by side."""

    chains: tuple[tuple[Single, ...], ...]
    each: bool
    partial: bool

    def fan(self) -> Fan:
        return Fan(tuple(tuple(one.later() for one in chain) for chain in self.chains), self.each)

    def lengths(self) -> tuple[int, ...]:
        return tuple(len(chain) for chain in self.chains)


class Given(Struct, frozen=True):
    """A value that is there already."""

    value: Any


Stage = Single | Side | Given


class Flow(Generic[In_contra, Out_co]):
    """Steps one after another; each gets the result of the one before as its first argument.

    `|` puts two together.  One that begins with all its arguments, or with `start(…)`, is complete and can be
    enqueued, any number of times.  Nothing happens before that.
    """

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self._stages = stages

    def __or__(self, other: Flow[Out_co, X]) -> Flow[In_contra, X]:
        _check_is_flow(other, "|")
        if isinstance(self._stages[-1], Side) and isinstance(other._stages[0], Side):
            raise BadSetting(_nothing_before(other._stages[0]))
        return Flow((*self._stages, *_as_later(other._stages)))

    def __repr__(self) -> str:
        return f"<Flow {shape.as_line(self._parts()).removeprefix(shape.PREFIX)}>"

    def draw(self) -> str:
        """As a tree of text."""
        return shape.tree(self._parts())

    def mermaid(self) -> str:
        """As a Mermaid flowchart."""
        return shape.mermaid(self._parts())

    async def aenqueue(
        self: Flow[Begin, Out_co], *, keep_for: Duration = "7d", flow_id: str | None = None
    ) -> FlowRun[Out_co]:
        """Start it; returns when the engine has acknowledged that.

        It is remembered for `keep_for` after its end.  With a `flow_id`, a second start does nothing.
        """
        compiled = compiled_flow(
            self._stages, new_id() if flow_id is None else flow_id, milliseconds(keep_for)
        )
        await _put(self._client, compiled)
        return FlowRun(self._client, compiled.batches[0].id, self._result_kind())

    enqueue = blocking(aenqueue)

    def _parts(self) -> list[shape.Part]:
        return [_part(stage) for stage in self._stages]

    @property
    def _client(self) -> Client:
        for stage in self._stages:
            match stage:
                case Single(maker=maker):
                    return maker.client
                case Side(chains=chains):
                    return chains[0][0].maker.client
        raise BadSetting("a flow needs at least one step")

    def _result_kind(self) -> Any:
        match self._stages[-1]:
            case Single(maker=maker):
                return maker.result_kind
            case Side(chains=chains, each=each, partial=partial):
                kinds = [chain[-1].maker.result_kind for chain in chains]
                kinds = [kind | None for kind in kinds] if partial else kinds
                return list[kinds[0]] if each else tuple[tuple(kinds)]  # type: ignore[valid-type, misc]  # at run time
        raise BadSetting("a flow needs at least one step")


def start(value: X) -> Flow[Any, X]:
    """A flow that begins with a value: `start(paths) | each(resize.step()) | report.step()`."""
    return Flow((Given(value),))


@overload
def each(inner: Flow[A, B], *, partial: Literal[False] = False) -> Flow[Iterable[A], list[B]]: ...
@overload
def each(inner: Flow[A, B], *, partial: Literal[True]) -> Flow[Iterable[A], list[B | None]]: ...
def each(inner: Flow[Any, Any], *, partial: bool = False) -> Flow[Any, Any]:
    """A step, or a chain of them, once for every element of the list before it; side by side.

    The next step gets the list of their results, in the order of the elements.  If one of them dies the flow
    ends as dead when all have ended, or, if a part is enough, goes on with None in its place.
    """
    chain = _chain_of(inner, "each(…)")
    for one in chain:
        if one.later().unique is not None:
            raise BadSetting(
                f"{one.maker.name}: unique= inside of each(…) would be one key for all the elements, and "
                f"all of them but one would be left out"
            )
    return Flow((Side((chain,), each=True, partial=partial),))


@overload
def fork(one: Flow[X, A], two: Flow[X, B], /, *, partial: Literal[False] = False) -> Flow[X, tuple[A, B]]: ...
@overload
def fork(
    one: Flow[X, A], two: Flow[X, B], three: Flow[X, C], /, *, partial: Literal[False] = False
) -> Flow[X, tuple[A, B, C]]: ...
@overload
def fork(
    one: Flow[X, A],
    two: Flow[X, B],
    three: Flow[X, C],
    four: Flow[X, D],
    /,
    *,
    partial: Literal[False] = False,
) -> Flow[X, tuple[A, B, C, D]]: ...
@overload
def fork(
    one: Flow[X, A], two: Flow[X, B], /, *, partial: Literal[True]
) -> Flow[X, tuple[A | None, B | None]]: ...
@overload
def fork(
    one: Flow[X, A], two: Flow[X, B], three: Flow[X, C], /, *, partial: Literal[True]
) -> Flow[X, tuple[A | None, B | None, C | None]]: ...
@overload
def fork(*branches: Flow[X, Any], partial: bool = False) -> Flow[X, tuple[Any, ...]]: ...
def fork(*branches: Flow[Any, Any], partial: bool = False) -> Flow[Any, Any]:
    """Branches: all of these get the result before them, side by side; the next step gets all of theirs."""
    if not branches:
        raise BadSetting("fork() without branches leads nowhere")
    chains = tuple(_chain_of(branch, "fork(…)") for branch in branches)
    return Flow((Side(chains, each=False, partial=partial),))


# --- compiling ---------------------------------------------------------------------------


class Compiled(Struct, frozen=True):
    """The batches of a flow, the outermost (the flow itself) first, and the jobs it starts with."""

    batches: list[Batch]
    jobs: list[Envelope]


class StepSegment(Struct, frozen=True):
    """A chain, and the fan-out behind it: the jobs of one batch."""

    chain: list[Single]
    side: Side | None = None

    def templates(self, start: int) -> tuple[Envelope, ...]:
        return tuple(one.later() for one in self.chain[start:])

    def fan(self) -> Fan | None:
        return None if self.side is None else self.side.fan()


def compiled_flow(stages: tuple[Stage, ...], flow: str, keep_for_ms: int) -> Compiled:
    """One batch per fan-out, each nested in the next, and the flow itself around them all.

    The callback of a batch is the first step after its fan-out, a member of the batch around it.  That cannot
    end before: until then, the inner batch is a live member of it.
    """
    given, segments = _segments(stages)
    ids = batch_ids(flow, len(segments))
    batches = []
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        collector = None if last else _collector(flow, segments, index, ids)
        batches.append(
            Batch(
                id=ids[index],
                on_finished=collector,
                keep_for_ms=keep_for_ms,
                parent=None if last else ids[index + 1],
                note=shape.as_line([_part(stage) for stage in stages]) if last else f"part of flow {flow}",
            )
        )
        for job in segment.templates(1 if index == 0 and given is None else 0):
            wire.encode(job)
    jobs = _first_jobs(flow, given, segments[0], ids[0])
    for job in jobs:
        wire.encode(job)
    return Compiled(batches[::-1], jobs)


def _segments(stages: tuple[Stage, ...]) -> tuple[Given | None, list[StepSegment]]:
    given = stages[0] if isinstance(stages[0], Given) else None
    segments: list[StepSegment] = []
    chain: list[Single] = []
    for stage in stages if given is None else stages[1:]:
        match stage:
            case Given():
                raise BadSetting("start(…) is the beginning of a flow: nothing can stand before it")
            case Single():
                chain.append(stage)
            case Side():
                if not chain and (segments or given is None):
                    raise BadSetting(_nothing_before(stage))
                segments.append(StepSegment(chain, stage))
                chain = []
    if not segments and not chain:
        raise BadSetting("a flow needs at least one step")
    return given, [*segments, StepSegment(chain)]


def _collector(flow: str, segments: list[StepSegment], index: int, ids: list[str]) -> Envelope | None:
    """The first step after a fan-out; None if the flow ends there."""
    before, after = segments[index], segments[index + 1]
    if not after.chain:
        return None
    if KEY_HEADER in after.chain[0].later().headers:
        name = after.chain[0].maker.name
        raise BadSetting(
            f"{name}: its key is made of its first argument, which is the list of all results before it: say "
            f"{name}.using(key=…).step(), with a key that is known now, or key=None"
        )
    assert before.side is not None
    gather = Gather(
        batch=ids[index],
        base=len(before.chain) + 1,
        lengths=before.side.lengths(),
        each=before.side.each,
        partial=before.side.partial,
    )
    job = replace(
        after.chain[0].later(),
        id=callback_id(ids[index], "next"),
        chosen=True,
        batch=ids[index + 1],
        member=1,
    )
    job = with_continuation(job, Continuation(flow, after.templates(1), after.fan(), gather))
    wire.encode(job)
    return job


def _first_jobs(flow: str, given: Given | None, segment: StepSegment, batch: str) -> list[Envelope]:
    if given is not None:
        before = Envelope(id=flow, task=shape.GIVEN, batch=batch)
        continuation = Continuation(flow, segment.templates(0), segment.fan())
        try:
            jobs = tuple(following(continuation, before, encode_value(given.value)))
        except FlowBroken as error:
            where = f"start({given.value!r:.100})"
            if isinstance(error.__cause__, BadSetting):
                raise BadSetting(f"{where} cannot be followed by this: {error}") from error
            raise TypeError(f"{where} | each(…) needs a list to begin with") from error
        for maker, job in zip(_makers(segment, len(jobs)), jobs, strict=True):
            maker.check_fits(job)
        return list(jobs)
    first = segment.chain[0]
    job = replace(
        first.maker.first_job(first.args, first.kwargs),
        id=derive_id("flow", flow, "first"),
        chosen=True,
        batch=batch,
        member=1,
    )
    return [with_continuation(job, Continuation(flow, segment.templates(1), segment.fan()))]


def _makers(segment: StepSegment, jobs: int) -> list[Maker]:
    """Those of the first jobs behind a given value."""
    if segment.chain:
        return [segment.chain[0].maker]
    assert segment.side is not None
    firsts = [chain[0].maker for chain in segment.side.chains]
    return firsts * jobs if segment.side.each else firsts


async def _put(client: Client, compiled: Compiled) -> None:
    """From the outside in; nothing runs before the last call, which puts the first jobs.

    Whoever dies on the way leaves open batches without jobs, which are forgotten.
    """
    engine = await client.piece(Batches)
    batches, jobs = [client.stamped_batch(batch) for batch in compiled.batches], client.stamped(compiled.jobs)
    inner = batches[-1]
    for batch in batches if inner.parent is not None else ():
        await retry_until_answered(partial(engine.put_batch, batch, seal=False))
        if batch.parent is not None:  # which has a member now, this one, that keeps it from ending
            await retry_until_answered(partial(engine.seal, batch.parent))
    await retry_until_answered(partial(engine.put_batch, inner, jobs))


def _nothing_before(side: Side) -> str:
    return (
        f"before {_part(side)} there must be a step that gives it something: two fan-outs in a row are one, "
        f"as each(a.step() | b.step()), or need a step between them"
    )


def _check_is_flow(given: object, where: str) -> None:
    if not isinstance(given, Flow):
        raise BadCall(f"{where} takes steps, and {given!r} is none: write task.step()")


def _as_later(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Check now what would be found out when the flow is enqueued."""
    for stage in stages:
        match stage:
            case Given():
                raise BadSetting("start(…) is the beginning of a flow: nothing can stand before it")
            case Single():
                stage.later()
    return stages


def _chain_of(inner: Flow[Any, Any], where: str) -> tuple[Single, ...]:
    _check_is_flow(inner, where)
    chain = []
    for stage in _as_later(inner._stages):
        if not isinstance(stage, Single):
            raise BadSetting(
                "there is no fan-out inside of a fan-out: let the inner step be a task that enqueues a flow "
                "of its own, or that does more at once"
            )
        chain.append(stage)
    return tuple(chain)


def _part(stage: Stage) -> shape.Part:
    match stage:
        case Single(maker=maker):
            return shape.One(maker.name)
        case Side(chains=chains, each=each, partial=partial):
            names = tuple(tuple(one.maker.name for one in chain) for chain in chains)
            return shape.Fanned(names, each, partial)
        case Given():
            return shape.One(shape.GIVEN)

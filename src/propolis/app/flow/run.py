"""A flow that was started: how far it is, what came out of it, and how to stop it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.client.waiting import wait_until_ended
from propolis.app.flow import shape
from propolis.app.flow.continuation import Gather, gathered
from propolis.app.operate.batches import StoredBatches
from propolis.app.signature import decoder_for
from propolis.core.batch import BatchState, BatchStatus
from propolis.core.duration import Duration
from propolis.core.ids import derive_id
from propolis.core.job import Member, State
from propolis.core.protocols import Batches
from propolis.errors import FlowFailed, UnknownFlow

Out_co = TypeVar("Out_co", covariant=True)


class FlowState(StrEnum):
    """Partial success: it came to its end, and some that it could do without are dead on the way."""

    IN_PROGRESS = "in-progress"
    SUCCESS = "success"
    PARTIAL_SUCCESS = "partial-success"
    DEAD = "dead"
    CANCELLED = "cancelled"


class StepStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a flow, or the jobs of a fan-out.  One that is not there yet has a total of 0.

    What has ended long before the rest of its flow may be forgotten before it.
    """

    name: str
    total: int = 0
    waiting: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0
    fan: bool = False
    forgotten: bool = False

    @property
    def failed(self) -> int:
        return self.dead + self.cancelled

    def __str__(self) -> str:
        if not self.total:
            return "forgotten" if self.forgotten else "not yet"
        counts = {
            "waiting": self.waiting,
            "running": self.running,
            "done": self.done,
            "dead": self.dead,
            "cancelled": self.cancelled,
        }
        present = [(name, count) for name, count in counts.items() if count]
        if not self.fan:
            return present[0][0]
        return f"{self.total:,}: " + ", ".join(f"{count:,} {name}" for name, count in present)


class FlowStatus(Struct, frozen=True, kw_only=True):
    """How far a flow is, step by step."""

    id: str
    state: FlowState
    steps: tuple[StepStatus, ...]
    parts: tuple[shape.Part, ...]

    def draw(self) -> str:
        """As a tree of text."""
        return shape.tree(self.parts, self._captions())

    def mermaid(self) -> str:
        """As a Mermaid flowchart."""
        return shape.mermaid(self.parts, self._captions())

    def _captions(self) -> list[str]:
        """Of each step; what has not come when a flow has ended, or gone on behind it, never will."""
        captions: list[str] = []
        over = self.state is not FlowState.IN_PROGRESS
        for step in reversed(self.steps):
            over = over or bool(step.total)
            captions.append("none" if over and not step.total and not step.forgotten else str(step))
        return captions[::-1]


class FlowRun(Generic[Out_co]):
    """A started flow by its id.  Every verb also for asynchronous code, with an `a`."""

    def __init__(self, client: Client, flow_id: str, result_kind: Any = Any) -> None:
        self._client = client
        self._batches = StoredBatches(client)
        self._result_kind = result_kind
        self.id = flow_id

    def __repr__(self) -> str:
        return f"<FlowRun {self.id}>"

    async def astatus(self) -> FlowStatus | None:
        """None if it is unknown, was deleted, or its time is over."""
        engine = await self._client.piece(Batches)
        whole = await engine.batch(self.id)
        if whole is None:
            return None
        parts = shape.parse(whole.note)
        steps: list[StepStatus] = []
        for batch, segment in _with_segments(self.id, parts):
            steps += await _steps_of(engine, batch, segment)
        if parts[0] == shape.One(shape.GIVEN):
            steps.insert(0, StepStatus(name=shape.GIVEN, total=1, done=1))
        state = state_of(whole, parts, steps)
        return FlowStatus(id=self.id, state=state, steps=tuple(steps), parts=tuple(parts))

    async def aresult(self, timeout: Duration | None = None) -> Out_co:
        """What the last step returned, waited for.  `TimeoutError`, `FlowFailed` or `UnknownFlow`."""
        status = await wait_until_ended(self._ended, timeout, f"flow {self.id}")
        if status.state not in (FlowState.SUCCESS, FlowState.PARTIAL_SUCCESS):
            raise FlowFailed(self.id, status.state.value, _where(status))
        value: Out_co = decoder_for(self._result_kind).decode(await self._last_result(status))
        return value

    async def acancel(self, timeout: Duration = "10s") -> bool:
        """End what waits and ask what runs to stop, until nothing is left; False if it has ended before.

        A step that ends well in spite of it puts the next one, so this is repeated.  `TimeoutError` if a
        running step does not stop in time: it has been asked to, and you can call this again.
        """
        if not await self._is_live():
            return False
        what = f"a step of flow {self.id}, which was asked to stop,"
        return await wait_until_ended(self._stopped, timeout, what)

    async def adelete(self, timeout: Duration = "10s") -> bool:
        """Cancel it, then forget it.  False: unknown."""
        status = await self.astatus()
        if status is None:
            return False
        await self.acancel(timeout)
        for batch in batch_ids(self.id, len(shape.segments(status.parts))):
            await self._batches.adelete(batch)
        return True

    status = blocking(astatus)
    result = blocking(aresult)
    cancel = blocking(acancel)
    delete = blocking(adelete)

    async def _is_live(self) -> bool:
        status = await self._batches.aget(self.id)
        return status is not None and status.finished_at is None

    async def _stopped(self) -> Literal[True] | None:
        """Ask what is left to stop; True once nothing is."""
        if not await self._is_live():
            return True
        await self._batches.acancel(self.id)
        return None

    async def _ended(self) -> FlowStatus | None:
        if await self._is_live():
            return None
        status = await self.astatus()
        if status is None:
            raise UnknownFlow(self.id)
        return status

    async def _last_result(self, status: FlowStatus) -> bytes:
        """Of the last step; or of all the last ones, if it ends with a fan-out."""
        *before, last = _with_segments(self.id, status.parts)
        if last[1].chain:
            batch, number = last[0], len(last[1].chain)
            members = self._batches.amembers(batch, after=number - 1)
            [member] = [each async for each in members if each.member == number]
            return member.result or b"null"
        batch, segment = before[-1]
        gather = gather_of(batch, segment)
        return gathered(gather, [each async for each in self._batches.amembers(batch, after=gather.after)])


def batch_ids(flow: str, segments: int) -> list[str]:
    """The batches of a flow, the innermost first; the outermost is the flow itself."""
    return [*(derive_id("flow", flow, index) for index in range(segments - 1)), flow]


def gather_of(batch: str, segment: shape.Segment) -> Gather:
    fan = segment.fan
    assert fan is not None
    lengths = tuple(len(chain) for chain in fan.chains)
    return Gather(batch, len(segment.chain) + 1, lengths, fan.each, fan.partial)


def _with_segments(flow: str, parts: Sequence[shape.Part]) -> list[tuple[str, shape.Segment]]:
    found = shape.segments(parts)
    return list(zip(batch_ids(flow, len(found)), found, strict=True))


async def _steps_of(engine: Batches, batch: str, segment: shape.Segment) -> list[StepStatus]:
    """The steps of one batch: the chain member by member, the fan-out as what is left of the counts."""
    places = len(segment.chain) + 1  # the first one is the batch inside of this
    status = await engine.batch(batch)
    if status is None:
        names = [*segment.chain, *([str(segment.fan)] if segment.fan else [])]
        return [StepStatus(name=name, forgotten=True) for name in names]
    first = [m for m in await engine.members(batch, limit=places) if m.member < places]
    by_number = {member.member: member for member in first}
    steps = [_step(name, by_number.get(number)) for number, name in enumerate(segment.chain, 1)]
    if segment.fan is not None:
        steps.append(_rest(str(segment.fan), status, first))
    return steps


def _step(name: str, member: Member | None) -> StepStatus:
    if member is None:
        return StepStatus(name=name)
    state = member.state
    return StepStatus(
        name=name,
        total=1,
        waiting=int(state is State.READY),
        running=int(state is State.RUNNING),
        done=int(state is State.DONE),
        dead=int(state is State.DEAD),
        cancelled=int(state is State.CANCELLED),
    )


def _rest(name: str, status: BatchStatus, first: list[Member]) -> StepStatus:
    own = {state: sum(member.state is state for member in first) for state in State}
    return StepStatus(
        name=name,
        fan=True,
        total=status.total - len(first),
        waiting=status.enqueued + status.retrying - own[State.READY],
        running=status.running - own[State.RUNNING],
        done=status.done - own[State.DONE],
        dead=status.dead - own[State.DEAD],
        cancelled=status.cancelled - own[State.CANCELLED],
    )


def state_of(whole: BatchStatus, parts: Sequence[shape.Part], steps: Sequence[StepStatus]) -> FlowState:
    """How a flow is.  It is good if it came to its end: each step begins only after those before it."""
    if whole.finished_at is None:
        return FlowState.IN_PROGRESS
    if _came_to_its_end(parts, steps):
        clean = whole.state is BatchState.SUCCESS
        return FlowState.SUCCESS if clean else FlowState.PARTIAL_SUCCESS
    cancelled = any(step.cancelled for step in steps) and not any(step.dead for step in steps)
    return FlowState.CANCELLED if cancelled else FlowState.DEAD


def _came_to_its_end(parts: Sequence[shape.Part], steps: Sequence[StepStatus]) -> bool:
    last = parts[-1]
    if isinstance(last, shape.One):
        return bool(steps[-1].done)
    return bool(steps[-2].done) and (last.partial or not steps[-1].failed)


def _where(status: FlowStatus) -> str:
    """The first step that failed and that the flow cannot do without: those behind it died of that."""
    for part, step in zip(status.parts, status.steps, strict=True):
        enough = isinstance(part, shape.Fanned) and part.partial
        if step.failed and not enough:
            return f"{step.name} ({step})"
    return "a step was not put, because its id or its unique key was taken"

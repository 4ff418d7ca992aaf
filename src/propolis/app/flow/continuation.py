"""What comes after a job of a flow, as data in the job itself; and what that makes of its result.

Nobody coordinates a flow.  Each job carries the rest of its chain, down to the next fan-out, in a
header; whoever settles it as done puts what follows in the same step.  The members of a fan-out share a
batch with the job that has spread them, so that it cannot end before they are there; its callback is the
step that gathers their results.

Everything here is a pure function of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from propolis.app.made_names import with_key_of_first
from propolis.core import wire
from propolis.core.envelope import TRACE_HEADERS, Envelope
from propolis.core.ids import derive_id
from propolis.core.job import Member, State
from propolis.errors import BadSetting, BrokenPayload, FlowBroken

FLOW_HEADER = "propolis-flow"
TEMPLATE = "-"  # the id of a job that is not there yet


class Fan(Struct, frozen=True, omit_defaults=True):
    """Chains side by side: one chain once per element of a list, or each chain once with all of it."""

    chains: tuple[tuple[Envelope, ...], ...]
    each: bool = True


class Gather(Struct, frozen=True, omit_defaults=True):
    """Where the results of a fan-out are: in a batch, from member `base` on, at the ends of chains so long.

    The member before them is the job that has spread them (none, if the flow began with a value).
    """

    batch: str
    base: int
    lengths: tuple[int, ...]
    each: bool = True
    partial: bool = False

    @property
    def after(self) -> int:
        """The members that count are those behind this number."""
        return self.base - 2


class Continuation(Struct, frozen=True, omit_defaults=True):
    """What a job of a flow needs to know: where its first argument comes from, and what follows it."""

    flow: str
    then: tuple[Envelope, ...] = ()
    fan: Fan | None = None
    gather: Gather | None = None

    @property
    def ends(self) -> bool:
        """Is nothing put after this job?  Then its result is kept with its batch."""
        return not self.then and self.fan is None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Continuation)
_elements = msgspec.json.Decoder(list[Raw])


def continuation_of(job: Envelope) -> Continuation | None:
    """None for a job that belongs to no flow."""
    text = job.headers.get(FLOW_HEADER) if job.headers else None
    if text is None:
        return None
    try:
        wire.check_limits(text.encode())  # in the job it was a string, whatever is in it
        return _decoder.decode(text)
    except (msgspec.MsgspecError, BrokenPayload) as error:
        raise FlowBroken(f"job {job.id} does not know what follows it: {error}") from error


def with_continuation(job: Envelope, continuation: Continuation) -> Envelope:
    text = _encoder.encode(continuation)
    wire.check_limits(text)  # as whoever reads it does
    return replace(job, headers={**job.headers, FLOW_HEADER: text.decode()})


def following(continuation: Continuation, job: Envelope, result: bytes) -> Iterable[Envelope]:
    """The jobs to put when this one is done, with what it returned (as JSON) for their first argument."""
    if continuation.then:
        first, *rest = continuation.then
        onward = Continuation(continuation.flow, tuple(rest), continuation.fan)
        return (_placed(first, onward, job, job.member + 1, result),)
    if continuation.fan is not None:
        return _spread(continuation.flow, continuation.fan, job, result)
    return ()


def _spread(flow: str, fan: Fan, job: Envelope, result: bytes) -> Iterable[Envelope]:
    number = job.member + 1
    for chain, value in _shares(fan, job, result):
        onward = Continuation(flow, chain[1:])
        yield _placed(chain[0], onward, job, number, value)
        number += len(chain)


def _shares(fan: Fan, job: Envelope, result: bytes) -> Iterable[tuple[tuple[Envelope, ...], bytes]]:
    if not fan.each:
        return [(chain, result) for chain in fan.chains]
    try:
        elements = _elements.decode(result)
    except msgspec.MsgspecError as error:
        raise FlowBroken(f"{job.task} has returned no list, and each(…) follows it: {error}") from error
    return [(fan.chains[0], bytes(element)) for element in elements]


def _placed(
    template: Envelope, continuation: Continuation, before: Envelope, number: int, value: bytes
) -> Envelope:
    try:
        template = with_key_of_first(template, value)
    except BadSetting as error:
        raise FlowBroken(str(error)) from error
    placed = replace(
        template,
        id=derive_id(before.id, "then", number),
        chosen=True,
        batch=before.batch,
        member=number,
        args=with_first(value, template.args),
        headers={**_trace_of(before), **template.headers},
    )
    return with_continuation(placed, continuation)


def _trace_of(job: Envelope) -> dict[str, str]:
    return {name: job.headers[name] for name in TRACE_HEADERS if name in job.headers}


def with_first(value: bytes, args: Raw) -> Raw:
    """The arguments with one more before them; all of it JSON."""
    others = bytes(args)[1:-1].strip()
    return Raw(b"[" + value + (b"," + others if others else b"") + b"]")


# --- gathering ---------------------------------------------------------------------------


def gathered(gather: Gather, members: Sequence[Member]) -> bytes:
    """The results of a fan-out in the order of its elements, as a JSON array.

    `members` are those behind `gather.after`.  Of a dead element the result is null where a part is
    enough; otherwise `FlowBroken`.
    """
    found = {member.member: member for member in members}
    spreader = found.pop(gather.base - 1, None)
    if gather.base > 1 and (spreader is None or spreader.state is not State.DONE):
        raise FlowBroken(f"the step before its fan-out did not succeed: {_why(members)}")
    ends = [found.get(number) for number in _ends(gather, found)]
    missing = [member for member in ends if member is None or member.state is not State.DONE]
    if missing and not gather.partial:
        raise FlowBroken(f"{len(missing):,} of {len(ends):,} before it did not succeed: {_why(members)}")
    values = [b"null" if member is None else member.result or b"null" for member in ends]
    return b"[" + b",".join(values) + b"]"


def _ends(gather: Gather, found: Iterable[int]) -> list[int]:
    """The numbers of those members that are the last of their chain, whether they are there or not.

    The first of each chain is always there: it was put by the job before the fan-out.
    """
    if not gather.each:
        return [gather.base + length - 1 for length in accumulate(gather.lengths)]
    [length] = gather.lengths
    elements = 1 + max(((number - gather.base) // length for number in found), default=-1)
    return [gather.base + length * (element + 1) - 1 for element in range(elements)]


def _why(members: Iterable[Member]) -> str:
    """The first one that ended badly."""
    for member in members:
        if member.state in (State.DEAD, State.CANCELLED):
            return f"job {member.id} is {member.state.value} ({member.reason})"
    return "it is not there"

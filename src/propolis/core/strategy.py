"""What becomes of a job after success, error or timeout, as plain data.

Strategies are values: they can be compared, printed, stored in a job and sent over the wire.
What they decide is computed in `policy.py`.  One that makes no sense cannot be made: it is a
`BadSetting` here, and a broken payload when decoded.  (msgspec checks the annotations only when it
decodes, so they are written twice; they also go into the JSON Schema.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from propolis.core.duration import LONGEST_MS, Duration, Milliseconds, milliseconds
from propolis.errors import BadSetting

ARCHIVE_MS = milliseconds("7d")
MAX_TIMES = 2**31 - 1


def _check_span(name: str, span_ms: int) -> None:
    if not 0 <= span_ms <= LONGEST_MS:
        raise BadSetting(f"{name} cannot be {span_ms}: it is in milliseconds, from 0 to 100 years")


class Fixed(Struct, frozen=True, tag="fixed", tag_field="kind"):
    """The same delay before each repetition."""

    delay_ms: Milliseconds = 0

    def __post_init__(self) -> None:
        _check_span("delay_ms", self.delay_ms)


class Exponential(Struct, frozen=True, tag="exponential", tag_field="kind", omit_defaults=True):
    """`first`, then `factor` times more each time, never above `cap`.

    `jitter` is the share of the delay that is drawn at random (0.5: between half and all of it),
    so that jobs that failed together do not come back together.
    """

    first_ms: Milliseconds
    factor: Annotated[float, Meta(ge=1)] = 2.0
    cap_ms: Milliseconds = 3_600_000
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.5

    def __post_init__(self) -> None:
        _check_span("first_ms", self.first_ms)
        _check_span("cap_ms", self.cap_ms)
        if not 1 <= self.factor < math.inf:
            raise BadSetting(f"a backoff cannot grow by {self.factor}: its factor must be 1 or more")
        if not 0 <= self.jitter <= 1:
            raise BadSetting(f"a jitter cannot be {self.jitter}: it is a share of the delay, from 0 to 1")


Backoff = Fixed | Exponential

AT_ONCE = Fixed()


class Delete(Struct, frozen=True, tag="delete", tag_field="do"):
    """Forget the job at once."""


class Archive(Struct, frozen=True, tag="archive", tag_field="do", omit_defaults=True):
    """Keep the ended job for a while, where it can be seen."""

    keep_ms: Milliseconds = ARCHIVE_MS

    def __post_init__(self) -> None:
        _check_span("keep_ms", self.keep_ms)

    def keep(self, span: Duration) -> Archive:
        return Archive(keep_ms=milliseconds(span))


class Bury(Struct, frozen=True, tag="dead", tag_field="do"):
    """Put the job on the dead shelf, where it waits for an operator."""


Ending = Delete | Archive | Bury


class Repeat(Struct, frozen=True, tag="repeat", tag_field="do", omit_defaults=True):
    """Run the job again up to `times` times, so `times + 1` runs in all; then the ending.

    `times=None` repeats for ever, which is only ever what somebody asked for by name.
    """

    times: Annotated[int, Meta(ge=0, le=MAX_TIMES)] | None = 3
    backoff: Backoff = AT_ONCE
    ending: Ending = Bury()
    queue: str | None = None

    def __post_init__(self) -> None:
        if self.times is not None and not 0 <= self.times <= MAX_TIMES:
            raise BadSetting(
                f"a job cannot be repeated {self.times} times: use repeat(0), an ending such as dead, "
                f"or repeat_forever()"
            )

    def then(self, ending: Ending) -> Repeat:
        return replace(self, ending=ending)

    def on(self, queue: str) -> Repeat:
        """The same, with the repetitions run from another queue."""
        return replace(self, queue=queue)


class RepeatBy(Repeat, frozen=True, tag="repeat", tag_field="do"):
    """A `Repeat` whose delays come from a function of the repetition's number (1, 2, …).

    It lives in the code of a task and, being code, cannot be stored in a job.
    """

    delay: Callable[[int], Duration] = milliseconds


Strategy = Delete | Archive | Bury | Repeat

delete = Delete()
archive = Archive()
dead = Bury()


def fixed(delay: Duration) -> Fixed:
    return Fixed(delay_ms=milliseconds(delay))


def exponential(
    first: Duration = "2s", *, factor: float = 2.0, cap: Duration = "1h", jitter: float = 0.5
) -> Exponential:
    return Exponential(milliseconds(first), factor=factor, cap_ms=milliseconds(cap), jitter=jitter)


def repeat(times: int, backoff: Backoff | Duration | Callable[[int], Duration] = AT_ONCE) -> Repeat:
    """`repeat(5, exponential("2s"))`: five more runs after the first, then the dead shelf."""
    return _repeat(times, backoff)


def repeat_forever(backoff: Backoff | Duration | Callable[[int], Duration]) -> Repeat:
    """Repeat until it succeeds.  The backoff has no default: a loop without end should not be a hot one."""
    return _repeat(None, backoff)


def _repeat(times: int | None, backoff: Backoff | Duration | Callable[[int], Duration]) -> Repeat:
    if isinstance(backoff, Fixed | Exponential):
        return Repeat(times=times, backoff=backoff)
    if callable(backoff):
        return RepeatBy(times=times, delay=backoff)
    return Repeat(times=times, backoff=fixed(backoff))

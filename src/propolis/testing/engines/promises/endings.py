"""All the ways in which a lease can end: those after which its job runs again, and those that end it.

Each works on the job at the front of the default queue, which must be `MORTAL` where it has to end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from msgspec import Struct

from propolis.core.job import (
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import HOUR, lose_leases, settle_one, take_one

EXPIRY = timedelta(minutes=1)
MORTAL: Final[dict[str, Any]] = {"expires_in_ms": 60_000, "max_crashes": 1}

OUTCOMES: Final[tuple[Outcome, ...]] = (
    Done(keep=HOUR),
    Retried(),
    Dead(),
    Broken(Error("BrokenPayload")),
    Snoozed(timedelta(0)),
    Released(),
    Cancelled(),
    Crashed(),
    Crashed(blameless=True),
    Unknown(),
)
every_outcome = pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: type(outcome).__name__)


class Way(Struct, frozen=True):
    """One way: what to do, and the state and reason in which the job is then."""

    name: str
    go: Callable[[Engine, FakeClock, str], Awaitable[None]]
    state: State
    reason: str | None = None


def _by(outcome: Outcome) -> Callable[[Engine, FakeClock, str], Awaitable[None]]:
    async def go(engine: Engine, clock: FakeClock, job_id: str) -> None:  # noqa: ARG001 - they share a shape
        lease = await take_one(engine)
        assert lease.id == job_id
        await settle_one(engine, lease, outcome)

    return go


async def _lost(engine: Engine, clock: FakeClock, job_id: str) -> None:
    assert (await take_one(engine)).id == job_id
    await lose_leases(engine, clock)


async def _cancelled_while_waiting(engine: Engine, clock: FakeClock, job_id: str) -> None:  # noqa: ARG001
    assert await engine.cancel([job_id]) == [True]


async def _cancelled_while_running(engine: Engine, clock: FakeClock, job_id: str) -> None:  # noqa: ARG001
    lease = await take_one(engine)
    assert await engine.cancel([job_id]) == [True]
    await settle_one(engine, lease, Cancelled())


async def _expired(engine: Engine, clock: FakeClock, job_id: str) -> None:  # noqa: ARG001
    clock.advance(EXPIRY)
    await engine.sweep()


ENDINGS: Final = (
    Way("done", _by(Done(keep=HOUR)), State.DONE),
    Way("dead", _by(Dead()), State.DEAD, "failed"),
    Way("broken", _by(Broken(Error("BrokenPayload"))), State.DEAD, "broken"),
    Way("crashed", _by(Crashed()), State.DEAD, "crashed"),
    Way("expired", _expired, State.DEAD, "expired"),
    Way("cancelled while waiting", _cancelled_while_waiting, State.CANCELLED, "cancelled"),
    Way("cancelled while running", _cancelled_while_running, State.CANCELLED, "cancelled"),
)
every_ending = pytest.mark.parametrize("ending", ENDINGS, ids=lambda way: way.name)

RETURNS: Final = (
    Way("retry", _by(Retried()), State.READY),
    Way("snooze", _by(Snoozed(timedelta(0))), State.READY),
    Way("release", _by(Released()), State.READY),
    Way("crash", _by(Crashed()), State.READY),
    Way("reap", _lost, State.READY),
)
every_return = pytest.mark.parametrize("back", RETURNS, ids=lambda way: way.name)

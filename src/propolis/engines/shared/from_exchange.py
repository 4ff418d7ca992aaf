"""What follows from `exchange`: an engine that has nothing quicker writes neither of these."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar, Unpack

from propolis.core.job import DONE, Dead, Done, Lease, Outcome
from propolis.core.protocols import Exchange, LeaseTerms
from propolis.errors import Busy

POLL = 0.02  # seconds
MANY = 500  # emissions of one job
T = TypeVar("T")


class ClaimTerms(NamedTuple):
    """What an exchange is to lease: `limit` jobs at most, from these queues as many as each says."""

    wants: Mapping[str, int]
    span: timedelta
    holder: str
    limit: int
    tasks: Sequence[str]


NOTHING = ClaimTerms({}, timedelta(0), "", 0, ())


def claim_of(wants: Mapping[str, int], terms: LeaseTerms) -> ClaimTerms:
    limit = terms.get("limit")
    most = sum(wants.values()) if limit is None else limit
    return ClaimTerms(wants, terms["span"], terms["holder"], most, terms.get("tasks", ()))


def emit_many(outcomes: Sequence[tuple[Lease, Outcome]]) -> bool:
    return any(
        len(outcome.emit) > MANY
        for _, outcome in outcomes
        if outcome is not DONE and isinstance(outcome, Done | Dead)
    )


async def written_down(outcomes: Sequence[tuple[Lease, Outcome]], write_down: Callable[[], T]) -> T:
    """In a thread where that takes long: others need the event loop meanwhile."""
    return await asyncio.to_thread(write_down) if emit_many(outcomes) else write_down()


class FromExchange:
    """`lease`, `settle`, and a `wait` that looks again and again."""

    @abstractmethod
    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange: ...

    async def lease(self, wants: Mapping[str, int], **terms: Unpack[LeaseTerms]) -> list[Lease]:
        return (await self.exchange((), wants, **terms)).leases

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        """`Busy` where some of them could not be recorded for now; the others are."""
        answer = await self.exchange(outcomes, {}, span=NOTHING.span, holder="")
        if answer.later:
            raise Busy(f"{len(answer.later)} of {len(outcomes)} outcomes", {})
        return answer.lost

    @property
    def hears(self) -> bool:
        return False

    def has_changed(self) -> bool:
        """Whether anything happened since the last look; without it, whoever waits is not woken early."""
        return False

    async def wait(self, queues: Sequence[str], timeout: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not queues or not self.has_changed():
            rest = deadline - loop.time()
            if rest <= 0:
                return False
            await asyncio.sleep(min(POLL, rest))
        return True

"""What a producer holds of a job that it has enqueued."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import msgspec

from skep.duration import Duration, duration
from skep.errors import JobFailed, ResultNotKept, WaitsForever
from skep.job import Record, State
from skep.producer import Producer
from skep.signature import current

R_co = TypeVar("R_co", covariant=True)

FIRST_LOOK = 0.002
LAST_LOOK = 0.25


def seconds_to_wait(timeout: Duration | None) -> float | None:
    """`WaitsForever` for a job that would hold its slot until another has ended, which may need that slot."""
    if timeout is not None:
        return duration(timeout).total_seconds()
    if current.get() is not None:
        raise WaitsForever
    return None


class Handle(Generic[R_co]):
    """A job by its id.  `created` is False where an equal job was there already (its id is this one's)."""

    __slots__ = ("_decoder", "_producer", "created", "id")

    def __init__(
        self, producer: Producer, job_id: str, decoder: msgspec.json.Decoder[Any], *, created: bool = True
    ) -> None:
        self._producer = producer
        self._decoder = decoder
        self.id = job_id
        self.created = created

    def __repr__(self) -> str:
        return f"<Handle {self.id}>"

    async def astatus(self) -> Record | None:
        """Everything known of the job; None once it has ended and was not kept."""
        return await (await self._producer.ready()).get(self.id)

    def status(self) -> Record | None:
        return self._producer.wait(self.astatus())

    async def acancel(self) -> bool:
        """End it if it waits, ask it to stop if it runs; False if it has ended."""
        [answer] = await (await self._producer.ready()).cancel([self.id])
        return answer

    def cancel(self) -> bool:
        return self._producer.wait(self.acancel())

    async def aresult(self, timeout: Duration | None = None) -> R_co:
        """What the task returned, waited for.

        Raises `TimeoutError`, `JobFailed` if the job ended otherwise, `ResultNotKept` if nobody kept it;
        and `WaitsForever` inside of a job, unless it is for a limited time.
        """
        seconds = seconds_to_wait(timeout)
        try:
            async with asyncio.timeout(seconds):
                record = await self._ended()
        except TimeoutError:
            raise TimeoutError(
                f"job {self.id} has not ended within {timeout}: is there a worker for it?"
            ) from None
        if record.state is not State.DONE:
            error = f"{record.error.type}: {record.error.message}" if record.error else None
            raise JobFailed(self.id, record.state.value, record.reason, error)
        if record.result is None:
            raise ResultNotKept(self.id)
        value: R_co = self._decoder.decode(record.result)
        return value

    def result(self, timeout: Duration | None = None) -> R_co:
        return self._producer.wait(self.aresult(timeout))

    async def _ended(self) -> Record:
        pause = FIRST_LOOK
        while True:
            record = await self.astatus()
            if record is None:
                raise ResultNotKept(self.id)
            if record.state.terminal:
                return record
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LAST_LOOK)

"""What a producer holds of a job that it has enqueued."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from propolis.app.client.blocking import blocking
from propolis.app.client.client import Client
from propolis.app.client.waiting import wait_until_ended
from propolis.core.duration import Duration
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Inspects, Operates
from propolis.errors import JobFailed, ResultNotKept

R_co = TypeVar("R_co", covariant=True)


class Handle(Generic[R_co]):
    """A job by its id.  `created` is False where an equal job was there already (its id is this one's)."""

    __slots__ = ("_client", "_decoder", "created", "id")

    def __init__(
        self, client: Client, job_id: str, decoder: msgspec.json.Decoder[Any], *, created: bool = True
    ) -> None:
        self._client = client
        self._decoder = decoder
        self.id = job_id
        self.created = created

    def __repr__(self) -> str:
        return f"<Handle {self.id}>"

    async def astatus(self) -> JobInfo | None:
        """Everything known of the job; None once it has ended and was not kept."""
        return await (await self._client.piece(Inspects)).get(self.id)

    status = blocking(astatus)

    async def acancel(self) -> bool:
        """End it if it waits, ask it to stop if it runs; False if it has ended."""
        [answer] = await (await self._client.piece(Operates)).cancel([self.id])
        return answer

    cancel = blocking(acancel)

    async def aresult(self, timeout: Duration | None = None) -> R_co:
        """What the task returned, waited for.

        Raises `TimeoutError`, `JobFailed` if the job ended otherwise, `ResultNotKept` if nobody kept it;
        and `WaitsForever` inside of a job, unless it is for a limited time.
        """
        info = await wait_until_ended(self._ended, timeout, f"job {self.id}")
        if info.state is not State.DONE:
            error = f"{info.error.type}: {info.error.message}" if info.error else None
            raise JobFailed(self.id, info.state.value, info.reason, error)
        if info.result is None:
            raise ResultNotKept(self.id)
        value: R_co = self._decoder.decode(info.result)
        return value

    result = blocking(aresult)

    async def _ended(self) -> JobInfo | None:
        info = await self.astatus()
        if info is None:
            raise ResultNotKept(self.id)
        return info if info.state.terminal else None

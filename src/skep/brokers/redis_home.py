"""One home of an app that is spread over a cluster, and the post between homes.

A home is all of an engine in one slot.  What must reach another one is recorded in the step that makes it
necessary, in the `outbox` of its home, and sent on from there; see spread.lua.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from skep.batch import Batch
from skep.broker import Receipt
from skep.brokers.redis import RedisBroker, refusal
from skep.brokers.redis_errors import said
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_link import Link, Refused
from skep.brokers.redis_script import Script
from skep.brokers.redis_words import Argument, Settling, is_plain, load_spread_scripts, packed, taken_in
from skep.clock import Clock
from skep.errors import EngineError, EngineUnavailable, OutcomeUnknown
from skep.job import Job, Lease, Outcome
from skep.life import Retention

log = logging.getLogger("skep.redis")

SENT_AT_ONCE = 200  # messages of one home to another in one call
PAUSES = (0.05, 0.2, 0.5)  # seconds, before something is sent on once more
PATIENCE = 5.0  # seconds, after which it is left to a sweep: whoever called has other things to do
MOST_ROUNDS = 1000  # of the post in one call: what is sent may lead to more, but not for ever

_scripts = load_spread_scripts()

# What may put something, and so is told the clock: as a put (p), or urgently (u), see spread.lua.
_NUMBERED = {
    **dict.fromkeys(("put", "put_plain"), "p"),
    **dict.fromkeys(("accept", "cancel", "delete_batch", "drop", "exchange", "fire", "replay", "seal"), "u"),
    **dict.fromkeys(("sweep", "take_in"), "u"),
}

Refusals = dict[str, str]  # of drafts that were sent on: their ids, and the jobs in their place


@dataclass(slots=True)
class Owed:
    """What one home has for another: all of it, or None where it must be read first."""

    source: int
    target: int
    entries: list[bytes] | None


@dataclass(slots=True)
class Post:
    """Sends on what homes have recorded for one another, until there is nothing left.

    It also keeps the clock: the highest number of a put that this process has seen in any home.
    """

    homes: list[Home] = field(default_factory=list)
    clock: int = 0

    async def send_on(self, owed: list[Owed]) -> Refusals:
        """What cannot be sent on now stays recorded: the next sweep sends it."""
        refusals: Refusals = {}
        for _ in range(MOST_ROUNDS):
            if not owed:
                break
            rounds = await asyncio.gather(*(self._deliver(each) for each in owed))
            owed = [each for more, _ in rounds for each in more]
            for _, refused in rounds:
                refusals |= refused
        return refusals

    async def known(self, job_ids: Sequence[str]) -> dict[str, list[int]]:
        """The homes that know each of these ids; those that no home knows are left out."""
        if not job_ids:
            return {}
        args: list[Argument] = ["", len(job_ids), *job_ids, 0, 0, 0]
        answers = await asyncio.gather(*(home.tell("around", *args) for home in self.homes))
        found: dict[str, list[int]] = {}
        for home, (_, used, *_) in zip(self.homes, answers, strict=True):
            for n in used:
                found.setdefault(job_ids[n - 1], []).append(home.number)
        return found

    async def flush(self, home: Home) -> None:
        """Send on all that this home has recorded until now; raises if that is not possible."""
        while owed := [each for each in await home.outbox() if each.entries]:
            for each in owed:
                more, _ = await self._hand_over(each)
                await self.send_on(more)

    async def _deliver(self, owed: Owed) -> tuple[list[Owed], Refusals]:
        """More than once, where a master does not answer: what was heard already is passed over."""
        try:
            async with asyncio.timeout(PATIENCE):
                for pause in PAUSES:
                    try:
                        return await self._hand_over(owed)
                    except (EngineUnavailable, OutcomeUnknown):
                        await asyncio.sleep(pause)
                return await self._hand_over(owed)
        except (EngineError, TimeoutError) as error:
            log.warning("what home %d has for home %d must wait: %s", owed.source, owed.target, said(error))
            return [], {}

    async def _hand_over(self, owed: Owed) -> tuple[list[Owed], Refusals]:
        """Gives what is to be sent on next."""
        source, target = self.homes[owed.source], self.homes[owed.target]
        following: list[Owed] = []
        entries, whole = owed.entries, owed.entries is not None and len(owed.entries) <= SENT_AT_ONCE
        if not whole:
            found = [each.entries for each in await source.outbox() if each.target == owed.target]
            entries = found[0] if found else []
            if entries and len(entries) >= SENT_AT_ONCE:
                following.append(Owed(owed.source, owed.target, None))
        if not entries:
            return following, {}
        args = [*target._terms(), owed.source, *entries]
        _, leads_to, refusals = await target.ask("accept", args)
        last = entries[-1].partition(b"\n")[0]
        await source.tell("sent_on", owed.target, last, reads=False)
        following += [
            Owed(owed.target, to, None if more else rest) for to, own, more, rest in leads_to if own
        ]
        return following, refusals


class Home(RedisBroker):
    """Every verb as on one server, for what lives here; then what it leads to elsewhere is sent on."""

    def __init__(
        self,
        number: int,
        prefix: str,
        link: Link,
        homes: Homes,
        *,
        clock: Clock | None,
        retention: Retention,
        post: Post,
    ) -> None:
        super().__init__(link.target, prefix=prefix, clock=clock, retention=retention, link=link, homes=homes)
        self.number = number
        self.limited = False  # whether there are limits of which each home has a share, as far as we know
        self._places = homes
        self._post = post

    async def _run(self, script: Script, args: list[Argument], *, reads: bool = False) -> Any:
        return (await self.run(script.name, args, reads=reads))[0]

    async def run(self, name: str, args: Sequence[Argument], *, reads: bool = False) -> tuple[Any, Refusals]:
        """Gives the answer, and what became of drafts that were refused, here or on their way."""
        answer, owed, refusals = await self.ask(name, args, reads=reads)
        if owed and not reads:
            # What others have recorded they send on themselves; what they could not, a sweep does.
            mine = [each for each in owed if each[1] or name == "sweep"]
            refusals |= await self._post.send_on(
                [Owed(self.number, target, None if more else entries) for target, _, more, entries in mine]
            )
        return answer, refusals

    async def ask(
        self, name: str, args: Sequence[Argument], *, reads: bool = False
    ) -> tuple[Any, list[Any], Refusals]:
        """The same, and sends nothing on."""
        clock = self._post.clock if name in _NUMBERED else 0
        keys = (*self._keys, f"{self._prefix}home:{self.number}:{clock}:{_NUMBERED.get(name, '-')}".encode())
        try:
            answer, owed, reports, limited, seq = await self._link.call(
                _scripts[name], keys, args, reads=reads
            )
        except Refused as refused:
            raise refusal(refused) from refused
        self.limited = bool(limited)
        self._post.clock = max(self._post.clock, int(seq))
        told = [each.decode() for each in reports]
        return answer, owed, dict(zip(told[::2], told[1::2], strict=True))

    async def tell(self, name: str, *args: Argument, reads: bool = True) -> Any:
        """A script that only homes have, and that leads to nothing elsewhere."""
        return (await self.ask(name, [*self._terms(), *args], reads=reads))[0]

    async def put_here(
        self, jobs: Sequence[Job], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        """Put these jobs, whichever homes they are for, in one step of this one."""
        if batch is None and all(is_plain(job) and self.is_home_of(job) for job in jobs):
            numbers, refusals = await self.run("put_plain", self._plain_call(jobs, token))
            in_place = {n: jobs[n - 1].id for n in numbers}
        else:
            answer, refusals = await self.run("put", self._put_call(jobs, token, batch, seal=seal))
            in_place = {n: there.decode() for n, there in zip(answer[::2], answer[1::2], strict=True)}
        found = [in_place.get(n, refusals.get(job.id)) for n, job in enumerate(jobs, 1)]
        return [
            Receipt(job.id, True) if there is None else Receipt(there, False)
            for job, there in zip(jobs, found, strict=True)
        ]

    async def settle_here(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[int]:
        """The numbers of those that were lost."""
        lost, _, _ = await self._exchange(Settling(outcomes, self._places), {}, timedelta(0), "", 0)
        return lost

    def is_home_of(self, job: Job) -> bool:
        return self._places.of_job(job.queue, job.id) == self.number

    async def _meanings(self, queue: str, found: Sequence[bytes]) -> list[bytes]:
        """What has an id that another home knows is no new job."""
        read = [taken_in(queue, pushed, self._places) for pushed in found]
        known = await self._post.known([job_id for job_id, _ in read if job_id is not None])
        there = {job_id for job_id, numbers in known.items() if set(numbers) - {self.number}}
        return [packed({}) if job_id in there else meaning for job_id, meaning in read]

    def _looked(self, queues: Iterable[str]) -> None:
        """Whoever looks into several homes does so once, before the first of them."""

    # --- the post ------------------------------------------------------------------------

    async def outbox(self) -> list[Owed]:
        found = await self.tell("outbox", SENT_AT_ONCE)
        return [Owed(self.number, target, entries) for target, entries in found]

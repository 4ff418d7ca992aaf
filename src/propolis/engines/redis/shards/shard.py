"""One shard of an app, and the post between shards.

A shard is all of an engine in one slot.  What must reach another one is recorded in the step that makes it
necessary, in the `outbox` of its shard, and sent on from there; see sharded.lua.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from propolis.core.batch import Batch
from propolis.core.clock import Clock
from propolis.core.envelope import Envelope, is_plain
from propolis.core.job import Lease, Outcome
from propolis.core.protocols import Receipt
from propolis.core.transitions import Retention
from propolis.engines.redis.client.errors import ScriptRefused, error_text
from propolis.engines.redis.client.link import Link
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.codec import Argument, packed, taken_in
from propolis.engines.redis.engine import RedisEngine, refusal
from propolis.engines.redis.scripts import load_sharded_scripts
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.from_exchange import NOTHING
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown

log = logging.getLogger("propolis.redis")

SENT_AT_ONCE = 200  # messages of one shard to another in one call
PAUSES = (0.05, 0.2, 0.5)  # seconds, before something is sent on once more
PATIENCE = 5.0  # seconds, after which it is left to a sweep: the caller has other things to do
MAX_ROUNDS = 1000  # of the post in one call: what is sent may lead to more, but not for ever

_scripts = load_sharded_scripts()

# Scripts that may put something, and so get the clock: as a put (p), or urgently (u), see sharded.lua.
_NUMBERED = {
    **dict.fromkeys(("put", "put_plain"), "p"),
    **dict.fromkeys(
        ("accept", "cancel", "delete_batch", "drop", "exchange", "note", "replay", "seal", "swap"),
        "u",
    ),
    **dict.fromkeys(("sweep", "take_in"), "u"),
}

Refusals = dict[str, str]  # of drafts that were sent on: their ids, and the jobs in their place


@dataclass(slots=True)
class Owed:
    """What one shard has for another: all of it, or None where it must be read first."""

    source: int
    target: int
    entries: list[bytes] | None


@dataclass(slots=True)
class Post:
    """Sends on what shards have recorded for one another, until there is nothing left.

    It also keeps the clock: the highest number of a put that this process has seen in any shard.
    """

    shards: list[Shard] = field(default_factory=list)
    clock: int = 0

    async def send_on(self, owed: list[Owed]) -> Refusals:
        """What cannot be sent on now stays recorded: the next sweep sends it."""
        refusals: Refusals = {}
        for _ in range(MAX_ROUNDS):
            if not owed:
                break
            rounds = await asyncio.gather(*(self._deliver(each) for each in owed))
            owed = [each for more, _ in rounds for each in more]
            for _, refused in rounds:
                refusals |= refused
        return refusals

    async def known(self, job_ids: Sequence[str]) -> dict[str, list[int]]:
        """The shards that know each of these ids; those that no shard knows are left out."""
        if not job_ids:
            return {}
        args: list[Argument] = ["", len(job_ids), *job_ids, 0, 0, 0]
        answers = await asyncio.gather(*(shard.call_here("check_put", *args) for shard in self.shards))
        found: dict[str, list[int]] = {}
        for shard, (_, used, *_) in zip(self.shards, answers, strict=True):
            for n in used:
                found.setdefault(job_ids[n - 1], []).append(shard.number)
        return found

    async def flush(self, shard: Shard) -> None:
        """Send on all that this shard has recorded until now; raises if that is not possible."""
        while owed := [each for each in await shard.outbox() if each.entries]:
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
            log.warning(
                "what shard %d has for shard %d must wait: %s", owed.source, owed.target, error_text(error)
            )
            return [], {}

    async def _hand_over(self, owed: Owed) -> tuple[list[Owed], Refusals]:
        """Gives what is to be sent on next."""
        source, target = self.shards[owed.source], self.shards[owed.target]
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
        numbers = (entry.partition(b"\n")[0] for entry in entries)
        last = max((int(number) for number in numbers if number.isdigit()), default=0)
        await source.call_here("sent_on", owed.target, last, reads=False)
        following += [
            Owed(owed.target, to, None if more else rest) for to, own, more, rest in leads_to if own
        ]
        return following, refusals


class Shard(RedisEngine):
    """Every verb as on one server, for what lives here; then what it leads to elsewhere is sent on."""

    _shard_map: ShardMap

    def __init__(
        self,
        number: int,
        prefix: str,
        link: Link,
        shard_map: ShardMap,
        *,
        clock: Clock | None,
        retention: Retention,
        post: Post,
    ) -> None:
        super().__init__(
            link.target, prefix=prefix, clock=clock, retention=retention, link=link, shard_map=shard_map
        )
        self.number = number
        self.limited = False  # whether there are limits of which each shard has a share, as far as we know
        self._post = post

    async def _run(self, script: LuaScript, args: list[Argument], *, reads: bool = False) -> Any:
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
        keys = (
            self._keys[0],
            f"{self._prefix}shard:{self.number}:{clock}:{_NUMBERED.get(name, '-')}".encode(),
        )
        try:
            answer, owed, reports, limited, seq = await self._link.call(
                _scripts[name], keys, args, reads=reads
            )
        except ScriptRefused as refused:
            raise refusal(refused) from refused
        self.limited = bool(limited)
        self._post.clock = max(self._post.clock, int(seq))
        texts = [each.decode() for each in reports]
        return answer, owed, dict(zip(texts[::2], texts[1::2], strict=True))

    async def call_here(self, name: str, *args: Argument, reads: bool = True) -> Any:
        """A script that only shards have, and that leads to nothing elsewhere."""
        return (await self.ask(name, [*self._terms(), *args], reads=reads))[0]

    async def call_through(self, name: str, *args: Argument) -> tuple[Any, Refusals]:
        """A script that only shards have, with what it leads to elsewhere."""
        return await self.run(name, [*self._terms(), *args])

    async def put_here(
        self, jobs: Sequence[Envelope], token: str | None, batch: Batch | None, *, seal: bool
    ) -> list[Receipt]:
        """Put these jobs, whichever shards they are for, in one step of this one."""
        if batch is None and all(is_plain(job) and self.has(job) for job in jobs):
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
        return (await self._exchange(await self._settling(outcomes), NOTHING))[0]

    async def delete_batch(self, batch: str) -> bool:
        """Members may wait in any shard: all must forget them."""
        others = [other.number for other in self._post.shards if other is not self]
        return bool(await self._call("delete_batch", batch, *others))

    def has(self, job: Envelope) -> bool:
        return self._shard_map.of_job(job.queue, job.id) == self.number

    async def _meanings(self, queue: str, found: Sequence[bytes]) -> list[bytes]:
        """What has an id that another shard knows is no new job."""
        read = [taken_in(queue, pushed, self._shard_map) for pushed in found]
        known = await self._post.known([job_id for job_id, _ in read if job_id is not None])
        there = {job_id for job_id, numbers in known.items() if set(numbers) - {self.number}}
        return [packed({}) if job_id in there else meaning for job_id, meaning in read]

    def _looked(self, queues: Iterable[str]) -> None:
        """A caller that looks into several shards does so once, before the first of them."""

    # --- the post ------------------------------------------------------------------------

    async def outbox(self) -> list[Owed]:
        found = await self.call_here("outbox", SENT_AT_ONCE)
        return [Owed(self.number, target, entries) for target, entries in found]

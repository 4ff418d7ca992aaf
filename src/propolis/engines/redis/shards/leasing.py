"""How leases begin and end where an app has shards: each shard is asked for what lives there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar, Unpack

from msgspec.structs import replace

from propolis.core.job import Dead, Done, Lease, Outcome, Retried
from propolis.core.protocols import Exchange, LeaseTerms, Note, Renewal
from propolis.engines.redis.shards.group import ShardGroup, grouped
from propolis.engines.redis.shards.putting import Putting
from propolis.engines.redis.shards.rules import SharedRules
from propolis.engines.redis.shards.shard import Shard
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown

T = TypeVar("T")

log = logging.getLogger("propolis.redis")

_ROOM = 1 << 40  # where nobody gives a limit


class Leasing:
    """The leases of a group of shards."""

    def __init__(self, group: ShardGroup, putting: Putting, rules: SharedRules) -> None:
        self._group = group
        self._putting = putting
        self._rules = rules
        self._turn = 0

    async def exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], **terms: Unpack[LeaseTerms]
    ) -> Exchange:
        knew_limits = self._knows_limits()
        if (shard := self._only_shard(outcomes, wants)) is not None:
            got = await shard.exchange(outcomes, wants, **terms)
        else:
            got = await self._exchange(outcomes, wants, terms.copy())
        if knew_limits or not self._knows_limits():
            return got
        # The first limits have come meanwhile, of which those that were asked have no part yet.
        rest = {
            queue: want - sum(lease.queue == queue for lease in got.leases) for queue, want in wants.items()
        }
        if (limit := terms.get("limit")) is not None:
            terms["limit"] = limit - len(got.leases)
        try:
            return Exchange(got.lost, got.leases + (await self._exchange((), rest, terms.copy())).leases)
        except EngineError as error:
            log.warning("what limits let start waits for the next look: %s", error)
            return got

    def _knows_limits(self) -> bool:
        return any(shard.limited for shard in self._group.shards)

    async def _exchange(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int], terms: LeaseTerms
    ) -> Exchange:
        lost = await self.settle(outcomes) if outcomes else []
        limit = terms.pop("limit", None)
        leases, trouble = await self.lease(wants, terms, _ROOM if limit is None else limit)
        if trouble is not None:
            if not leases and not outcomes:
                raise trouble
            log.warning("not every queue could be looked into: %s", trouble)
        return Exchange(lost, leases)

    def _only_shard(
        self, outcomes: Sequence[tuple[Lease, Outcome]], wants: Mapping[str, int]
    ) -> Shard | None:
        """The one that all of this is about, if that is so, and nothing leads elsewhere: one call does it."""
        shard_map = self._group.shard_map
        queues = {*wants, *(lease.queue for lease, _ in outcomes)}
        numbers = {shard_map.of(queue) for queue in queues}
        if len(numbers) != 1 or not queues.isdisjoint(shard_map.partitions) or any(map(_leads_on, outcomes)):
            return None
        shard = self._group.shards[numbers.pop()]
        return None if shard.limited else shard

    # --- leases begin --------------------------------------------------------------------

    async def lease(
        self, wants: Mapping[str, int], terms: LeaseTerms, limit: int
    ) -> tuple[list[Lease], EngineError | None]:
        """All shards at once, or queue by queue where their order counts.  What was taken is always given."""
        shards = {queue: self._in_turn(queue) for queue in wants}
        if (
            self._knows_limits()
            or limit < sum(wants.values())
            or any(len(each) > 1 for each in shards.values())
        ):
            return await self.lease_in_order(wants, shards, terms, limit)
        queues_by_shard = grouped((queue, [each[0].number]) for queue, each in shards.items())
        answers = await asyncio.gather(
            *(
                self._group.shards[number].lease({queue: wants[queue] for queue in queues}, **terms)
                for number, queues in queues_by_shard.items()
            ),
            return_exceptions=True,
        )
        leases, trouble = _with_first_trouble(answers)
        order = {queue: n for n, queue in enumerate(wants)}
        return sorted((lease for each in leases for lease in each), key=lambda it: order[it.queue]), trouble

    async def lease_in_order(
        self,
        wants: Mapping[str, int],
        shards: Mapping[str, Sequence[Shard]],
        terms: LeaseTerms,
        limit: int,
    ) -> tuple[list[Lease], EngineError | None]:
        leases: list[Lease] = []
        trouble = None
        for queue, wanted in wants.items():
            want = min(wanted, limit - len(leases))
            for shard in shards[queue] if want > 0 else ():
                try:
                    if shard.limited:
                        await self._rules.gather_shares(shard, queue, want, terms.get("tasks", ()))
                    taken = await shard.lease({queue: want}, **terms)
                except EngineError as error:
                    trouble = error
                    continue
                leases += taken
                want -= len(taken)
                if want <= 0:
                    break
        return leases, trouble

    def _in_turn(self, queue: str) -> list[Shard]:
        """The shards of a queue, each time beginning with the next one."""
        shards = self._group.of_queue(queue)
        if len(shards) == 1:
            return shards
        self._turn += 1
        first = self._turn % len(shards)
        return [*shards[first:], *shards[:first]]

    # --- leases end ----------------------------------------------------------------------

    async def settle(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[Lease]:
        lost = await self.settle_in_shards(await self.without_taken(outcomes))
        return [outcomes[n][0] for n in lost]

    async def settle_in_shards(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[int]:
        """The numbers of those that were lost."""
        of_job = self._group.shard_map.of_job
        numbers_by_shard = grouped(
            (n, [of_job(lease.queue, lease.id)]) for n, (lease, _) in enumerate(outcomes)
        )

        async def settle(shard: Shard, numbers: list[int]) -> list[int]:
            lost = [numbers[n] for n in await shard.settle_here([outcomes[n] for n in numbers])]
            return [n for n in lost if not await self._settle_elsewhere(shard, outcomes[n])]

        settled = await asyncio.gather(
            *(settle(self._group.shards[number], numbers) for number, numbers in numbers_by_shard.items()),
            return_exceptions=True,
        )
        lost, trouble = _with_first_trouble(settled)
        if trouble is not None and lost and isinstance(trouble, EngineUnavailable):
            raise OutcomeUnknown(f"some of the outcomes were recorded, others not: {trouble}") from trouble
        if trouble is not None:
            raise trouble
        return sorted(n for each in lost for n in each)

    async def _settle_elsewhere(self, shard: Shard, settled: tuple[Lease, Outcome]) -> bool:
        """A queue may have got more partitions since a job was put: then it is not where its id says."""
        for other in self._group.of_queue(settled[0].queue):
            if other is not shard and not await other.settle_here([settled]):
                return True
        return False

    async def without_taken(
        self, outcomes: Sequence[tuple[Lease, Outcome]]
    ) -> Sequence[tuple[Lease, Outcome]]:
        """An emission whose id is taken in another shard than its own is left out, as in its own."""
        emitted = [job for _, outcome in outcomes if isinstance(outcome, Done | Dead) for job in outcome.emit]
        if not emitted:
            return outcomes
        taken = await self._putting.taken(emitted)
        if not taken:
            return outcomes
        return [
            (lease, replace(outcome, emit=tuple(job for job in outcome.emit if job.id not in taken)))
            if isinstance(outcome, Done | Dead)
            else (lease, outcome)
            for lease, outcome in outcomes
        ]

    # --- while they last -----------------------------------------------------------------

    async def renew(self, leases: Sequence[Lease], *, span: timedelta) -> list[Renewal]:
        shard_map, shards = self._group.shard_map, self._group.shards
        found = [Renewal(None)] * len(leases)

        async def renew(shard: Shard, numbers: list[int]) -> None:
            renewals = await shard.renew([leases[n] for n in numbers], span=span)
            for n, renewal in zip(numbers, renewals, strict=True):
                if renewal.until is not None:
                    found[n] = renewal

        own = grouped((n, [shard_map.of_job(it.queue, it.id)]) for n, it in enumerate(leases))
        await asyncio.gather(*(renew(shards[number], numbers) for number, numbers in own.items()))
        elsewhere = grouped(
            (n, shard_map.of_queue(it.queue))
            for n, it in enumerate(leases)
            if found[n].until is None and it.queue in shard_map.partitions
        )
        for number, numbers in elsewhere.items():
            await renew(shards[number], numbers)
        return found

    async def note(self, notes: Sequence[Note]) -> list[Lease]:
        """Jobs travel by the rule for emissions, so all shards are asked before what stands in the way.

        But not for a lease that is lost: its jobs are not wanted, and refuse nothing.
        """
        shard_map, shards = self._group.shard_map, self._group.shards
        gone: list[Lease] = []
        if putting := [Note(note.lease) for note in notes if note.puts]:
            gone = await self.note(putting)
            notes = [note for note in notes if note.lease not in gone]
            let_in = await self._putting.let_in([job for note in notes for job in note.puts])
            ids = {job.id for job in let_in}
            notes = [replace(note, puts=tuple(job for job in note.puts if job.id in ids)) for note in notes]
        own = grouped((note, [shard_map.of_job(note.lease.queue, note.lease.id)]) for note in notes)
        answers = await asyncio.gather(*(shards[number].note(each) for number, each in own.items()))
        lost = {(lease.id, lease.fence) for each in answers for lease in each}
        missed = [note for note in notes if (note.lease.id, note.lease.fence) in lost]
        return gone + [note.lease for note in missed if not await self._note_elsewhere(note)]

    async def _note_elsewhere(self, note: Note) -> bool:
        """As for outcomes."""
        own = self._group.shard_map.of_job(note.lease.queue, note.lease.id)
        for other in self._group.of_queue(note.lease.queue):
            if other.number != own and not await other.note([note]):
                return True
        return False


def _leads_on(settled: tuple[Lease, Outcome]) -> bool:
    """Whether something may be put because of it, perhaps in another shard."""
    lease, outcome = settled
    match outcome:
        case Done(emit=emit, opens=opens) | Dead(emit=emit, opens=opens):
            return bool(emit or opens) or lease.batch is not None
        case Retried(queue=queue):
            return queue is not None
    return lease.batch is not None


def _with_first_trouble(answers: Iterable[T | BaseException]) -> tuple[list[T], EngineError | None]:
    """What was answered, and the first trouble; what is no trouble of an engine is raised."""
    fine: list[T] = []
    trouble = None
    for answer in answers:
        if isinstance(answer, EngineError):
            trouble = trouble or answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            fine.append(answer)
    return fine, trouble

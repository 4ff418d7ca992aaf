"""Which shard of an app each thing lives in: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from propolis.core.envelope import Envelope
from propolis.engines.redis.client.slots import slot_of
from propolis.errors import BadSetting

MAX_SHARDS = 256


class ShardMap:
    """A number of shards, each whole in one slot.  A name lives in the shard that follows from its slot.

    `partitions` are the queues that live in several: in how many.  A job of theirs goes by its id.
    """

    def __init__(self, count: int, partitions: Mapping[str, int] | None = None) -> None:
        if not 2 <= count <= MAX_SHARDS:
            raise BadSetting(f"shards={count}: write a number from 2 to {MAX_SHARDS}")
        for queue, n in (partitions or {}).items():
            if not 1 <= n <= count:
                raise BadSetting(
                    f"partitions={queue}:{n}: write a number from 1 to {count}, which is the number of shards"
                )
        self.count = count
        self.partitions = dict(partitions or {})

    def of(self, name: str) -> int:
        return slot_of(name.encode()) % self.count

    def of_queue(self, queue: str) -> list[int]:
        first = self.of(queue)
        return [(first + n) % self.count for n in range(self.partitions.get(queue, 1))]

    def of_job(self, queue: str, job_id: str) -> int:
        shards = self.of_queue(queue)
        return shards[0] if len(shards) == 1 else shards[slot_of(job_id.encode()) % len(shards)]

    def ways(
        self, jobs: Iterable[Envelope], *, claim: bool = False, around: Mapping[str, str] | None = None
    ) -> dict[str, list[int]]:
        """For each queue the shards that its jobs pass: of batches, of keys, of ids to be claimed.

        `around` are the parents of batches that are opened in the same step: those go by their shards, too.
        """
        stops: list[dict[str, dict[int, None]]] = [{}, {}, {}, {}]
        for job in jobs:
            parent = around.get(job.batch) if around and job.batch is not None else None
            names = (parent, job.batch, job.unique, job.id if claim and job.chosen else None)
            for stop, name in zip(stops, names, strict=True):
                if name is not None:
                    stop.setdefault(job.queue, {})[self.of(name)] = None
        queues = {queue for stop in stops for queue in stop}
        return {
            queue: list(dict.fromkeys(shard for stop in stops for shard in stop.get(queue, ())))
            for queue in queues
        }

    def way_of(
        self, job: Envelope, ways: Mapping[str, Sequence[int]], around: Mapping[str, str] | None = None
    ) -> list[int]:
        """Its own batch first, on the way of that: nothing that is sent there later must overtake it."""
        parent = around.get(job.batch) if around and job.batch is not None else None
        own = [self.of(name) for name in (parent, job.batch) if name is not None]
        return list(dict.fromkeys([*own, *ways.get(job.queue, ())]))

"""Where things live when an app is spread over the slots of a cluster: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from skep.brokers.redis_slots import slot_of
from skep.errors import BadSetting
from skep.job import Job

MOST_HOMES = 256


class Homes:
    """A number of homes, each whole in one slot.  A name lives in the home that follows from its slot.

    `parts` are the queues that live in several: in how many.  A job of theirs goes by its id.
    """

    def __init__(self, count: int, parts: Mapping[str, int] | None = None) -> None:
        if not 2 <= count <= MOST_HOMES:
            raise BadSetting(f"homes={count}: write a number from 2 to {MOST_HOMES}")
        for queue, n in (parts or {}).items():
            if not 1 <= n <= count:
                raise BadSetting(
                    f"parts={queue}:{n}: write a number from 1 to {count}, which is that of homes"
                )
        self.count = count
        self.parts = dict(parts or {})

    def of(self, name: str) -> int:
        return slot_of(name.encode()) % self.count

    def of_queue(self, queue: str) -> list[int]:
        first = self.of(queue)
        return [(first + n) % self.count for n in range(self.parts.get(queue, 1))]

    def of_job(self, queue: str, job_id: str) -> int:
        homes = self.of_queue(queue)
        return homes[0] if len(homes) == 1 else homes[slot_of(job_id.encode()) % len(homes)]

    def ways(self, jobs: Iterable[Job], *, claim: bool = False) -> dict[str, list[int]]:
        """For each queue the homes that its jobs pass: of batches, of keys, of ids that are to be claimed."""
        stops: list[dict[str, dict[int, None]]] = [{}, {}, {}]
        for job in jobs:
            names = (job.batch, job.unique, job.id if claim and job.chosen else None)
            for stop, name in zip(stops, names, strict=True):
                if name is not None:
                    stop.setdefault(job.queue, {})[self.of(name)] = None
        queues = {queue for stop in stops for queue in stop}
        return {
            queue: list(dict.fromkeys(home for stop in stops for home in stop.get(queue, ())))
            for queue in queues
        }

    def way_of(self, job: Job, ways: Mapping[str, Sequence[int]]) -> list[int]:
        """Its own batch first: nothing that is sent there later must overtake it."""
        own = [] if job.batch is None else [self.of(job.batch)]
        return list(dict.fromkeys([*own, *ways.get(job.queue, ())]))

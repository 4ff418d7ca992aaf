"""From which places of a queue on there are jobs, as the last claims have shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from propolis.engines.postgres.client import Row

FLOOR_FOR = 1.0  # seconds until a claim begins at the front again
SURE_AFTER = 0.25  # seconds within which whoever puts has committed, unless in a long transaction

Floor = tuple[int, int]


class Floors:
    """Below which places of each queue there was nothing left when we last took something.

    Only a hint that keeps claims from walking over what is gone, and only for a moment: a job that was put
    in a long transaction has a place below the floor when it appears.  One that comes back short looks again
    from a floor that is `sure`: a place that was taken so long ago that all before it have appeared, and that
    was still below all others when a claim had seen the end of the line.  The time is that up to which all
    that was delayed has joined its line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, Floor] = {}
        self._sure: dict[str, Floor] = {}
        self._taken: dict[str, list[tuple[float, Floor]]] = {}  # the last two, at a distance in time
        self._due: dict[str, int] = {}
        self._since = 0.0

    def of(self, queues: Iterable[str]) -> tuple[list[int | None], ...]:
        """Priorities and places, those that are sure, and times, of these queues."""
        now = self._clock()
        if now - self._since > FLOOR_FOR:
            self._known.clear()
            self._sure.clear()
            self._due.clear()
            self._since = now
        none = (None, None)
        floors = [
            (*self._known.get(queue, none), *self._sure.get(queue, none), self._due.get(queue))
            for queue in queues
        ]
        return tuple(map(list, zip(*floors, strict=True))) or ([], [], [], [], [])

    def learn(self, wants: Mapping[str, int], rows: Sequence[Row], limit: int | None, now_us: int) -> None:
        """From the answer to a claim.  One that came back short has seen the end of the line: no floor."""
        taken: Counter[str] = Counter()
        more_due = {row["queue"] for row in rows if row["ids"] is None}
        for row in rows:
            if row["ids"] is None:
                continue
            queue, place = row["queue"], row["pos"]
            taken[queue] += len(row["ids"])
            if place > 0:
                self._known[queue] = (row["rank"], place)
                self._remember(queue, (row["rank"], place))
        left = sum(wants.values()) if limit is None else limit
        for queue, want in wants.items():
            if taken[queue] < min(want, left):
                self._known.pop(queue, None)
                self._be_sure(queue)
            if min(want, left) > 0 and queue not in more_due:
                self._due[queue] = now_us
            left -= taken[queue]

    def _remember(self, queue: str, floor: Floor) -> None:
        kept = self._taken.setdefault(queue, [])
        if not kept or self._clock() - kept[-1][0] >= SURE_AFTER:
            kept[:] = [*kept[-1:], (self._clock(), floor)]

    def _be_sure(self, queue: str) -> None:
        for at, floor in self._taken.get(queue, ()):
            if self._clock() - at >= SURE_AFTER:
                self._sure[queue] = floor

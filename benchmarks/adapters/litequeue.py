"""litequeue on SQLite: the plain loop of its documentation."""

from __future__ import annotations

import time

import litequeue

from adapters.protocol import Bodies, Jobs, Peer, main

IDLE = 0.005
LOCKED = 15


class Litequeue(Peer):
    distribution = "litequeue"
    settings = (
        "WAL, synchronous=NORMAL (its own choice: less durable than the others here); pop, run, done;"
        f" retry() of what list_locked({LOCKED}) finds, once a second; looks again after {IDLE} s when empty"
    )

    def send(self, bodies: Bodies) -> None:
        queue = self._open()
        for body in bodies:
            queue.put(body)

    def work(self, jobs: Jobs) -> None:
        queue = self._open()
        looked = time.monotonic()
        while True:
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                for locked in list(queue.list_locked(LOCKED)):
                    queue.retry(locked.message_id)
            message = queue.pop()
            if message is None:
                time.sleep(IDLE)
                continue
            jobs.run(message.data)
            queue.done(message.message_id)

    def _open(self) -> litequeue.LiteQueue:
        return litequeue.LiteQueue(self.url.removeprefix("sqlite:///"), timeout=30)


if __name__ == "__main__":
    main(Litequeue)

"""huey, on Redis or on SQLite."""

from __future__ import annotations

import logging
from typing import Any

import huey

from adapters.protocol import Bodies, Jobs, Peer, main

WORKERS = {"redis": 8, "sqlite": 1}
DELAY = 0.01


class Huey(Peer):
    distribution = "huey"

    @property
    def settings(self) -> str:  # type: ignore[override]  # it depends on the engine
        if self._engine == "redis":
            return f"RedisHuey with hiredis (blocking pop), results=False, {WORKERS['redis']} threads"
        return (
            "SqliteHuey (WAL, synchronous=FULL: its default), results=False, 1 thread,"
            f" looks again after {DELAY} s when empty"
        )

    @property
    def _engine(self) -> str:
        return "redis" if self.url.startswith("redis") else "sqlite"

    def send(self, bodies: Bodies) -> None:
        _, job = self._open(None)
        for body in bodies:
            job(body)

    def work(self, jobs: Jobs) -> None:
        logging.getLogger("huey").setLevel(logging.WARNING)
        queue, _ = self._open(jobs)
        queue.create_consumer(
            workers=WORKERS[self._engine],
            worker_type="thread",
            periodic=False,
            initial_delay=DELAY,
            max_delay=DELAY,
        ).run()

    def _open(self, jobs: Jobs | None) -> tuple[Any, Any]:
        if self._engine == "redis":
            queue = huey.RedisHuey("bench", url=self.url, results=False)
        else:
            path = self.url.removeprefix("sqlite:///")
            queue = huey.SqliteHuey("bench", filename=path, results=False)

        @queue.task(name="job")
        def job(body: str) -> None:
            assert jobs is not None
            jobs.run(body)

        return queue, job


if __name__ == "__main__":
    main(Huey)

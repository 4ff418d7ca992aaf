"""rq on Redis."""

from __future__ import annotations

import importlib

import redis
import rq

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

PATH = "adapters.rq.job"  # rq imports it by name, also when this module runs as a program
JOBS: list[Jobs] = []


def job(body: str) -> None:
    JOBS[0].run(body)


class RQ(BulkPeer):
    distribution = "rq"
    settings = (
        "SimpleWorker (no fork per job), hiredis, result_ttl=0, no description; bulk is enqueue_many();"
        " a job of a killed worker fails after its timeout (180 s, its default)"
    )

    def send(self, bodies: Bodies) -> None:
        queue = self._queue()
        for body in bodies:
            queue.enqueue(PATH, body, result_ttl=0, description="")

    def bulk(self, bundles: Bundles) -> None:
        queue = self._queue()
        for bundle in bundles.lists():
            queue.enqueue_many(
                [queue.prepare_data(PATH, (body,), result_ttl=0, description="") for body in bundle]
            )

    def work(self, jobs: Jobs) -> None:
        importlib.import_module("adapters.rq").JOBS.append(jobs)
        queue = self._queue()
        rq.SimpleWorker([queue], connection=queue.connection).work(logging_level="WARNING")

    def _queue(self) -> rq.Queue:
        return rq.Queue("bench", connection=redis.Redis.from_url(self.url))


if __name__ == "__main__":
    main(RQ)

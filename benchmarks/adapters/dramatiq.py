"""dramatiq on Redis."""

from __future__ import annotations

import threading

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AgeLimit, Callbacks, Pipelines, Retries, ShutdownNotifications, TimeLimit

from adapters.protocol import Bodies, Jobs, Peer, main

THREADS = 8


class Dramatiq(Peer):
    distribution = "dramatiq"
    settings = f"hiredis, its default middleware, {THREADS} threads (its default)"

    def send(self, bodies: Bodies) -> None:
        job = self._actor(None)
        for body in bodies:
            job.send(body)

    def work(self, jobs: Jobs) -> None:
        job = self._actor(jobs)
        dramatiq.Worker(job.broker, worker_threads=THREADS).start()
        threading.Event().wait()

    def _actor(self, jobs: Jobs | None) -> dramatiq.Actor[[str], None]:
        middleware = [AgeLimit(), TimeLimit(), ShutdownNotifications(), Callbacks(), Pipelines(), Retries()]
        dramatiq.set_broker(RedisBroker(url=self.url, middleware=middleware))

        @dramatiq.actor(actor_name="job")
        def job(body: str) -> None:
            assert jobs is not None
            jobs.run(body)

        return job


if __name__ == "__main__":
    main(Dramatiq)

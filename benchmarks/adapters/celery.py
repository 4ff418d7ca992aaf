"""celery on Redis."""

from __future__ import annotations

import celery

from adapters.protocol import Bodies, Jobs, Peer, main

PREFETCH = 100


class Celery(Peer):
    distribution = "celery"
    settings = (
        f"--pool=solo (one process), without gossip, mingle and heartbeat, prefetch {PREFETCH},"
        " ignore_result, acks_late (so that a job is kept until it ran); visibility_timeout 1 h (its default)"
    )

    def send(self, bodies: Bodies) -> None:
        _, job = self._open(None)
        for body in bodies:
            job.delay(body)

    def work(self, jobs: Jobs) -> None:
        app, _ = self._open(jobs)
        off = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        app.worker_main(["worker", "--pool=solo", "--loglevel=WARNING", *off])

    def _open(self, jobs: Jobs | None) -> tuple[celery.Celery, celery.Task]:
        app = celery.Celery("bench", broker=self.url)
        app.conf.update(
            task_ignore_result=True,
            task_acks_late=True,
            worker_prefetch_multiplier=PREFETCH,
            broker_connection_retry_on_startup=True,
        )

        @app.task(name="job")
        def job(body: str) -> None:
            assert jobs is not None
            jobs.run(body)

        return app, job


if __name__ == "__main__":
    main(Celery)

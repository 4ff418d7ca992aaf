"""DBOS on PostgreSQL."""

from __future__ import annotations

import threading

import dbos

from adapters.protocol import Bodies, Jobs, Peer, main

CONCURRENCY = 100
POLL = 0.05


class DBOS(Peer):
    distribution = "dbos"
    settings = (
        f"a workflow without steps per job, worker_concurrency={CONCURRENCY}, polling_interval_sec={POLL}"
        " (default 1), DBOSClient.enqueue(); a restarted executor recovers what it had"
    )

    def setup(self) -> None:
        self._launch(None)

    def send(self, bodies: Bodies) -> None:
        client = dbos.DBOSClient(system_database_url=self.url, application_name="bench")
        options: dbos.EnqueueOptions = {"queue_name": "bench", "workflow_name": "job"}
        for body in bodies:
            client.enqueue(options, body)

    def work(self, jobs: Jobs) -> None:
        self._launch(jobs)
        threading.Event().wait()

    def _launch(self, jobs: Jobs | None) -> None:
        dbos.DBOS(
            config={
                "name": "bench",
                "system_database_url": self.url,
                "application_version": "1",
                "log_level": "WARNING",
            }
        )

        @dbos.DBOS.workflow(name="job")
        async def job(body: str) -> None:
            assert jobs is not None
            await jobs.arun(body)

        dbos.DBOS.launch()
        dbos.DBOS.register_queue("bench", worker_concurrency=CONCURRENCY, polling_interval_sec=POLL)


if __name__ == "__main__":
    main(DBOS)

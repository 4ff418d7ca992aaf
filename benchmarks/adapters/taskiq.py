"""taskiq: on Redis as a list or as a stream, on PostgreSQL by taskiq-postgres."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import taskiq
import uvloop
from taskiq.api import run_receiver_task

from adapters.protocol import Bodies, Jobs, Peer, main

MAX_TASKS = 100


class Taskiq(Peer):
    distribution = "taskiq"

    def version(self) -> str:
        beside = "taskiq-postgres" if self._kind == "postgres" else "taskiq-redis"
        return f"{super().version()}, {beside} {importlib.metadata.version(beside)}"

    @property
    def settings(self) -> str:  # type: ignore[override]  # it depends on the broker
        kinds = {
            "list": "ListQueueBroker: no acknowledgement, what a killed worker held is gone",
            "stream": "RedisStreamBroker: xread_count 100 and idle_timeout 10 min (its defaults)",
            "postgres": "AsyncpgBroker: LISTEN/NOTIFY only, so what no worker hears is not delivered;"
            " here the worker listens, stopped, while the jobs are sent",
        }
        return f"{kinds[self._kind]}; uvloop, max_async_tasks={MAX_TASKS}, no result backend"

    @property
    def needs_worker_first(self) -> bool:  # type: ignore[override]  # it depends on the broker
        return self._kind == "postgres"

    @property
    def _kind(self) -> str:
        return str(self.options["variant"])

    def setup(self) -> None:
        """The stream's group and the table are made by whoever starts first."""

        async def run() -> None:
            broker, _ = self._open(None)
            await broker.startup()

        uvloop.run(run())

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            broker, job = self._open(None)
            await broker.startup()
            async for body in bodies:
                await job.kiq(body)

        uvloop.run(run())

    def work(self, jobs: Jobs) -> None:
        async def run() -> None:
            broker, _ = self._open(jobs)
            await broker.startup()
            await run_receiver_task(broker, max_async_tasks=MAX_TASKS, max_prefetch=MAX_TASKS)

        uvloop.run(run())

    def _open(self, jobs: Jobs | None) -> tuple[taskiq.AsyncBroker, Any]:
        broker = self._broker()

        @broker.task("job")
        async def job(body: str) -> None:
            assert jobs is not None
            await jobs.arun(body)

        return broker, job

    def _broker(self) -> taskiq.AsyncBroker:
        """Each environment has only the driver of its own broker."""
        if self._kind == "postgres":
            from taskiq_pg.asyncpg import AsyncpgBroker

            return AsyncpgBroker(self.url)
        from taskiq_redis import ListQueueBroker, RedisStreamBroker

        return ListQueueBroker(self.url) if self._kind == "list" else RedisStreamBroker(self.url)


if __name__ == "__main__":
    main(Taskiq)

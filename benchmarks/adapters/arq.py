"""arq on Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import arq
from arq.connections import RedisSettings

from adapters.protocol import Bodies, Jobs, Peer, main

POLL = 0.01
MAX_JOBS = 100


class Arq(Peer):
    distribution = "arq"
    settings = (
        f"hiredis, max_jobs={MAX_JOBS}, poll_delay={POLL} s (default 0.5), keep_result=0; timeout 300 s"
    )

    def send(self, bodies: Bodies) -> None:
        async def run() -> None:
            pool = await arq.create_pool(RedisSettings.from_dsn(self.url))
            async for body in bodies:
                await pool.enqueue_job("job", body)

        asyncio.run(run())

    def work(self, jobs: Jobs) -> None:
        async def job(_: dict[str, Any], body: str) -> None:
            await jobs.arun(body)

        async def run() -> None:
            await arq.Worker(
                [arq.func(job, name="job", keep_result=0)],
                redis_settings=RedisSettings.from_dsn(self.url),
                max_jobs=MAX_JOBS,
                poll_delay=POLL,
                keep_result=0,
                log_results=False,
                handle_signals=False,
            ).async_run()

        asyncio.run(run())


if __name__ == "__main__":
    main(Arq)

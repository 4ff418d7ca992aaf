"""What one command costs over our own connection, and over redis-py: processor time of the client, per call.

    python benchmarks/redis_link.py [--calls 20000] [--uvloop]

Both run in one process, in turns, against one private server; compare them with each other and not with
another day's figures.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as redis_py

from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.script import LuaScript
from propolis.engines.redis.client.target import target_of
from propolis.testing.servers.redis import redis

ROUNDS = 5
BODY = b"x" * 300
COUNT = LuaScript("count", b"return #ARGV")

Call = Callable[[], Awaitable[Any]]


async def one_after_another(call: Call, calls: int) -> None:
    for _ in range(calls):
        await call()


async def side_by_side(call: Call, calls: int) -> None:
    """Fifty callers."""
    await asyncio.gather(*(one_after_another(call, calls // 50) for _ in range(50)))


async def measured(
    run: Callable[[Call, int], Awaitable[None]], call: Call, calls: int
) -> tuple[float, float]:
    """Calls per second, and µs of our own processor time per call."""
    began, busy = time.perf_counter(), time.process_time()
    await run(call, calls)
    return calls / (time.perf_counter() - began), (time.process_time() - busy) / calls * 1e6


async def compare(url: str, calls: int) -> None:
    link = RedisLink(target_of(Address(url)))
    await link.open()
    peer = redis_py.Redis.from_url(url)
    script = peer.register_script(COUNT.text)
    bundle = [BODY] * 100
    kinds: list[tuple[str, Call, Call]] = [
        ("SET of 300 bytes", lambda: link.command("SET", b"key", BODY), lambda: peer.set(b"key", BODY)),
        (
            "script, 1 argument",
            lambda: link.call(COUNT, [b"key"], [BODY]),
            lambda: script(keys=[b"key"], args=[BODY]),
        ),
        (
            "script, 100 arguments",
            lambda: link.call(COUNT, [b"key"], bundle),
            lambda: script(keys=[b"key"], args=bundle),
        ),
    ]
    print(f"{'':24}{'':20}{'propolis':>22}{'redis-py':>22}{'less':>8}")
    for name, ours, theirs in kinds:
        for run in (one_after_another, side_by_side):
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for _ in range(ROUNDS):
                for own, call in ((True, ours), (False, theirs)):
                    found[own].append(await measured(run, call, calls // (10 if "100" in name else 1)))
            rows = [tuple(map(statistics.median, zip(*found[own], strict=True))) for own in (True, False)]
            shown = "".join(f"{rate:>12,.0f}/s {cost:5.1f} µs" for rate, cost in rows)
            print(f"{name:24}{run.__name__.replace('_', ' '):20}{shown}{rows[1][1] / rows[0][1]:7.1f}x")
    await link.close()
    await peer.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--uvloop", action="store_true")
    options = parser.parse_args()
    factory = None
    if options.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    with redis() as server, asyncio.Runner(loop_factory=factory) as runner:
        runner.run(compare(server.url, options.calls))


if __name__ == "__main__":
    main()

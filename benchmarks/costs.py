"""What each verb costs the storage when there is ten times as much of everything (L5).

    python benchmarks/costs.py sqlite postgres redis [--size 10000] [--only waiting]
                                                     [--write docs/benchmarks.md]

Each on a private storage of its own.  A line is a verb: the most that it costs in any dimension at ten times
the size, the dimension with which it grows most, and the exponent of that growth (1 is linear, 0 is none).
Where the size is small, looks count no further than a tenth of it.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from harness.document import between_markers
from harness.private import private
from propolis.core.protocols import COUNTED, Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.bounds import counting_up_to
from propolis.testing.engines.costs.growth import STILL_GROWING, Growth, least_growths, table
from propolis.testing.engines.costs.meters import (
    Meter,
    PostgresMeter,
    RedisMeter,
    SQLiteMeter,
    metered_postgres,
    metered_redis,
    metered_sqlite,
)
from propolis.testing.engines.costs.stages import DIMENSIONS

UNITS = {"sqlite": SQLiteMeter.unit, "postgres": PostgresMeter.unit, "redis": RedisMeter.unit}


def report(kind: str, dimensions: list[str], size: int) -> list[str]:
    sizes = (size, 10 * size)
    with private(kind) as storage:

        def opened(clock: FakeClock) -> AbstractAsyncContextManager[tuple[Engine, Meter]]:
            name = f"costs_{uuid.uuid4().hex}"
            match kind:
                case "sqlite":
                    folder = Path(storage.url.removeprefix("sqlite:///")).parent
                    return metered_sqlite(folder / f"{name}.db", clock)
                case "postgres":
                    return metered_postgres(storage.url, name, clock)
                case _:
                    return metered_redis(storage.url, name, clock)

        counted, known = min(COUNTED, size // 10), STILL_GROWING.get(kind, frozenset())
        found: list[Growth] = []
        with counting_up_to(counted):
            for dimension in dimensions:
                growing = least_growths(opened, dimension, sizes, counted=counted, known=known)
                found += asyncio.run(growing)
    return [f"#### {kind}", "", *table(found, sizes, UNITS[kind]), ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="+", choices=UNITS)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--only", choices=DIMENSIONS)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    dimensions = [options.only] if options.only else list(DIMENSIONS)
    lines = [line for kind in options.kinds for line in report(kind, dimensions, options.size)]
    print("\n".join(lines))
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        page = between_markers(page, "costs", "\n".join(lines), "costs.py")
        options.write.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

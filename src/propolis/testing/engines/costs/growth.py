"""What the verbs cost at two sizes of a dimension, and how fast that grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager

from msgspec import Struct

from propolis.core.protocols import COUNTED, Engine
from propolis.testing.clock import FakeClock
from propolis.testing.engines.costs.meters import Meter
from propolis.testing.engines.costs.stages import DIMENSIONS, Stage, furnish
from propolis.testing.engines.costs.verbs import COUNTING, LAST, VERBS, Verb

TRIES = 3
# What is not bounded yet, by the name of the engine, as docs/benchmarks.md says.
STILL_GROWING: dict[str, frozenset[str]] = {}
MOST = 0.2  # the exponent: ten times as much costs at most 1.6 times as much

OpenMetered = Callable[[FakeClock], AbstractAsyncContextManager[tuple[Engine, Meter]]]


class Growth(Struct, frozen=True):
    """The cost of a verb at the small and at the large size; `floor` is what counts as nothing."""

    dimension: str
    verb: str
    small: float
    large: float
    ratio: float
    floor: float

    @property
    def exponent(self) -> float:
        small, large = max(self.small, self.floor), max(self.large, self.floor)
        return math.log(large / small) / math.log(self.ratio)

    @property
    def bounded(self) -> bool:
        return self.exponent <= MOST

    def __str__(self) -> str:
        return (
            f"{self.verb} with {self.dimension}: {self.small:,.0f} → {self.large:,.0f} ({self.exponent:.2f})"
        )


async def growths(
    open_metered: OpenMetered, dimension: str, sizes: tuple[int, int], *, counted: int = COUNTED
) -> list[Growth]:
    """Each verb on storage that has so much of this, and on one that has more; the storages are empty.

    Verbs that count are left out where the small one has less than is `counted`: see `bounds`.
    """
    small, large = sizes
    verbs = VERBS | COUNTING if small >= counted else VERBS
    (less, floor), (more, _) = [await costs(open_metered, dimension, size, verbs) for size in sizes]
    return [Growth(dimension, verb, less[verb], more[verb], large / small, floor) for verb in less]


async def least_growths(
    open_metered: OpenMetered,
    dimension: str,
    sizes: tuple[int, int],
    *,
    counted: int = COUNTED,
    known: Collection[str] = (),
) -> list[Growth]:
    """The same, and again where something but what is `known` grows: of each verb the least growth.

    What grows does so each time; what a neighbour has cost, once.
    """
    least: dict[str, Growth] = {}
    for _ in range(TRIES):
        for each in await growths(open_metered, dimension, sizes, counted=counted):
            if each.verb not in least or each.exponent < least[each.verb].exponent:
                least[each.verb] = each
        if all(each.bounded or each.verb in known for each in least.values()):
            break
    return list(least.values())


async def costs(
    open_metered: OpenMetered, dimension: str, size: int, verbs: Mapping[str, Verb]
) -> tuple[dict[str, float], float]:
    clock = FakeClock()
    async with open_metered(clock) as (engine, meter):
        stage = Stage(engine, clock)
        await furnish(stage)
        await DIMENSIONS[dimension](stage, size)
        found = {name: await cost(stage, meter, verb, meter.repeats) for name, verb in verbs.items()}
        found |= {name: await cost(stage, meter, verb, 1) for name, verb in LAST.items()}
        return found, meter.floor


async def cost(stage: Stage, meter: Meter, verb: Verb, repeats: int) -> float:
    await meter.filled()
    found = []
    for _ in range(repeats):
        async for call in verb(stage):
            before = await meter.read()
            await call()
            found.append(await meter.read() - before)
    return min(found)


def table(found: Iterable[Growth], sizes: tuple[int, int], unit: str) -> list[str]:
    """As Markdown, a line for each verb: what it costs at most, and with what it grows most."""
    rows: dict[str, list[Growth]] = {}
    for each in found:
        rows.setdefault(each.verb, []).append(each)
    lines = [
        f"| verb | {unit}, at {sizes[1]:,} | grows most with | exponent |",
        "| --- | ---: | --- | ---: |",
    ]
    for verb, growing in rows.items():
        worst = max(growing, key=lambda each: each.exponent)
        grown = worst.exponent > 0.005
        lines.append(
            f"| `{verb}` | {max(each.large for each in growing):,.0f} | "
            f"{worst.dimension if grown else '–'} | {worst.exponent if grown else 0:.2f} |"
        )
    return lines

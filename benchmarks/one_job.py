"""Where each microsecond of CPU goes, from `enqueue` to settled, on each engine.

    python benchmarks/one_job.py [--engine redis] [--jobs 50000] [--write docs/benchmarks.md]

One process puts no-op jobs in bulk, a thousand at a time, and then runs them with ten slots, while its stack
is looked at a thousand times per second of CPU; the CPU of the server is read beside it.  What C code does
(the drivers, msgspec, the event loop) counts for the Python function that called it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import propolis
from harness.document import between_markers
from harness.private import KINDS, Private, private
from harness.results import machine
from harness.sampling import Samples, sampled
from propolis.bench.serving import drain, settings
from propolis.bench.target import BenchPlace, bench_target
from propolis.bench.tasks import PAYLOAD, Tasks
from propolis.worker.supervisor import loop_factory
from propolis.worker.worker import Worker

BULK = 1000
SLOTS = 10
HOME = str(Path(propolis.__file__).parent)
LEAST = 0.05  # microseconds: what is less is summed up

LOOP = "the event loop, and what it calls in C"

# Whose file it is; the first that fits.  What stands in no list counts for whoever called it.
PARTS: list[tuple[str, str]] = [
    (f"{HOME}/bench/", "the task itself"),
    (f"{HOME}/core/wire.py", "the envelope: to JSON and back"),
    (f"{HOME}/app/signature.py", "the arguments: to JSON and back"),
    (f"{HOME}/app/task.py", "making the job"),
    (f"{HOME}/core/envelope.py", "making the job"),
    (f"{HOME}/core/ids.py", "making the job"),
    (f"{HOME}/app/client/", "the client: pieces, tokens"),
    (f"{HOME}/worker/pump.py", "the pump: exchanges"),
    (f"{HOME}/worker/keeper.py", "the keeper: leases held"),
    (f"{HOME}/worker/slots.py", "the slots: one coroutine each"),
    (f"{HOME}/worker/", "running one: context, outcome"),
    (f"{HOME}/app/context.py", "running one: context, outcome"),
    (f"{HOME}/engines/redis/client/", "the driver"),
    (f"{HOME}/engines/", "the engine: rows and arguments"),
    ("/asyncpg/", "the driver"),
    ("/asyncio/", LOOP),
]


assert all(Path(begin).exists() for begin, _ in PARTS if begin.startswith(HOME)), (
    "a file was moved: name it anew"
)


def part_of(file: str, _: str) -> str | None:
    return next((part for begin, part in PARTS if begin in file), None)


@dataclass(slots=True)
class Cost:
    """Microseconds per job of one phase."""

    server: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def client(self) -> float:
        return sum(self.parts.values())


@dataclass(slots=True)
class Profile:
    kind: str
    durability: str
    put: Cost
    run: Cost


async def phase(server: Private, jobs: int, work: Callable[[], Coroutine[Any, Any, object]]) -> Cost:
    began = server.cpu_seconds()
    samples: Samples
    with sampled(part_of, waiting=LOOP) as samples:
        await work()
    each = 1e6 / jobs
    parts = {part: seconds * each for part, seconds in samples.seconds().items()}
    return Cost((server.cpu_seconds() - began) * each, parts)


async def profile(kind: str, server: Private, jobs: int) -> Profile:
    async with bench_target(server.url).place(server.url) as place:
        tasks = Tasks(place)
        await fill(tasks, BULK)  # connections, plans, scripts
        await run(tasks, place, BULK)
        put = await phase(server, jobs, lambda: fill(tasks, jobs))
        ran = await phase(server, jobs, lambda: run(tasks, place, jobs))
        await tasks.app.aclose()
    return Profile(kind, server.durability, put, ran)


async def fill(tasks: Tasks, jobs: int) -> None:
    for start in range(0, jobs, BULK):
        await tasks.noop.many([PAYLOAD] * min(BULK, jobs - start)).aenqueue()


async def run(tasks: Tasks, place: BenchPlace, jobs: int) -> None:
    await drain(tasks, Worker(tasks.app, settings(place, SLOTS)), jobs)


# --- what is shown -----------------------------------------------------------------------


def table(profiles: list[Profile]) -> str:
    """A row for each part, a column for each engine and phase."""
    lines = []
    for title, cost_of in (("put in bulk", _put), ("run and settled", _run)):
        costs = [cost_of(each) for each in profiles]
        lines += [_row([title, *(each.kind for each in profiles)]), _row(["---", *["--:"] * len(profiles)])]
        parts = {part for cost in costs for part, value in cost.parts.items() if value >= LEAST}
        for part in sorted(parts, key=lambda part: -max(cost.parts.get(part, 0.0) for cost in costs)):
            lines.append(_row([part, *(_us(cost.parts.get(part, 0.0)) for cost in costs)]))
        small = [sum(v for p, v in cost.parts.items() if p not in parts) for cost in costs]
        if any(value >= LEAST for value in small):
            lines.append(_row(["the rest", *map(_us, small)]))
        lines.append(_row(["**this process**", *(f"**{cost.client:.1f}**" for cost in costs)]))
        lines.append(_row(["**the server**", *(f"**{_us(cost.server)}**" for cost in costs)]))
        lines.append("")
    return "\n".join(lines)


def _put(found: Profile) -> Cost:
    return found.put


def _run(found: Profile) -> Cost:
    return found.run


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _us(value: float) -> str:
    return f"{value:.1f}" if value >= LEAST else "–"


def section(profiles: list[Profile], jobs: int) -> str:
    kinds = "; ".join(f"{each.kind}: {each.durability}" for each in profiles)
    return (
        f"Microseconds of CPU per job, {jobs:,} no-op jobs of 300 bytes. {machine()}. "
        f"Durability: {kinds}.\n\n"
        f"{table(profiles)}"
    )


def main(arguments: argparse.Namespace) -> None:
    profiles = []
    for kind in arguments.engine or KINDS:
        print(f"{kind} …", file=sys.stderr)
        with private(kind) as server, asyncio.Runner(loop_factory=loop_factory()) as runner:
            profiles.append(runner.run(profile(kind, server, arguments.jobs)))
    text = section(profiles, arguments.jobs)
    print(text)
    if arguments.write:
        document = arguments.write.read_text()
        arguments.write.write_text(between_markers(document, "one job", text, "one_job.py"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", choices=KINDS, help="may be given again; all by default")
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--write", type=Path, help="put the table into this document")
    main(parser.parse_args())

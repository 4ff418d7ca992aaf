"""`skep bench`: how fast is this engine, here and now, and how near to what it could do at most?"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import click
from msgspec.structs import asdict

from skep.address import masked
from skep.bench.figures import Figure, Summary, machine, summed_up
from skep.bench.ground import Place, ground_of
from skep.bench.measures import STEPS, Bench, Wanted
from skep.cli.output import Output
from skep.engines import open_engine
from skep.worker.supervisor import loop_factory

DEFAULT = "sqlite:///skep-bench.db"  # only its folder is used: what is measured is a file of its own


@click.command()
@click.argument("url", envvar="SKEP_URL", default=DEFAULT)
@click.option("--jobs", type=click.IntRange(100), default=20_000, show_default=True, help="Jobs per step.")
@click.option(
    "--backlog", type=click.IntRange(0), default=0, help="Jobs that wait behind those that are drained."
)
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs of each step.")
@click.option("--concurrency", type=click.IntRange(1), default=10, show_default=True, help="Slots.")
@click.option("--rate", type=click.FloatRange(1), help="Jobs per second of the steady load.")
@click.option(
    "--seconds", type=click.FloatRange(1), default=5, show_default=True, help="Of the steady load, each time."
)
@click.option(
    "--only", "steps", multiple=True, type=click.Choice([*STEPS]), help="Only this step; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON, each single run included.")
def bench(
    url: str,
    jobs: int,
    backlog: int,
    repeat: int,
    concurrency: int,
    rate: float | None,
    seconds: float,
    steps: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the engine at URL, beside a hand-written loop with the same durability and payload.

    Jobs that are there are not touched: SQLite is measured in a file beside the one that is named, PostgreSQL
    in a schema of its own, Redis under a prefix of its own, and all of it is removed afterwards.  The engine
    works at full speed meanwhile, so choose one that nobody waits for.

    \b
      skep bench                                   SQLite, in this folder
      skep bench memory:// --only drain            one step
      skep bench postgresql://localhost/db --json  for programs

    Read the column "of raw": it compares two loops of the same minute, on the same machine.
    """
    wanted = Wanted(jobs=jobs, backlog=backlog, slots=concurrency, load_rate=rate, load_seconds=seconds)
    chosen = ["raw", *(step for step in STEPS if step in steps)] if steps else [*STEPS]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_measure(url, wanted, list(dict.fromkeys(chosen)), repeat, Output(as_json)))


async def _measure(url: str, wanted: Wanted, steps: list[str], repeat: int, out: Output) -> None:
    ground = ground_of(url)
    figures: list[Figure] = []
    facts: dict[str, Any] = {"url": masked(url), **machine()}
    for turn in range(repeat):
        async with ground.place(url) as place:
            facts |= await _about(place) | await ground.about(place)
            say = functools.partial(_say, out, turn + 1)
            run = Bench(ground, place, wanted, say)
            for step in steps:
                figures += await run.run(step)
    summaries = summed_up(figures)
    out.document(
        {
            "facts": facts,
            "wanted": asdict(wanted),
            "figures": [asdict(each) for each in summaries],
            "runs": [asdict(each) for each in figures],
        }
    )
    out.facts(facts)
    out.table(["figure", ">median", "unit", ">lowest", ">highest", ">raw", ">of raw"], map(_row, summaries))


def _say(out: Output, turn: int, text: str) -> None:
    out.note(f"run {turn}: {text}")


async def _about(place: Place) -> dict[str, str]:
    engine = await open_engine(place.url)
    try:
        return {"engine": type(engine).__name__, "durability": engine.durability.name.lower()}
    finally:
        await engine.close()


def _row(summary: Summary) -> list[str]:
    return [
        summary.name,
        shown(summary.median),
        summary.unit,
        shown(summary.lowest),
        shown(summary.highest),
        "" if summary.raw is None else shown(summary.raw),
        "" if summary.of_raw is None else f"{summary.of_raw:.0%}",
    ]


def shown(value: float) -> str:
    """Three digits that matter, and no more than the measurement is worth."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""`propolis bench`: how fast is this engine, here and now, and how near to what it could do at most?"""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import click
from msgspec.structs import asdict

from propolis.bench.figures import Figure, Summary, machine, summed_up
from propolis.bench.measures import STEPS, Bench, Wanted
from propolis.bench.target import BenchPlace, bench_target
from propolis.cli.console.output import Output
from propolis.engines import open_engine
from propolis.engines.address import masked
from propolis.worker.supervisor import loop_factory

DEFAULT = "sqlite:///propolis-bench.db"  # only its folder is used: what is measured is a file of its own


@click.command()
@click.argument("url", envvar="PROPOLIS_URL", default=DEFAULT)
@click.option(
    "--jobs",
    type=click.IntRange(100),
    default=20_000,
    show_default=True,
    help="How many jobs each step takes.",
)
@click.option(
    "--backlog", type=click.IntRange(0), default=0, help="Jobs that wait behind those that are drained."
)
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="How often each step runs."
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="How many slots the worker has.",
)
@click.option("--rate", type=click.FloatRange(1), help="Jobs per second of the steady load.")
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=5,
    show_default=True,
    help="How long the steady load lasts, each time.",
)
@click.option(
    "--only",
    "steps",
    multiple=True,
    type=click.Choice([*STEPS]),
    help="Take only this step; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON, with each single run.")
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
    works at full speed meanwhile, so choose an engine that nobody waits for.

    \b
      propolis bench                                   SQLite, in this folder
      propolis bench memory:// --only drain            one step
      propolis bench postgresql://localhost/db --json  for programs

    Read the column "of raw": it compares two loops of the same minute, on the same machine.
    """
    wanted = Wanted(jobs=jobs, backlog=backlog, slots=concurrency, load_rate=rate, load_seconds=seconds)
    chosen = ["raw", *(step for step in STEPS if step in steps)] if steps else [*STEPS]
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_measure(url, wanted, list(dict.fromkeys(chosen)), repeat, Output(as_json)))


async def _measure(url: str, wanted: Wanted, steps: list[str], repeat: int, out: Output) -> None:
    target = bench_target(url)
    figures: list[Figure] = []
    about: dict[str, Any] = {"url": masked(url), **machine()}
    for turn in range(repeat):
        async with target.place(url) as place:
            about |= await _about(place) | await target.about(place)
            progress = functools.partial(_show_progress, out, turn + 1)
            run = Bench(target, place, wanted, progress)
            for step in steps:
                figures += await run.run(step)
    summaries = summed_up(figures)
    out.document(
        {
            "about": about,
            "wanted": asdict(wanted),
            "figures": [asdict(each) for each in summaries],
            "runs": [asdict(each) for each in figures],
        }
    )
    out.fields(about)
    out.table(["figure", ">median", "unit", ">lowest", ">highest", ">raw", ">of raw"], map(_row, summaries))


def _show_progress(out: Output, turn: int, text: str) -> None:
    out.note(f"run {turn}: {text}")


async def _about(place: BenchPlace) -> dict[str, str]:
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

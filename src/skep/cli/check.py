"""`skep check`: would the code that is here run the jobs that are there?"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator

import click
from msgspec import Struct
from msgspec.structs import asdict

from skep import wire
from skep.address import masked
from skep.broker import Filter, Watched
from skep.cli.session import PROBLEMS, Session, on_app
from skep.errors import BadSetting, BrokenPayload, EngineError, SkepError, UnknownTask
from skep.job import Record, State
from skep.registry import Registry

LOOK = 500  # jobs between two signs of life

_ENUM_VALUE = re.compile(r"(Invalid enum value) .*?( - at |$)")


class Problem(Struct, frozen=True):
    """What would break, for how many jobs, and one of them to look at."""

    what: str
    where: str
    why: str
    jobs: int = 0
    example: str = ""


@click.command()
@click.option("--queue", help="Look only at the jobs of this queue.")
@on_app
async def check(session: Session, queue: str | None) -> int | None:
    """Check settings, engine and tasks, and every queued job against the tasks' signatures of today.

    Run it with the new code before a deployment: jobs that were enqueued by the old code and that
    the new one could not run are listed, and the exit code is 1.
    """
    problems = task_problems(session.app) + schedule_problems(session.app)
    facts: dict[str, str | int] = {"url": masked(session.app.url), "tasks": len(session.app.tasks)}
    try:
        engine = await session.app.ready()
        facts |= {"engine": type(engine).__name__, "durability": engine.durability.name.lower()}
    except (EngineError, BadSetting) as error:
        problems.append(Problem("engine", str(facts["url"]), str(error)))
    else:
        if isinstance(engine, Watched):
            problems += [Problem("server", str(facts["url"]), why) for why in await engine.complaints()]
        if session.declares:
            looked, found = await job_problems(session, queue)
            facts["jobs"] = looked
            problems += found
    session.out.document({"ok": not problems, **facts, "problems": [asdict(each) for each in problems]})
    session.out.facts(facts)
    if not session.declares:
        session.out.note("note: tasks and queued jobs were not looked at: that needs the app (--app)")
    return tell(session, problems)


def tell(session: Session, problems: list[Problem]) -> int | None:
    if not problems:
        session.out.say("nothing would break")
        return None
    rows = [[each.what, each.where, each.why, each.jobs or None, each.example] for each in problems]
    session.out.table(["what", "where", "why", ">jobs", "example"], rows)
    return PROBLEMS


def task_problems(app: Registry) -> list[Problem]:
    found = []
    for task in app.tasks.values():
        try:
            task.signature.check()
        except BadSetting as error:
            found.append(Problem("task", task.name, str(error)))
    return found


def schedule_problems(app: Registry) -> list[Problem]:
    found = []
    for name, declared in app.declared_schedules.items():
        try:
            declared.schedule()
        except BadSetting as error:
            found.append(Problem("schedule", name, str(error)))
    return found


async def job_problems(session: Session, queue: str | None) -> tuple[int, list[Problem]]:
    """How many jobs were looked at, and what is wrong with them, the same kind counted together."""
    kinds: dict[tuple[str, str], tuple[int, str]] = {}
    looked = 0
    async for record in queued(session, queue):
        looked += 1
        if looked % LOOK == 0:
            sign_of_life(f"{looked:,} jobs looked at")
        if (why := fault(record, session.app)) is not None:
            count, example = kinds.get((record.task, why), (0, record.id))
            kinds[record.task, why] = count + 1, example
    sign_of_life("")
    return looked, [Problem("jobs", task, why, *found) for (task, why), found in kinds.items()]


async def queued(session: Session, queue: str | None) -> AsyncIterator[Record]:
    """Every job that may still be run, page by page."""
    for state in (State.READY, State.RUNNING):
        async for record in session.jobs.aeach(Filter(state=state, queue=queue)):
            yield record


def fault(record: Record, app: Registry) -> str | None:
    """Why a worker with this app could not run the job; in words that hold no value of it."""
    try:
        job = wire.decode(record.body)
        app.task_named(job.task).arguments(job)
    except UnknownTask:
        return "no such task is declared"
    except (BrokenPayload, BadSetting) as error:
        return _without_values(error)
    return None


def _without_values(error: SkepError) -> str:
    """Validators quote what they refuse: enums in their line, pydantic in the lines after the first."""
    [first, *_] = str(error).splitlines() or [type(error).__name__]
    return _ENUM_VALUE.sub(r"\1\2", first)


def sign_of_life(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)

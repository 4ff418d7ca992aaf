"""`propolis check`: would the code that is here run the jobs that are there?"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator

import click
from msgspec import Struct
from msgspec.structs import asdict

from propolis.app.registry import Registry
from propolis.cli.console.output import clean
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app
from propolis.core import wire
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Engine, Filter, Repairs, Watched
from propolis.engines.address import masked
from propolis.errors import BadSetting, BrokenPayload, EngineError, PropolisError, UnknownTask

SHOWN = 100  # faults of the storage
UNDECLARED = "no such task is declared"
SHOW_EVERY = 500  # jobs, so that whoever waits sees that it goes on

_ENUM_VALUE = re.compile(r"(Invalid enum value) .*?( - at |$)")


class Problem(Struct, frozen=True):
    """What would break, for how many jobs, and the id of one of them."""

    what: str
    where: str
    why: str
    jobs: int = 0
    example: str = ""


@click.command()
@click.option("--queue", help="Check only the jobs of this queue.")
@click.option("--repair", is_flag=True, help="Mend what is wrong in the storage itself.")
@looks_at_app
async def check(session: Session, queue: str | None, repair: bool) -> int | None:
    """Check settings, engine and tasks, and every queued job against the signature of its task.

    Run it with the new code before a deployment: it lists the jobs that the old code has enqueued and
    that the new code could not run, and then its exit code is 1.

    It also looks for what is wrong in the storage itself: jobs that stand nowhere, places without jobs,
    counters that differ from a recount, and unique keys and batches whose jobs are gone.  Only with --repair
    is anything changed.
    """
    session.app.client.looks = not repair
    problems = task_problems(session.app) + schedule_problems(session.app)
    fields: dict[str, str | int] = {"url": masked(session.app.url), "tasks": len(session.app.tasks)}
    try:
        engine = await session.app.client.ready()
        fields |= {"engine": type(engine).__name__, "durability": engine.durability.name.lower()}
    except (EngineError, BadSetting) as error:
        problems.append(Problem("engine", str(fields["url"]), str(error)))
    else:
        if isinstance(engine, Watched):
            problems += [Problem("server", str(fields["url"]), why) for why in await engine.complaints()]
        problems += await storage_problems(session, engine, repair, fields)
        if session.declares:
            checked, found = await job_problems(session, queue)
            fields["jobs"] = checked
            problems += found
    session.out.document({"ok": not problems, **fields, "problems": [asdict(each) for each in problems]})
    session.out.fields(fields)
    if not session.declares:
        session.out.note("note: tasks and queued jobs were not checked: that needs the app (--app)")
    return show_problems(session, problems)


async def storage_problems(
    session: Session, engine: Engine, repair: bool, fields: dict[str, str | int]
) -> list[Problem]:
    """What is wrong in the storage, and still is."""
    if not isinstance(engine, Repairs):
        return []
    try:
        faults = await engine.repair(mend=repair)
    except EngineError as error:  # the storage is that of older code, or we have not the rights
        return [Problem("storage", str(fields["url"]), str(error))]
    if not repair:
        return [Problem("storage", "mend it with --repair", fault) for fault in faults[:SHOWN]]
    fields["repaired"] = len(faults)
    for fault in faults:
        session.out.note(f"repaired: {clean(fault)}")
    return []


def show_problems(session: Session, problems: list[Problem]) -> int | None:
    if not problems:
        session.out.say("nothing would break")
        return None
    rows = [[each.what, each.where, each.why, each.jobs or None, each.example] for each in problems]
    session.out.table(["what", "where", "why", ">jobs", "example"], rows)
    undeclared = [each.where for each in problems if each.why == UNDECLARED]
    if undeclared:
        session.out.note(
            "note: jobs of a task that no worker knows are parked until one does, and broken after an hour "
            "without any (--unknown-for of the workers).  A task that was renamed still needs its old name: "
            f"@app.task(name={clean(undeclared[0])!r})"
        )
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
    """How many jobs were checked, and what is wrong with them; equal problems are counted together."""
    kinds: dict[tuple[str, str], tuple[int, str]] = {}
    checked = 0
    async for info in queued(session, queue):
        checked += 1
        if checked % SHOW_EVERY == 0:
            sign_of_life(f"{checked:,} jobs checked")
        if (why := fault(info, session.app)) is not None:
            count, example = kinds.get((info.task, why), (0, info.id))
            kinds[info.task, why] = count + 1, example
    sign_of_life("")
    return checked, [Problem("jobs", task, why, *found) for (task, why), found in kinds.items()]


async def queued(session: Session, queue: str | None) -> AsyncIterator[JobInfo]:
    """Every job that may still be run, page by page."""
    for state in (State.READY, State.RUNNING):
        async for info in session.jobs.aeach(Filter(state=state, queue=queue)):
            yield info


def fault(info: JobInfo, app: Registry) -> str | None:
    """Why a worker with this app could not run the job; the reason holds no value of the job."""
    try:
        job = wire.decode(info.body)
        app.task_named(job.task).arguments(job)
    except UnknownTask:
        return UNDECLARED
    except (BrokenPayload, BadSetting) as error:
        return _without_values(error)
    return None


def _without_values(error: PropolisError) -> str:
    """Validators quote what they refuse: enums in their line, pydantic in the lines after the first."""
    [first, *_] = str(error).splitlines() or [type(error).__name__]
    return _ENUM_VALUE.sub(r"\1\2", first)


def sign_of_life(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)

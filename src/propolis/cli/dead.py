"""`propolis dead` and `propolis broken`: the same commands, on all dead jobs or on those that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click
from msgspec.structs import replace

from propolis.app.operate.jobs import dead as dead_filter
from propolis.cli.console.output import counted
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.cli.console.values import filter_options, span
from propolis.cli.jobs import limit_option, list_jobs, report, show_job, values_option
from propolis.core.protocols import Filter
from propolis.errors import BadSetting

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
@click.pass_context
def dead(context: click.Context) -> None:
    """List, show, replay or purge jobs that will not be tried again."""
    context.obj = dead_filter()


@click.group()
@click.pass_context
def broken(context: click.Context) -> None:
    """List, show, replay or purge jobs that cannot be run as they are.

    Their payload could not be decoded, their task is unknown, or its signature has changed.
    They are kept as they came: mend the code, then replay them.
    """
    context.obj = dead_filter(reason="broken")


def jobs_of_group() -> Filter:
    found = click.get_current_context().obj
    assert isinstance(found, Filter)
    return found


def narrowed(queue: str | None, task: str | None, reason: str | None) -> Filter:
    where = jobs_of_group()
    if where.reason is not None and reason not in (None, where.reason):
        raise BadSetting(
            f"all of these jobs have the reason {where.reason!r}: look for {reason!r} with `propolis dead`"
        )
    return replace(where, queue=queue, task=task, reason=reason or where.reason)


@click.command("list")
@filter_options
@limit_option
@looks_at_app
async def list_(session: Session, /, limit: int, **filters: str | None) -> int | None:
    """List these jobs, the oldest first."""
    return await list_jobs(session, narrowed(**filters), limit)


@click.command()
@click.argument("job_id", metavar="ID")
@values_option
@looks_at_app
async def show(session: Session, job_id: str, values: bool) -> int | None:
    """Show everything that is known of one of these jobs.

    The arguments are shown only by their shape, unless --args is given.  What cannot be decoded is
    shown as it is, with every byte that is not plain text spelt out.
    """
    return await show_job(session, job_id, jobs_of_group(), values=values)


def choice_options(command: F) -> F:
    for option in (
        click.option("--limit", type=click.IntRange(1), help="At most so many, the oldest first."),
        click.option("--older-than", type=span, help="Only those that ended so long ago."),
        click.option("--all", "every", is_flag=True, help="All of these jobs."),
        filter_options,
        click.argument("job_ids", metavar="[ID]…", nargs=-1),
    ):
        command = option(command)
    return command


@click.command()
@choice_options
@on_app
async def replay(session: Session, /, job_ids: tuple[str, ...], **chosen: Any) -> int | None:
    """Give jobs a new life at the back of their queue: by id, by filter, or --all."""
    where, which = await choice(session, job_ids, **chosen)
    if job_ids:
        answers = zip(job_ids, await session.jobs.areplay(*job_ids), strict=True)
        return report(session, "replayed", "unknown, not dead, or its unique key is taken", answers)
    return total(session, "replayed", await session.jobs.areplay_all(where, **which))


@click.command()
@choice_options
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_app
async def purge(session: Session, /, job_ids: tuple[str, ...], yes: bool, **chosen: Any) -> int | None:
    """Forget jobs: by id, by filter, or --all."""
    where, which = await choice(session, job_ids, **chosen)
    if not yes:
        click.confirm("Forget these jobs for ever?", abort=True, err=True)
    if job_ids:
        answers = zip(job_ids, await session.jobs.adelete(*job_ids), strict=True)
        return report(session, "purged", "unknown, or not ended", answers)
    return total(session, "purged", await session.jobs.apurge(where, **which))


async def choice(
    session: Session,
    job_ids: tuple[str, ...],
    *,
    every: bool,
    older_than: timedelta | None,
    limit: int | None,
    **filters: str | None,
) -> tuple[Filter, dict[str, Any]]:
    """Which jobs are meant.  To say nothing is a mistake, and never means all."""
    narrow = older_than is not None or limit is not None or any(filters.values())
    if bool(job_ids) + (every or narrow) != 1:
        raise BadSetting("say which: ids, or --queue, --task, --reason, --older-than, --limit, or --all")
    ended_before: datetime | None = None
    if older_than is not None:
        ended_before = await session.now() - older_than
    return narrowed(**filters), {"limit": limit, "ended_before": ended_before}


def total(session: Session, done: str, number: int) -> int | None:
    session.out.say(f"{counted(number)} {done}")
    session.out.document({done: number})
    return None if number else PROBLEMS


for command in (list_, show, replay, purge):
    dead.add_command(command)
    broken.add_command(command)

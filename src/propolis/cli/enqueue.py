"""`propolis enqueue`."""

from __future__ import annotations

import difflib
from datetime import timedelta
from itertools import islice
from typing import Any, cast

import click
import msgspec
from msgspec import Raw

from propolis.app.registry import Registry
from propolis.app.task import CallOptions, Task, call_fields
from propolis.cli.console.session import Session, on_app
from propolis.cli.console.values import moment, span, when
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.ids import new_id
from propolis.core.protocols import Durability
from propolis.errors import BadSetting, BrokenPayload

OFFERED = 3
LISTED = 10


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1, metavar="[JSON]…")
@click.option("--kwargs", default="{}", metavar="JSON", help="Arguments by name, as one object.")
@click.option("--queue", help="Use this queue instead of the task's own.")
@click.option("--delay", type=span, help="Start it only after this time has passed.")
@click.option("--at", type=moment, help="Start it only from this time on.")
@click.option("--priority", type=int, help="From -100 to 100, the higher first.")
@click.option("--id", "job_id", help="Use an id of your own: the same id again makes no second job.")
@click.option("--unique", metavar="KEY", help="Add nothing while another job with this key waits or runs.")
@click.option("--key", help="The key of the job, in place of what the task makes of its arguments.")
@click.option("--expires", type=when, help="Do not start it any more after this.")
@click.option("--wait", type=span, help="Where the queue is full, wait so long for room.")
@on_app
async def enqueue(
    session: Session, /, task: str, args: tuple[str, ...], kwargs: str, wait: timedelta | None, **using: Any
) -> None:
    """Enqueue a call of TASK, and print the id of the job.

    Each argument is JSON: 3, true, '"text"', '{"a": 1}'.  Put -- before one that begins with a dash.

    With --app the arguments are checked against the task's signature; with --url alone, only the worker
    will find out whether they fit.
    """
    declared = task_named(session.app, task) if session.declares else None
    positional = [parsed(text) for text in args]
    named = parsed(kwargs)
    if not isinstance(named, dict):
        raise BadSetting('--kwargs must be a JSON object, such as {"to": "ann@example.org"}')
    circumstances = {name: value for name, value in using.items() if value is not None}
    if declared is not None:
        job = checked_job(declared, positional, named, circumstances)
    else:
        session.out.note(
            "note: the arguments were not checked against the task's signature: --app would do so"
        )
        job = unchecked_job(task, positional, named, circumstances)
    receipt = await session.app.client.aput(job, wait=None if wait is None else wait.total_seconds())
    if not receipt.created:
        session.out.note("note: there is such a job already: nothing was added")
    if session.app.client.engine.durability is Durability.MEMORY:
        session.out.note("note: this engine lives in one process: the job ends with this command")
    session.out.say(receipt.id)
    session.out.document({"id": receipt.id, "created": receipt.created, "checked": session.declares})


def parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise BadSetting(f"{text!r} is not JSON ({error}): is it text?  Then write '\"…\"'") from error


def task_named(app: Registry, name: str) -> Task[..., Any]:
    task = app.tasks.get(name)
    if task is None:
        raise BadSetting(f"the app has no task named {name!r}{_offer(name, app)}")
    return task


def checked_job(
    task: Task[..., Any], args: list[Any], kwargs: dict[str, Any], using: dict[str, Any]
) -> Envelope:
    try:
        job = task.using(**using).job(*args, **kwargs)
        task.arguments(job)  # also where the app does not ask for it
    except BrokenPayload as error:
        raise BadSetting(str(error)) from error
    except TypeError as error:
        reason = error.__cause__ or f"the arguments do not fit {error}"
        raise BadSetting(str(reason)) from error
    return job


def _offer(name: str, app: Registry) -> str:
    """What may have been meant: tasks are compared with and without the module in front of their name."""
    if not app.tasks:
        return ": it declares no task"
    meant: dict[str, list[str]] = {}
    for task in sorted(app.tasks):
        for known_as in (task, task.rpartition(".")[2]):
            meant.setdefault(known_as, []).append(task)
    near = dict.fromkeys(task for each in difflib.get_close_matches(name, meant) for task in meant[each])
    if near:
        return f": did you mean {' or '.join(islice(near, OFFERED))}?"
    return f": it has {', '.join(sorted(app.tasks)[:LISTED])}" + (", …" if len(app.tasks) > LISTED else "")


def unchecked_job(name: str, args: list[Any], kwargs: dict[str, Any], using: dict[str, Any]) -> Envelope:
    fields: dict[str, Any] = {"id": new_id(), "task": name, **call_fields(cast("CallOptions", using))}
    job = Envelope(**fields, args=Raw(msgspec.json.encode(args)), kwargs=Raw(msgspec.json.encode(kwargs)))
    wire.check(job)
    return job

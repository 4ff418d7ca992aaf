"""`skep enqueue`."""

from __future__ import annotations

import difflib
from typing import Any

import click
import msgspec
from msgspec import Raw

from skep import wire
from skep.broker import Durability
from skep.cli.session import Session, on_app
from skep.cli.values import moment, span, when
from skep.errors import BadSetting, BrokenPayload
from skep.job import Job, new_id
from skep.registry import Registry
from skep.task import Using


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1, metavar="[JSON]…")
@click.option("--kwargs", default="{}", metavar="JSON", help="Arguments by name, as one object.")
@click.option("--queue", help="Another queue than the task's own.")
@click.option("--delay", type=span, help="Not before this time has passed.")
@click.option("--at", type=moment, help="Not before this time.")
@click.option("--priority", type=int, help="From -100 to 100, the higher first.")
@click.option("--id", "job_id", help="An id of your own: enqueued again, it makes no second job.")
@click.option("--unique", metavar="KEY", help="Not while another job with this key waits or runs.")
@click.option("--expires", type=when, help="Useless after this.")
@on_app
async def enqueue(session: Session, /, task: str, args: tuple[str, ...], kwargs: str, **using: Any) -> None:
    """Enqueue a call of TASK, and print the id of the job.

    Each argument is JSON: 3, true, '"text"', '{"a": 1}'.  Put -- before one that begins with a dash.

    With --app they are checked against the task's signature; with --url alone, only the worker
    will find out whether they fit.
    """
    positional = [parsed(text) for text in args]
    named = parsed(kwargs)
    if not isinstance(named, dict):
        raise BadSetting('--kwargs must be a JSON object, such as {"to": "ann@example.org"}')
    circumstances = {name: value for name, value in using.items() if value is not None}
    if session.declares:
        job = checked_job(session.app, task, positional, named, circumstances)
    else:
        session.out.note("note: not checked against the task's signature: give --app to have it checked")
        job = unchecked_job(task, positional, named, circumstances)
    receipt = await session.app.aput(job)
    if not receipt.created:
        session.out.note("note: there is such a job already: nothing was added")
    if session.app.engine.durability is Durability.MEMORY:
        session.out.note("note: this engine lives in one process: the job ends with this command")
    session.out.say(receipt.id)
    session.out.document({"id": receipt.id, "created": receipt.created, "checked": session.declares})


def parsed(text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError) as error:
        raise BadSetting(f"{text!r} is not JSON ({error}): is it text?  Then write '\"…\"'") from error


def checked_job(
    app: Registry, name: str, args: list[Any], kwargs: dict[str, Any], using: dict[str, Any]
) -> Job:
    task = app.tasks.get(name)
    if task is None:
        raise BadSetting(f"the app has no task named {name!r}{_offer(name, app)}")
    try:
        job = task.using(**using).job(*args, **kwargs)
        task.arguments(job)  # also where the app does not ask for it
    except BrokenPayload as error:
        raise BadSetting(str(error)) from error
    except TypeError as error:
        told = error.__cause__ or f"the arguments do not fit {error}"
        raise BadSetting(str(told)) from error
    return job


def _offer(name: str, app: Registry) -> str:
    near = difflib.get_close_matches(name, app.tasks, cutoff=0.5) or sorted(app.tasks)[:10]
    return f": did you mean {' or '.join(near)}?" if near else ": it declares none"


def unchecked_job(name: str, args: list[Any], kwargs: dict[str, Any], using: dict[str, Any]) -> Job:
    if "delay" in using and "at" in using:
        raise BadSetting("give a delay or a time, not both")
    facts: dict[str, Any] = {"id": new_id(), "task": name, **Using(**using).fields()}
    job = Job(**facts, args=Raw(msgspec.json.encode(args)), kwargs=Raw(msgspec.json.encode(kwargs)))
    wire.check(job)
    return job

"""The values that options take."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from propolis.core.duration import duration
from propolis.core.job import State
from propolis.core.protocols import Filter
from propolis.errors import BadDuration

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("ready", "scheduled", "running", "done", "dead", "cancelled")

_NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
_DATE = re.compile(r"\d{4}-", re.ASCII)


def span(text: str) -> timedelta:
    """A duration as an option; a bare number is seconds."""
    try:
        return duration(float(text) if _NUMBER.fullmatch(text) else text)
    except BadDuration as error:
        raise click.BadParameter(str(error)) from error


def moment(text: str) -> datetime:
    """A time in ISO form as an option; without a zone it is the local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(f"{text!r} is not a time: write 2030-01-31T09:00 or …T09:00Z") from error


def when(text: str) -> timedelta | datetime:
    """A duration from now, or a time."""
    return moment(text) if _DATE.match(text) else span(text)


def filter_options(command: F) -> F:
    for option in (
        click.option("--reason", help="Only those that ended for this reason."),
        click.option("--task", help="Only those of this task."),
        click.option("--queue", help="Only those of this queue."),
    ):
        command = option(command)
    return command


def filter_for_state(state: str | None, filters: dict[str, Any]) -> Filter:
    """The filter for a state as `propolis queues` counts them: a job that is not yet due is "scheduled"."""
    if state in ("ready", "scheduled"):
        return Filter(state=State.READY, scheduled=state == "scheduled", **filters)
    return Filter(state=None if state is None else State(state), **filters)

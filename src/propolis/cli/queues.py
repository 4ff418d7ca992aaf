"""`propolis queues`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

import click
from msgspec.structs import asdict

from propolis.cli.console.output import counted, shown_span
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.core.job import State
from propolis.core.protocols import Counts, Filter, KnowsOldest, Rule, RuleKind, Scope

F = TypeVar("F", bound=Callable[..., Any])

STATES = ("ready", "scheduled", "held", "parked", "running", "done", "dead", "cancelled")
PAGE = 1000


def check_order(_: click.Context, __: click.Parameter, value: str) -> str:
    if value.removeprefix("-") not in ("queue", *STATES):
        raise click.BadParameter(
            f"{value!r} is no column: give queue or {', '.join(STATES)}; a minus before it reverses the order"
        )
    return value


@click.group(invoke_without_command=True)
@click.option(
    "--age", is_flag=True, help="Also show how long the oldest ready job waits (one more query per queue)."
)
@click.option(
    "--sort",
    "order",
    default="queue",
    callback=check_order,
    help="Sort by a column; -COLUMN puts the greatest first.",
)
@looks_at_app
async def queues(session: Session, age: bool, order: str) -> None:
    """List queues with their jobs per state; pause, resume, block, unblock or drop them."""
    rules = await session.queues.arules()
    ruled = {rule.name: Counts() for rule in rules if rule.scope is Scope.QUEUE}
    counts = in_order({**ruled, **await every_queue(session)}, order)
    ages = await oldest_of(session, counts) if age else {}
    if not counts:
        session.out.note("no queue has held a job yet")
    for name, count in counts.items():
        fields = {"queue": name, **asdict(count), "rules": rules_on(name, rules)}
        session.out.document(fields | ({"oldest_s": ages.get(name)} if age else {}))
    states = [state for state in STATES if state != "parked" or any(c.parked for c in counts.values())]
    columns = ["queue", *(f">{state}" for state in states), *([">oldest"] if age else []), "rules"]
    rows = [row_of(name, states, count, rules, ages if age else None) for name, count in counts.items()]
    if rows:
        session.out.table(columns, rows)
    if others := [rule for rule in rules if rule.scope is not Scope.QUEUE]:
        session.out.table(["scope", "name", "rule"], [[r.scope.value, r.name, described(r)] for r in others])


async def every_queue(session: Session) -> dict[str, Counts]:
    page = found = await session.queues.acounts(limit=PAGE)
    while len(page) == PAGE:
        page = await session.queues.acounts(limit=PAGE, after=max(page))
        found = {**found, **page}
    return found


def in_order(counts: dict[str, Counts], order: str) -> dict[str, Counts]:
    """Sorted by a column, and by name where the column is equal."""
    column = order.removeprefix("-")
    by_name = sorted(counts.items())
    if column != "queue":
        by_name.sort(key=lambda pair: getattr(pair[1], column), reverse=order.startswith("-"))
    elif order.startswith("-"):
        by_name.reverse()
    return dict(by_name)


def row_of(
    name: str, states: list[str], count: Counts, rules: list[Rule], ages: dict[str, float] | None
) -> list[str | int]:
    numbers = [getattr(count, state) for state in states]
    age = [] if ages is None else [shown_span(timedelta(seconds=ages[name])) if name in ages else ""]
    return [name, *numbers, *age, ", ".join(rules_on(name, rules))]


def rules_on(queue: str, rules: list[Rule]) -> list[str]:
    return [described(rule) for rule in rules if rule.scope is Scope.QUEUE and rule.name == queue]


def described(rule: Rule) -> str:
    match rule.kind:
        case RuleKind.PAUSE:
            return "paused"
        case RuleKind.BLOCK:
            return "blocked"
        case _:
            return f"{rule.kind.value} {rule.n}"


async def oldest_of(session: Session, counts: dict[str, Counts]) -> dict[str, float]:
    """For how many seconds the first ready job of each queue has been waiting, where a bite shows it."""
    now, engine = await session.now(), await session.app.client.ready()
    queues = [name for name, count in counts.items() if count.ready]
    if isinstance(engine, KnowsOldest):
        return {queue: (now - at).total_seconds() for queue, at in (await engine.oldest(queues)).items()}
    ages = {}
    for queue in queues:
        where = Filter(queue=queue, state=State.READY, scheduled=False)
        for info in (await engine.find(where, limit=1)).jobs:
            ages[queue] = (now - info.put_at).total_seconds()
    return ages


# --- rules -------------------------------------------------------------------------------


def rule_command(command: F) -> F:
    command = click.option("--task", "is_task", is_flag=True, help="NAME is a task, not a queue.")(command)
    return click.argument("name")(command)


@queues.command()
@rule_command
@on_app
async def pause(session: Session, name: str, is_task: bool) -> None:
    """Start no more jobs of a queue; what runs finishes, nothing is lost."""
    await change(session, name, "paused", session.queues.apause(name, scope=scope(is_task)))


@queues.command()
@rule_command
@on_app
async def resume(session: Session, name: str, is_task: bool) -> None:
    """Undo pause."""
    await change(session, name, "resumed", session.queues.aresume(name, scope=scope(is_task)))


@queues.command()
@rule_command
@on_app
async def block(session: Session, name: str, is_task: bool) -> None:
    """Do the same as pause, for administrators: what users resume stays blocked."""
    await change(session, name, "blocked", session.queues.ablock(name, scope=scope(is_task)))


@queues.command()
@rule_command
@on_app
async def unblock(session: Session, name: str, is_task: bool) -> None:
    """Undo block."""
    await change(session, name, "unblocked", session.queues.aunblock(name, scope=scope(is_task)))


def scope(is_task: bool) -> Scope:
    return Scope.TASK if is_task else Scope.QUEUE


async def change(session: Session, name: str, done: str, answer: Awaitable[bool]) -> None:
    """Report a change.  Repeating one does no harm, so it is no error either."""
    changed = await answer
    session.out.say(f"{name}: {done}" if changed else f"{name}: nothing to do, it was {done} already")
    if name not in await every_queue(session) and name not in session.app.tasks:
        session.out.note(f"no job or task has that name so far: {name!r}")
    session.out.document({"name": name, done: True, "changed": changed})


@queues.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@on_app
async def drop(session: Session, name: str, yes: bool) -> int | None:
    """Forget a queue and all its jobs but those that run."""
    if not yes:
        click.confirm(f"Cancel and forget all jobs of queue {name!r}?", abort=True, err=True)
    dropped = await session.queues.adrop(name)
    session.out.say(f"{name}: {counted(dropped)} dropped")
    session.out.document({"name": name, "dropped": dropped})
    return None if dropped else PROBLEMS

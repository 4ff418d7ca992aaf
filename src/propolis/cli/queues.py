"""`propolis queues`, `propolis limits` and `propolis rules`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypedDict, TypeVar, Unpack

import click
from msgspec.structs import asdict

from propolis.app.operate.limits import LimitUse, soon
from propolis.app.operate.rules import every_rule, named, place_of, state_under, strongest_first
from propolis.cli.console.output import counted, shown_span
from propolis.cli.console.rule_views import (
    RULE_COLUMNS,
    described,
    fields_of,
    rate_of_rule,
    row_of_rule,
    scope_in_words,
)
from propolis.cli.console.session import PROBLEMS, Session, looks_at_app, on_app
from propolis.cli.console.values import when
from propolis.core.job import State
from propolis.core.protocols import UNBOUNDED, Counts, Filter, KnowsOldest, Rule, RuleKind, Rules, Scope


class Reason(TypedDict):
    """What is said about a rule."""

    by: str | None
    why: str | None
    until: datetime | timedelta | None


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
    """List queues with their jobs per state; pause, resume, block, unblock, cap or drop them."""
    rules = await all_rules(session)
    ruled = {rule.name: Counts() for rule in rules if rule.scope is Scope.QUEUE}
    counts = in_order({**ruled, **await every_queue(session)}, order)
    ages = await oldest_of(session, counts) if age else {}
    if not counts:
        session.out.note("no queue has held a job yet")
    for name, count in counts.items():
        fields = {
            "queue": name,
            **asdict(count),
            "state": state(name, rules),
            "rules": list(map(described, on_queue(name, rules))),
        }
        session.out.document(fields | ({"oldest_s": ages.get(name)} if age else {}))
    states = [state for state in STATES if state != "parked" or any(c.parked for c in counts.values())]
    columns = ["queue", *(f">{state}" for state in states), *([">oldest"] if age else []), "state", "rules"]
    rows = [row_of(name, states, count, rules, ages if age else None) for name, count in counts.items()]
    if rows:
        session.out.table(columns, rows)
    if others := [rule for rule in rules if rule.scope is not Scope.QUEUE]:
        session.out.table(["rule", "for"], [[described(rule), named(rule)] for rule in others])


async def all_rules(session: Session) -> list[Rule]:
    return [rule async for rule in every_rule(await session.app.client.piece(Rules))]


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
    bounds = [rule for rule in on_queue(name, rules) if rule.kind in (RuleKind.LIMIT, RuleKind.CAP)]
    return [name, *numbers, *age, state(name, rules), ", ".join(map(described, bounds))]


def state(queue: str, rules: list[Rule]) -> str:
    return state_under(on_queue(queue, rules)).value


def on_queue(queue: str, rules: list[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.scope is Scope.QUEUE and rule.name == queue]


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


def names_what(command: F) -> F:
    """The options of what a rule is for."""
    for option in (
        click.option("--key", help="All jobs of this key; with --task, those of the task only."),
        click.option("--task", help="All jobs of this task, in whatever queue."),
        click.argument("queue", required=False),
    ):
        command = option(command)
    return command


def says_why(command: F) -> F:
    """The options of what is said about it."""
    for option in (
        click.option("--by", "--actor", "by", help="Who says so; by default you, at this machine."),
        click.option("--until", type=when, help="When it ends: a duration from now, or a time."),
        click.option("--why", help="Why, for those who find it."),
    ):
        command = option(command)
    return command


@queues.command()
@names_what
@says_why
@on_app
async def pause(
    session: Session, queue: str | None, task: str | None, key: str | None, **reason: Unpack[Reason]
) -> None:
    """Start no more jobs of a queue, a task or a key; what runs finishes, nothing is lost."""
    changed = await session.queues.apause(queue, task=task, key=key, **reason)
    await report(session, place_of(queue, task, key), "paused", changed, "it was paused: it says this now")


@queues.command()
@names_what
@on_app
async def resume(session: Session, queue: str | None, task: str | None, key: str | None) -> None:
    """Undo pause."""
    changed = await session.queues.aresume(queue, task=task, key=key)
    await report(session, place_of(queue, task, key), "resumed", changed, "nothing to do, it was not paused")


@queues.command()
@names_what
@says_why
@on_app
async def block(
    session: Session, queue: str | None, task: str | None, key: str | None, **reason: Unpack[Reason]
) -> None:
    """Do the same as pause, for administrators: what users resume stays blocked."""
    changed = await session.queues.ablock(queue, task=task, key=key, **reason)
    await report(session, place_of(queue, task, key), "blocked", changed, "it was blocked: it says this now")


@queues.command()
@names_what
@on_app
async def unblock(session: Session, queue: str | None, task: str | None, key: str | None) -> None:
    """Undo block."""
    changed = await session.queues.aunblock(queue, task=task, key=key)
    await report(
        session, place_of(queue, task, key), "unblocked", changed, "nothing to do, it was not blocked"
    )


@queues.command()
@click.argument("name")
@click.argument("jobs", type=click.IntRange(0))
@says_why
@on_app
async def cap(session: Session, name: str, jobs: int, **reason: Unpack[Reason]) -> None:
    """Refuse puts that would make more than so many jobs wait in a queue."""
    changed = await session.queues.acap(name, jobs, **reason)
    await report(session, place_of(name, None, None), "capped", changed, "it had a cap: it says this now")


@queues.command()
@click.argument("name")
@on_app
async def uncap(session: Session, name: str) -> None:
    """Let a queue hold any number of jobs again."""
    changed = await session.queues.auncap(name)
    await report(session, place_of(name, None, None), "uncapped", changed, "nothing to do, it had no cap")


async def report(session: Session, place: tuple[Scope, str], done: str, changed: bool, else_: str) -> None:
    """Report a change.  Repeating one does no harm, so it is no error either."""
    scope, name = place
    session.out.say(f"{name}: {done if changed else else_}")
    unknown = {
        Scope.QUEUE: name not in await every_queue(session) if scope is Scope.QUEUE else False,
        Scope.TASK: session.declares and name not in session.app.tasks,
    }
    if unknown.get(scope):
        session.out.note(f"no job has come to a {scope.value} of that name so far: {name!r}")
    session.out.document({"scope": scope.value, "name": name, done: True, "changed": changed})


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


@click.command()
@looks_at_app
async def rules(session: Session) -> None:
    """List pauses, blocks, limits and caps: who set each, when, until when and why.

    They are made and ended by `propolis queues pause`, `resume`, `block`, `unblock`, `cap` and `uncap`, and
    limits by `propolis limits`.
    """
    found = sorted(await all_rules(session), key=strongest_first)
    for rule in found:
        session.out.document(fields_of(rule))
    if found:
        session.out.table(RULE_COLUMNS, [row_of_rule(rule) for rule in found])
    else:
        session.out.note("nothing is paused, blocked, limited or capped")


# --- limits ------------------------------------------------------------------------------


def names_limited(command: F) -> F:
    """The options of what is limited."""
    for option in (
        click.option("--queue", help="All jobs of this queue."),
        click.option("--task", help="All jobs of this task, in whatever queue."),
        click.argument("key", required=False),
    ):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@looks_at_app
async def limits(session: Session) -> None:
    """List how many jobs of a key, a task or a queue run at once; put, get or remove a limit."""
    await list_limits(session)


@limits.command("list")
@looks_at_app
async def list_(session: Session) -> None:
    """List limits, those of keys first."""
    await list_limits(session)


@limits.command()
@names_limited
@click.option("--at-once", type=int, help="So many of them run at once, at most.")
@click.option("--rate", help="They start so often, at most: 10/s, 100/min, 5/2h.")
@click.option("--burst", type=int, help="So many starts may be saved up.  [1]")
@says_why
@on_app
async def put(
    session: Session,
    key: str | None,
    task: str | None,
    queue: str | None,
    at_once: int | None,
    rate: str | None,
    burst: int | None,
    **reason: Unpack[Reason],
) -> None:
    """Let at most so many jobs of a key, a task or a queue run at once; the others keep their places.

    A KEY that ends with * is each key that begins so.
    """
    changed = await session.limits.aput(
        key, task=task, queue=queue, at_once=at_once, rate=rate, burst=burst, **reason
    )
    await report(session, place_of(queue, task, key), "limited", changed, "it was limited: it says this now")


@limits.command()
@names_limited
@looks_at_app
async def get(session: Session, key: str | None, task: str | None, queue: str | None) -> int | None:
    """Show the limit that holds, which jobs run under it, and how many wait."""
    use = await session.limits.aget(key, task=task, queue=queue)
    if use is None:
        session.out.note(
            "there is no such limit: `propolis limits` lists all; give a key and --task for what each key of "
            "a task has"
        )
        return PROBLEMS
    tokens = use.tokens
    left = {} if tokens is None else {"tokens": tokens.free, "next_in": tokens.next_in.total_seconds()}
    used = {"running": list(use.running), "waiting": use.waiting, "more": use.more}
    session.out.document(fields_of(use.rule) | used | left)
    session.out.fields(shown_use(use))
    return None


def shown_use(use: LimitUse) -> dict[str, str | datetime | None]:
    rule, more = use.rule, " or more" if use.more else ""
    of = "" if rule.n == UNBOUNDED else f" of {rule.n}"
    left = use.tokens
    next_in = "" if left is None else f"none, next in {soon(left.next_in)}"
    return {
        scope_in_words(rule): rule.name,
        "running": f"{len(use.running)}{more}{of}",
        "rate": rate_of_rule(rule),
        "left": str(left.free) if left is not None and left.free else next_in,
        "waiting": f"{use.waiting}{more}",
        "jobs": ", ".join(use.running),
        "by": rule.by,
        "since": rule.at,
        "until": rule.until,
        "why": rule.why,
    }


@limits.command()
@names_limited
@on_app
async def remove(session: Session, key: str | None, task: str | None, queue: str | None) -> None:
    """Remove a limit; what waited runs in its old order."""
    changed = await session.limits.aremove(key, task=task, queue=queue)
    await report(
        session, place_of(queue, task, key), "unlimited", changed, "nothing to do, it was not limited"
    )


async def list_limits(session: Session) -> None:
    page = found = await session.limits.alist(limit=PAGE)
    while len(page) == PAGE:
        page = await session.limits.alist(limit=PAGE, after=page[-1])
        found = found + page
    for rule in found:
        session.out.document(fields_of(rule))
    if found:
        session.out.table(RULE_COLUMNS, [row_of_rule(rule) for rule in found])
    else:
        session.out.note("nothing is limited")

"""`skep worker`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click

from skep import wire
from skep.cli.output import clean
from skep.cli.values import span
from skep.errors import BadSetting
from skep.loading import load_app
from skep.registry import Registry
from skep.strategy import Repeat
from skep.worker.settings import LOG_FORMAT, Lane, Mode, Settings

log = logging.getLogger("skep.worker")

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was asked for."""

    app: str
    queues: tuple[str, ...]
    concurrency: int
    processes: int
    lease: timedelta
    grace: timedelta
    poll: timedelta
    mode: str | None
    until_empty: bool
    once: bool
    log_level: str

    @property
    def end(self) -> Mode:
        named = [Mode(self.mode)] if self.mode else []
        named += [Mode.UNTIL_EMPTY] * self.until_empty + [Mode.ONCE] * self.once
        if len(set(named)) > 1:
            raise BadSetting(f"a worker has one mode: {' or '.join(named)}, not both")
        return named[0] if named else Mode.FOREVER

    def settings(self, registry: Registry) -> Settings:
        settings = Settings(
            lanes=[*lanes(self.queues, self.concurrency)] or [declared(registry, self.concurrency)],
            mode=self.end,
            lease=self.lease,
            grace=self.grace,
            poll=self.poll,
            app_path=self.app,
        )
        settings.check()
        return settings

    def for_one_process(self) -> list[str]:
        """The same order, as the arguments of `skep` for each of several processes."""
        arguments = ["worker", self.app]
        for queue in self.queues:
            arguments += ["--queue", queue]
        for name, value in {
            "--concurrency": self.concurrency,
            "--processes": 1,
            "--lease": f"{self.lease.total_seconds():f}s",
            "--grace": f"{self.grace.total_seconds():f}s",
            "--poll": f"{self.poll.total_seconds():f}s",
            "--mode": self.end.value,
            "--log-level": self.log_level,
        }.items():
            arguments += [name, str(value)]
        return arguments


@click.command()
@click.argument("app", metavar="MOD:APP", envvar="SKEP_APP", required=False)
@click.option("--app", "named", metavar="MOD:APP", help="The same, as the other commands say it.")
@click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="NAME[@WEIGHT][,…][=SLOTS]",
    help="Serve this queue, or these together; may be repeated.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Slots, where =SLOTS is not given.",
)
@click.option(
    "--processes", type=click.IntRange(1), default=1, show_default=True, help="Each with all these slots."
)
@click.option("--lease", type=span, default="15s", show_default=True, help="Silence that loses a job.")
@click.option("--grace", type=span, default="28s", show_default=True, help="To finish in, when stopped.")
@click.option("--poll", type=span, default="1s", show_default=True, help="How often to look when idle.")
@click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="When to stop by itself.")
@click.option("--until-empty", is_flag=True, help="Stop when nothing is ready any more.")
@click.option("--once", is_flag=True, help="Stop after one job, or if there is none.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
def worker(**given: Any) -> None:
    """Run the jobs of the app at MOD:APP.

    Without -q it serves the queues of all its tasks, which share --concurrency slots.

    \b
      -q mail=20             queue "mail", up to 20 jobs at once
      -q mail=20 -q slow=2   each queue with slots of its own
      -q mail@3,bulk=20      both share 20 slots; mail has weight 3, bulk has 1:
                             mail is looked at first three times out of four

    SIGTERM or Ctrl-C: finish what runs, for at most --grace, give the rest back, and exit with 0.
    A second one: give back at once.
    """
    from skep.worker.supervisor import run_worker, supervise

    named = given.pop("named")
    given["app"] = named or given["app"]
    if given["app"] is None:
        raise click.UsageError("which app?  Name it as MOD:APP, such as tasks:app, or set SKEP_APP")
    order = Order(**given)
    registry = load_app(order.app)
    log_to_stderr(order.log_level)
    settings = order.settings(registry)
    for queue in unknown_queues(registry, settings):
        log.warning("no task of this app uses queue %r: is it spelt right?", queue)
    if order.processes > 1:
        code = supervise(
            order.for_one_process(), order.processes, order.grace, forever=settings.mode is Mode.FOREVER
        )
    else:
        code = run_worker(registry, settings)
    click.get_current_context().exit(code)


def lanes(texts: tuple[str, ...], concurrency: int) -> Iterator[Lane]:
    return (lane(text, concurrency) for text in texts)


def lane(text: str, concurrency: int) -> Lane:
    """The lane that "mail@3,bulk=20" means."""
    names, _, slots = text.partition("=")
    queues: dict[str, int] = {}
    for part in names.split(","):
        name, _, weight = part.partition("@")
        if not wire.QUEUE_NAME.fullmatch(name) or name in queues:
            raise _not_a_lane(text)
        queues[name] = _whole(text, weight or "1")
    return Lane(queues, _whole(text, slots) if "=" in text else concurrency)


def _whole(text: str, number: str) -> int:
    if not (number.isascii() and number.isdecimal() and int(number) > 0):
        raise _not_a_lane(text)
    return int(number)


def _not_a_lane(text: str) -> BadSetting:
    return BadSetting(f"-q {text!r} is not understood: write mail=20, or mail@3,bulk@1=20 to share 20 slots")


def declared(registry: Registry, concurrency: int) -> Lane:
    """All queues of an app, sharing these slots."""
    names = queues_of(registry)
    if not names:
        raise BadSetting(
            "the app declares no tasks: import their modules where it is made, or name queues: -q"
        )
    return Lane(dict.fromkeys(sorted(names), 1), concurrency)


def queues_of(registry: Registry) -> set[str]:
    """The queues that the tasks of an app name: their own, and those of their repetitions and schedules."""
    names = {declared.schedule().job.queue for declared in registry.declared_schedules.values()}
    for task in registry.tasks.values():
        policy = task.options.policy
        rules = [strategy for _, strategy in task.options.error_rules]
        names.add(task.options.queue)
        for strategy in (policy.on_success, policy.on_error, policy.on_timeout, *rules):
            if isinstance(strategy, Repeat) and strategy.queue is not None:
                names.add(strategy.queue)
    return names


def unknown_queues(registry: Registry, settings: Settings) -> list[str]:
    """Jobs may be sent there by name all the same, so it is no error."""
    known = queues_of(registry)
    return [queue for lane in settings.lanes for queue in lane.queues if queue not in known]


class CleanFormatter(logging.Formatter):
    """Log lines may quote what a stranger enqueued."""

    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record), lines=True)


def log_to_stderr(level: str) -> None:
    """Unless the app has set logging up in its own way; the level of what skep says is ours to set."""
    handler = logging.StreamHandler()
    handler.setFormatter(CleanFormatter(LOG_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("skep").setLevel(level.upper())

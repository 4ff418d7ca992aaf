"""`propolis worker`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click
from click.core import ParameterSource

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.cli.console.values import span
from propolis.core import wire
from propolis.core.strategy import Repeat
from propolis.errors import BadSetting
from propolis.worker.process.log_lines import LogFormat, log_setup, log_to_stderr
from propolis.worker.settings import Lane, Mode, Settings

log = logging.getLogger("propolis.worker")

LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The options of the command."""

    app: str
    queues: tuple[str, ...]
    concurrency: int
    processes: int
    lease: timedelta
    grace: timedelta
    poll: timedelta
    unknown_for: timedelta
    mode: str | None
    until_empty: bool
    once: bool
    log_level: str
    log_jobs: str
    log_format: str

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
            unknown_for=self.unknown_for,
            app_path=self.app,
            log_jobs=self.log_jobs,
        )
        settings.check()
        return settings

    def for_one_process(self) -> list[str]:
        """The same options, as the arguments of `propolis` for each of several processes."""
        arguments = ["worker", self.app]
        for queue in self.queues:
            arguments += ["--queue", queue]
        for name, value in {
            "--concurrency": self.concurrency,
            "--processes": 1,
            "--lease": f"{self.lease.total_seconds():f}s",
            "--grace": f"{self.grace.total_seconds():f}s",
            "--poll": f"{self.poll.total_seconds():f}s",
            "--unknown-for": f"{self.unknown_for.total_seconds():f}s",
            "--mode": self.end.value,
            "--log-level": self.log_level,
            "--log-jobs": self.log_jobs,
            "--log-format": self.log_format,
        }.items():
            arguments += [name, str(value)]
        return arguments


@click.command()
@click.argument("app", metavar="MOD:APP", envvar="PROPOLIS_APP", required=False)
@click.option(
    "--app", "named", metavar="MOD:APP", help="Another way to name the app, as for the other commands."
)
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
    help="How many slots, where =SLOTS is not given.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many processes, each with all these slots.",
)
@click.option(
    "--lease", type=span, default="15s", show_default=True, help="After such a silence its jobs go to others."
)
@click.option(
    "--grace",
    type=span,
    default="28s",
    show_default=True,
    help="How long running jobs may go on when it is stopped.",
)
@click.option(
    "--poll", type=span, default="1s", show_default=True, help="How often to ask for jobs when idle."
)
@click.option(
    "--unknown-for",
    type=span,
    default="1h",
    show_default=True,
    help="When nobody has known the task of parked jobs for so long, they are broken.",
)
@click.option("--mode", type=click.Choice([mode.value for mode in Mode]), help="When to stop by itself.")
@click.option("--until-empty", is_flag=True, help="Stop when nothing is ready any more.")
@click.option("--once", is_flag=True, help="Stop after one job, or if there is none.")
@click.option(
    "--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="How much to log."
)
@click.option(
    "--log-jobs",
    metavar="[failures|all|sample:N|none]",
    default="failures",
    show_default=True,
    envvar="PROPOLIS_LOG_JOBS",
    help="Which runs have a line: those that failed, all, also one in N that did not fail, or none.",
)
@click.option(
    "--log-format",
    type=click.Choice([each.value for each in LogFormat]),
    default=LogFormat.TEXT.value,
    show_default=True,
    envvar="PROPOLIS_LOG_FORMAT",
    help="For people, or one JSON object per line.",
)
def worker(**given: Any) -> None:
    """Run the jobs of the app at MOD:APP.

    Without -q it serves the queues of all its tasks, which share --concurrency slots.

    \b
      -q mail=20             queue "mail", up to 20 jobs at once
      -q mail=20 -q slow=2   each queue with slots of its own
      -q mail@3,bulk=20      both share 20 slots; mail has weight 3, bulk has 1:
                             mail is looked at first three times out of four

    At SIGTERM or Ctrl-C it finishes what runs, for at most --grace, gives the rest back and exits with 0.
    At a second signal it gives everything back at once.  SIGHUP does the same as SIGTERM; with --processes it
    replaces them one by one, unless it was started from a terminal.  SIGQUIT shows what it is doing.
    """
    from propolis.worker.process.init import leave_init_to_another
    from propolis.worker.supervisor import run_worker, supervise

    given["app"] = the_app(given["app"], given.pop("named"))
    if given["app"] is None:
        raise click.UsageError("which app?  Name it as MOD:APP, such as tasks:app, or set PROPOLIS_APP")
    order = Order(**given)
    leave_init_to_another()
    registry = load_app(order.app)
    set_up_logging(order.log_level, LogFormat(order.log_format))
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


def the_app(path: str | None, named: str | None) -> str | None:
    """The one that is given, in one place or the other; the environment counts where neither is."""
    from_environment = click.get_current_context().get_parameter_source("app") is ParameterSource.ENVIRONMENT
    if path is not None and named is not None and named != path and not from_environment:
        raise click.UsageError(
            f"a worker runs one app: write `propolis worker {named}` or `propolis worker {path}`"
        )
    return named or path


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
    """The queues that no task names.  Jobs may be sent there all the same, so it is no error."""
    known = queues_of(registry)
    return [queue for lane in settings.lanes for queue in lane.queues if queue not in known]


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Log to the standard error, unless the app has set logging up; set the level of our own loggers."""
    log_to_stderr(level.upper(), log_format)
    logging.getLogger("propolis").setLevel(level.upper())
    setup = log_setup()
    if log_format is LogFormat.JSON and (setup is None or setup.format is not log_format):
        log.warning("--log-format json changes nothing: the app has set logging up in its own way")

"""propolis beside its peers: the same work on each, in one run, on private servers.

    python benchmarks/peers.py --engine postgres --only pgqueuer,propolis --jobs 20000 --repeat 3
    python benchmarks/peers.py --write docs/benchmarks.md          # everything, into the documentation
    python benchmarks/peers.py --render run.json --write docs/benchmarks.md

Each peer gets an environment of its own below --cache, made when it is missing.  Measured are sending one by
one and in bulk, draining with one worker process (rate, CPU of worker and server, memory), the latency from
sent to started when idle, and, since speed without it is not comparable, what a kill -9 in the middle leaves
behind.  A peer that fails or hangs is reported with the reason and does not stop the others.  Turns go over
all peers, so that a machine that grows slower does so for all.  Read the ratios, not the rates.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness import results as store
from harness.catalogue import Engine, Peer, chosen
from harness.document import write
from harness.environments import Environment, Environments, Unavailable
from harness.process import Event, StepFailed, ask
from harness.results import Results, Row
from harness.steps import STEPS, Bench, Options
from harness.storage import Storage, running
from harness.tables import notes, ratios, table

ROOT = Path(__file__).resolve().parent.parent


class Progress:
    """One line on stderr: rewritten on a terminal, only its last state elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self._live:
            print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._live else text, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A peer that has started at least once, with its row."""

    peer: Peer
    environment: Environment
    row: Row
    about: Event


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers and workers go with us
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also when started in the background
    if arguments.render:
        for path in arguments.render:
            found = store.read(path)
            found.caveat, found.label = arguments.caveat or found.caveat, arguments.label or found.label
            publish(found, arguments.write)
        return 0
    progress = Progress()
    for engine in arguments.engine or list(Engine):
        found = run(engine, arguments, progress)
        path = arguments.cache / "results" / f"{engine}-{datetime.now(UTC):%Y%m%dT%H%M%S}.json"
        store.dump(found, path)
        progress.line(f"raw results: {path}")
        publish(found, arguments.write)
    return 0


def publish(found: Results, document: Path | None) -> None:
    print(f"\n## {found.engine}: {found.storage}, {found.storage_settings}\n{found.date}; {found.machine}\n")
    print(table(found), ratios(found), notes(found), sep="\n\n")
    if document:
        written = ", ".join(str(path) for path in write(found, document))
        print(f"\nwritten: {written}", file=sys.stderr)


def run(engine: Engine, arguments: argparse.Namespace, progress: Progress) -> Results:
    options = options_from(arguments)
    with running(engine, arguments.cache) as storage:
        found = Results(
            engine=engine,
            storage=storage.version,
            storage_settings=storage.settings,
            date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            machine=store.machine(),
            options=asdict(options) | {"repeat": arguments.repeat},
            caveat=arguments.caveat,
            label=arguments.label,
        )
        entrants = list(
            enter(chosen([engine], arguments.only, arguments.without), arguments, found, storage, progress)
        )
        steps = arguments.steps or list(STEPS)
        for turn in range(arguments.repeat):
            for entrant in entrants:
                for step in [name for name in steps if turn == 0 or name not in arguments.once]:
                    label = f"{engine} {turn + 1}/{arguments.repeat} {entrant.peer.name} {step}"
                    measure(entrant, step, storage, options, progress, label)
    return found


def enter(
    peers: Sequence[Peer], arguments: argparse.Namespace, found: Results, storage: Storage, progress: Progress
) -> list[Entrant]:
    """Make the environments and ask each peer about itself; who cannot start keeps a row with the reason."""
    environments = Environments(arguments.cache, latest=arguments.latest)
    entrants = []
    for peer in peers:
        row = Row(peer.name, peer.language)
        found.rows.append(row)
        progress.show(f"{peer.engine} {peer.name}: environment")
        try:
            environment = environments.of(peer)
            options = {"url": storage.fresh(), "variant": peer.variant}
            about = ask(environment, "about", options, within=arguments.deadline)
            ask(environment, "setup", options, within=arguments.deadline)
        except (Unavailable, StepFailed) as error:
            row.failures["start"] = str(error)
            progress.line(f"{peer.engine} {peer.name}: cannot be run: {error}")
            continue
        row.version, row.settings, row.packages = about["version"], about["settings"], environment.packages
        entrants.append(Entrant(peer, environment, row, about))
    return entrants


def measure(
    entrant: Entrant, step: str, storage: Storage, options: Options, progress: Progress, label: str
) -> None:
    if step == "bulk" and not entrant.about["bulk"]:
        return
    bench = Bench(
        entrant.environment,
        storage,
        options,
        entrant.peer.variant,
        entrant.about["bulk"],
        entrant.about["needs_worker_first"],
        lambda text: progress.show(f"{label}: {text}"),
    )
    progress.show(label)
    began = time.monotonic()
    try:
        figures = STEPS[step](bench)
    except StepFailed as error:
        entrant.row.failures[step] = str(error)
        progress.line(f"{label}: FAILED after {time.monotonic() - began:.0f} s: {error}")
        return
    entrant.row.add(step, figures)
    answer = ", ".join(f"{name} {value:,.6g}" for name, value in figures.items())
    progress.line(f"{label}: {answer} ({time.monotonic() - began:.0f} s)")


def options_from(arguments: argparse.Namespace) -> Options:
    return Options(
        jobs=arguments.jobs,
        backlog=arguments.backlog,
        seconds=arguments.seconds,
        send_jobs=arguments.send_jobs,
        latency_jobs=arguments.latency_jobs,
        crash_jobs=arguments.crash_jobs,
        crash_wait=arguments.crash_wait,
        deadline=arguments.deadline,
    )


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Options()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--engine",
        type=Engine,
        action="append",
        choices=list(Engine),
        help="may be given again (default: all)",
    )
    add("--only", type=names, default=[], help="names of peers, with commas")
    add("--without", type=names, default=[], help="names of peers, with commas")
    add("--steps", type=names, default=[], help=f"of {', '.join(STEPS)} (default: all)")
    add("--once", type=names, default=[], help="steps that only the first turn takes, as crash")
    add("--jobs", type=int, default=default.jobs, help="to send in bulk and to drain")
    add("--backlog", type=int, default=default.backlog, help="jobs that wait besides, while those drain")
    add("--seconds", type=float, default=default.seconds, help="after which slow peers may stop a step")
    add("--send-jobs", type=int, default=default.send_jobs)
    add("--latency-jobs", type=int, default=default.latency_jobs)
    add("--crash-jobs", type=int, default=default.crash_jobs)
    add("--crash-wait", type=float, default=default.crash_wait, help="seconds to wait for the rest")
    add("--deadline", type=float, default=default.deadline, help="seconds after which a step has failed")
    add("--repeat", type=int, default=1, help="turns over all peers; medians are told")
    add("--cache", type=Path, default=ROOT / ".benchmarks", help="where environments and raw results go")
    add("--latest", action="store_true", help="the newest versions instead of the pinned ones")
    add("--caveat", default="", help="a sentence about this run that goes into the document")
    add("--label", default="", help="what is special about this run; it then has a place of its own")
    add("--write", type=Path, metavar="FILE.md", help="write tables and charts into this document")
    add("--render", type=Path, nargs="+", metavar="RUN.json", help="only show or write these raw results")
    arguments = parser.parse_args(argv)
    if unknown := [step for step in (*arguments.steps, *arguments.once) if step not in STEPS]:
        parser.error(f"no step named {', '.join(unknown)}: there are {', '.join(STEPS)}")
    try:
        chosen(list(Engine), arguments.only, arguments.without)
    except LookupError as error:
        parser.error(str(error))
    arguments.cache = Path(os.path.abspath(arguments.cache))
    return arguments


if __name__ == "__main__":
    sys.exit(main())

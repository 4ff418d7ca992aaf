"""What is measured of each peer, step by step.  Each step begins with an empty storage."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from harness.environments import Environment
from harness.process import Adapter, Event, StepFailed, ask
from harness.statistics import percentile
from harness.storage import Storage

Figures = dict[str, float]

FIRST = -1  # the number of a job that only shows that the worker is up
OFF_THE_EDGE = 37  # jobs after the half at which the worker is killed: not at the end of a round bundle
UP = 2.0  # seconds in which a job that was heard at all has been started
WARM = 20  # jobs before the latency counts
PAUSE = (0.01, 0.03)  # seconds between two jobs of the latency step
STALLED = 30.0  # seconds without progress after which a drain has failed
LINGER = 2.0  # seconds to look for second runs when all jobs have finished


@dataclass(frozen=True, slots=True)
class Options:
    jobs: int = 20_000
    backlog: int = 0
    seconds: float = 10.0  # for which a peer may send, load or drain; the slow ones do fewer jobs
    send_jobs: int = 2_000
    latency_jobs: int = 200
    crash_jobs: int = 2_000
    crash_wait: float = 60.0
    deadline: float = 120.0


@dataclass(frozen=True, slots=True)
class Bench:
    """One peer on one engine, ready to be measured."""

    environment: Environment
    storage: Storage
    options: Options
    variant: str
    has_bulk: bool
    needs_worker_first: bool
    progress: Callable[[str], None]

    def fresh(self) -> str:
        url = self.storage.fresh()
        self.ask("setup", url)
        return url

    def ask(self, command: str, url: str, **options: Any) -> Event:
        return ask(self.environment, command, self._options(url, options), within=self.options.deadline)

    def start(self, command: str, url: str, **options: Any) -> Adapter:
        return Adapter(self.environment, command, self._options(url, options))

    def worker(self, url: str, task: str, count: int = 0) -> Adapter:
        return self.start("work", url, task=task, count=count)

    def load(self, url: str, count: int, *, seconds: float) -> int:
        """Put jobs by the fastest means; how many there are in the end."""
        command = "bulk" if self.has_bulk else "send"
        size = 1000 if count % 1000 == 0 else count
        sent = self.ask(command, url, count=count, seconds=seconds, size=min(size, 1000))["sent"]
        self.storage.settle(url)
        return int(sent)

    def wake(self, url: str, worker: Adapter) -> None:
        """Send a job, again where nobody heard it, until the worker has shown that it is up."""
        deadline = time.monotonic() + self.options.deadline
        while time.monotonic() < deadline:
            self.ask("send", url, count=1, first=FIRST)
            if worker.says_something(within=UP):
                return
        raise StepFailed("work: the first job was not started before the deadline")

    @contextlib.contextmanager
    def loaded_worker(
        self, url: str, task: str, jobs: int, backlog: int = 0
    ) -> Iterator[tuple[Adapter, int]]:
        """A worker with jobs to do, and how many of them count (the slow to send have fewer)."""
        seconds = 2 * self.options.seconds
        if not self.needs_worker_first:
            loaded = self.load(url, jobs + backlog, seconds=seconds)
            wanted = min(jobs, max(2, loaded - backlog))
            with self.worker(url, task, wanted) as worker:
                yield worker, wanted
            return
        with self.worker(url, task) as worker:
            self.wake(url, worker)
            with worker.stopped():
                loaded = self.load(url, jobs, seconds=seconds)
                worker.left_over()
            yield worker, loaded

    def _options(self, url: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"url": url, "variant": self.variant, **options}


def send(bench: Bench) -> Figures:
    """One by one, each acknowledged before the next."""
    answer = bench.ask("send", bench.fresh(), count=bench.options.send_jobs, seconds=bench.options.seconds)
    return {"rate": answer["sent"] / answer["seconds"], "cpu_us": 1e6 * answer["cpu"] / answer["sent"]}


def bulk(bench: Bench) -> Figures:
    """By the peer's own means for many, 1,000 at a time."""
    answer = bench.ask(
        "bulk", bench.fresh(), count=bench.options.jobs, seconds=bench.options.seconds, size=1000
    )
    if not answer["sent"]:
        raise StepFailed("bulk: nothing was sent")
    return {"rate": answer["sent"] / answer["seconds"], "cpu_us": 1e6 * answer["cpu"] / answer["sent"]}


def drain(bench: Bench) -> Figures:
    """From the first job that starts to the last, by one worker process; its start does not count."""
    options, url = bench.options, bench.fresh()
    with bench.loaded_worker(url, "noop", options.jobs, options.backlog) as (worker, wanted):
        return _drained(bench, worker, max(2, wanted))


def _drained(bench: Bench, worker: Adapter, wanted: int) -> Figures:
    options = bench.options
    first: Event | None = None
    server = 0.0
    heard = time.monotonic()
    last: Event = {}
    for event in worker.events(time.monotonic() + options.deadline):
        if first is None:
            first, server = event, bench.storage.cpu_seconds()
        if event["done"] != last.get("done"):
            heard = time.monotonic()
        last = event
        bench.progress(f"{event['done']:,} of {wanted:,}")
        done = event["done"] > first["done"]
        if done and (event["done"] >= wanted or event["at"] - first["at"] >= options.seconds):
            return _rate(first, event, bench.storage.cpu_seconds() - server)
        if time.monotonic() - heard > STALLED:
            raise StepFailed(f"drain: stands still at {event['done']:,} of {wanted:,}")
    raise worker.gone()


def _rate(first: Event, last: Event, server: float) -> Figures:
    done = last["done"] - first["done"]
    return {
        "jobs": done,
        "rate": done / (last["at"] - first["at"]),
        "cpu_us": 1e6 * (last["cpu"] - first["cpu"]) / done,
        "server_us": 1e6 * server / done,
        "rss_mb": last["rss"],
    }


def latency(bench: Bench) -> Figures:
    """Sent to started, when the worker has nothing else to do."""
    options, url = bench.options, bench.fresh()
    found: dict[int, float] = {}
    deadline = time.monotonic() + options.deadline
    with bench.worker(url, "latency") as worker:
        bench.wake(url, worker)
        total = options.latency_jobs + WARM
        with bench.start("latency", url, count=total, pause=PAUSE):
            for event in worker.events(deadline):
                if event["number"] != FIRST:
                    found[event["number"]] = event["latency"]
                if len(found) == total:
                    break
            else:
                raise worker.gone()
    times = sorted(value for number, value in found.items() if number >= WARM)
    return {"p50_ms": percentile(times, 50), "p99_ms": percentile(times, 99), "jobs": len(times)}


def crash(bench: Bench) -> Figures:
    """Kill the worker half-way with -9, start another: what stays unfinished, and what ran twice."""
    options, url = bench.options, bench.fresh()
    finished: Counter[int] = Counter()
    with bench.loaded_worker(url, "slow", options.crash_jobs) as (first, loaded):
        for event in first.events(time.monotonic() + options.deadline):
            _note(event, finished)
            if "started" in event and finished.total() >= loaded // 2 + OFF_THE_EDGE:
                break  # in the middle of a job
        else:
            raise first.gone()
        first.kill()
        for event in first.left_over():
            _note(event, finished)
    killed = time.monotonic()
    half = finished.total()
    with bench.worker(url, "slow") as second:
        whole_after = _await_the_rest(bench, second, finished, loaded, killed + options.crash_wait)
    return {
        "jobs": loaded,
        "killed_at": half,
        "unfinished": loaded - len(finished),
        "twice": sum(1 for times in finished.values() if times > 1),
        "whole_after_s": (whole_after - killed) if whole_after else float("nan"),
    }


def _note(event: Event, finished: Counter[int]) -> None:
    if event.get("finished", FIRST) != FIRST:
        finished[event["finished"]] += 1


def _await_the_rest(
    bench: Bench, worker: Adapter, finished: Counter[int], wanted: int, deadline: float
) -> float | None:
    """When the last of them finished; None where some are missing at the deadline."""
    whole: float | None = None
    try:
        for event in worker.events(deadline):
            _note(event, finished)
            if "finished" in event:
                bench.progress(f"{len(finished):,} of {wanted:,} finished")
            if whole is None and len(finished) >= wanted:
                whole = time.monotonic()
                break
        else:
            raise worker.gone()
        for event in worker.events(whole + LINGER):
            _note(event, finished)
    except StepFailed:
        if time.monotonic() < deadline and whole is None:
            raise
    return whole


STEPS: dict[str, Callable[[Bench], Figures]] = {
    "send": send,
    "bulk": bulk,
    "drain": drain,
    "latency": latency,
    "crash": crash,
}

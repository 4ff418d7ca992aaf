"""Run pytest in a process of its own and end what hangs there, with all stacks.

    python -m tools.watchdog [--limit SECONDS] [--stall SECONDS] [--] [arguments of pytest]

An alarm inside the process is no help against a test that hangs: raised in an event loop it can be caught,
and it never comes while the test is blocked in C.  So each process of pytest only writes down which test it
runs (`tools.watched`), and this process reads that.

- A test that runs for longer than its limit is ended: the stacks of all threads and of all asyncio tasks are
  printed, then its process and everything that the process has started are killed.  pytest-xdist reports the
  test as failed and goes on with another process; without pytest-xdist the run is over.
- If no process of pytest reports anything for a long time and no test is running, all of them are ended in
  the same way: pytest itself hangs, at its start or at its end.

In both cases the run fails, and the last lines name what hung.  `@pytest.mark.more_time(full=seconds)` gives
a test more time than the others have where it runs at its full size (`--full`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.watched import FOLDER, LIMIT, STACKS_OF_TASKS, STACKS_OF_THREADS

# A test takes seconds; on a machine with five times more work than cores, a slow one takes minutes.
LIMIT_SECONDS = 300.0
# Longer than it takes such a machine to collect all tests, or to add up the coverage of all processes.
STALL_SECONDS = 900.0
LOOK_EVERY = 0.5
WRITES_STACKS_WITHIN = 5.0


@dataclass(slots=True)
class Watched:
    """A process of pytest, the last that it has reported, and when that was first seen."""

    pid: int
    report: str
    since: float

    @property
    def test(self) -> str | None:
        name: str | None = json.loads(self.report)["test"]
        return name

    @property
    def limit(self) -> float:
        return float(json.loads(self.report)["limit"])


class Watchdog:
    """Watches one run of pytest, whose processes report to files in `folder`."""

    def __init__(self, run: subprocess.Popen[bytes], folder: Path, *, stall: float) -> None:
        self.hung: list[str] = []
        self._run = run
        self._folder = folder
        self._stall = stall
        self._processes: dict[int, Watched] = {}
        self._ended: set[int] = set()
        self._last_change = time.monotonic()

    def watch(self) -> int:
        """Wait for the end of the run; gives its exit code, which is never 0 if something hung."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._run.wait(LOOK_EVERY)
                break
            self._read_reports()
            self._end_tests_over_their_limit()
            self._end_everything_if_it_stalls()
        self._kill_group()  # what tests have left behind
        return code or (1 if self.hung else 0)

    def end(self) -> None:
        self._kill_group()
        self._run.wait()

    def _read_reports(self) -> None:
        now = time.monotonic()
        for path in self._folder.glob("*.json"):
            pid, report = int(path.stem), path.read_text("utf-8")
            known = self._processes.get(pid)
            if known is None or known.report != report:
                self._processes[pid] = Watched(pid, report, now)
                self._last_change = now

    def _end_tests_over_their_limit(self) -> None:
        now = time.monotonic()
        for process in self._processes.values():
            if process.pid in self._ended or process.test is None or not is_alive(process.pid):
                continue
            if now - process.since > process.limit:
                self.hung.append(process.test)
                say(f"{process.test} has run for more than {process.limit:.0f} s: its process is ended")
                self._end_process(process)
                self._last_change = time.monotonic()

    def _end_everything_if_it_stalls(self) -> None:
        alive = [each for each in self._processes.values() if each.pid not in self._ended]
        if any(each.test is not None and is_alive(each.pid) for each in alive):
            return  # that test has a limit of its own
        if time.monotonic() - self._last_change > self._stall:
            self.hung.append("pytest itself, between tests")
            say(f"pytest has reported nothing for {self._stall:.0f} s: all its processes are ended")
            for process in alive:
                self._end_process(process)
            self._kill_group()

    def _end_process(self, process: Watched) -> None:
        self._ended.add(process.pid)
        family = [process.pid, *descendants(process.pid)]
        print(self._stacks(process.pid), flush=True)
        for pid in family:
            print(f"{pid:>9} {description(pid)}", flush=True)
        for pid in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _stacks(self, pid: int) -> str:
        """What the process writes when it is asked for its stacks, first those of its threads."""
        path = self._folder / f"{pid}.stacks"
        if not path.exists():
            return f"process {pid} has not come so far that it could show its stacks"
        for number in (STACKS_OF_THREADS, STACKS_OF_TASKS):
            size = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            deadline = time.monotonic() + WRITES_STACKS_WITHIN
            while path.stat().st_size == size and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.2)  # it may be in the middle of them
        return path.read_text("utf-8", errors="replace")

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._run.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def descendants(pid: int) -> Iterator[int]:
    """Everything that the process has started, in whatever group; nothing off Linux."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def description(pid: int) -> str:
    """The command of a process and the call of the system in which it waits, as far as the system tells."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        waits_in = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "(gone)"
    return f"{command.strip()[:200]} (in {waits_in})"


def say(text: str) -> None:
    print(f"\nwatchdog: {text}", flush=True)


def run(arguments: Sequence[str], *, limit: float = LIMIT_SECONDS, stall: float = STALL_SECONDS) -> int:
    """Run pytest with these arguments under a watchdog; gives the exit code."""
    with tempfile.TemporaryDirectory(prefix="watchdog-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "pytest", "-p", "tools.watched", *arguments]
        environment = {**os.environ, FOLDER: name, LIMIT: str(limit)}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        dog = Watchdog(process, folder, stall=stall)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            code = watch_until_interrupted(dog, process)
        finally:
            dog.end()
    for test in dog.hung:
        say(f"HUNG: {test}")
    return code if code >= 0 else 128 - code


def watch_until_interrupted(dog: Watchdog, process: subprocess.Popen[bytes]) -> int:
    """Hand the first Ctrl-C on to pytest, which then ends by itself; the second ends this."""
    try:
        return dog.watch()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        return dog.watch() or 130


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that a test may take")
    parser.add_argument("--stall", type=float, default=STALL_SECONDS, help="seconds without any report")
    options, arguments = parser.parse_known_args()
    return run([each for each in arguments if each != "--"], limit=options.limit, stall=options.stall)


if __name__ == "__main__":
    sys.exit(main())

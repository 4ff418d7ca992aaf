"""This tree against an earlier commit of it: CPU per job, in alternating pairs.

    python benchmarks/against.py before-7                      # all engines, 15 pairs
    python benchmarks/against.py before-7 --engine sqlite --pairs 5

A machine's speed changes by the hour, so nothing is compared but the two halves of a pair, which run one
after the other, each time in the other order.  The figure is the CPU of the process that puts and runs the
jobs together with that of the server; the median of the ratios is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.private import KINDS, Private, private

ROOT = Path(__file__).resolve().parents[1]
CHILD = Path(__file__).with_name("against_child.py")
PHASES = ("single", "bulk", "drain")
# Whether what is freed lies at the end of the heap, and goes back to the kernel each time, is luck: the same
# code has two page faults for each single put, 15 % of its CPU, or none.
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


@contextmanager
def tree_at(revision: str) -> Iterator[Path]:
    """The sources of a commit, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="propolis-against-") as folder:
        archive = subprocess.run(
            ["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder) / "src"


def package_in(sources: Path) -> str:
    """The one package in there: its name has changed once."""
    [found] = [each.parent.name for each in sources.glob("*/__init__.py")]
    return found


def storage_for(kind: str, server: Private, number: int, folder: Path) -> str:
    """The URL of an empty storage on this server."""
    match kind:
        case "sqlite":
            return f"sqlite:///{folder}/{number}.db"
        case "postgres":
            return f"{server.url}?schema=against_{number}"
        case "redis":
            return f"{server.url}?prefix=against-{number}:"
        case _:
            return server.url


def measured(sources: Path, url: str, server: Private, jobs: int) -> dict[str, float]:
    """Microseconds of CPU per job in each phase, those of the server included."""
    command = [sys.executable, str(CHILD), package_in(sources), str(jobs)]
    environment = {**os.environ, **STEADY_HEAP, "PYTHONPATH": str(sources), "AGAINST_URL": url}
    figures: dict[str, float] = {}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for phase in PHASES:
            assert child.stdout.readline().strip() == phase, "the measured process ended: see above"
            before = server.cpu_seconds()
            print(phase, file=child.stdin, flush=True)
            answer = json.loads(child.stdout.readline())
            figures[phase] = (answer["cpu"] + server.cpu_seconds() - before) / answer["jobs"] * 1e6
    return figures


def compare(kind: str, other: Path, pairs: int, jobs: int) -> dict[str, list[tuple[float, float]]]:
    """For each phase the figures of the pairs: ours, then theirs."""
    found: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    with private(kind) as server, tempfile.TemporaryDirectory(prefix="propolis-against-") as folder:
        for pair in range(pairs):
            figures: dict[Path, dict[str, float]] = {}
            order = [ROOT / "src", other] if pair % 2 else [other, ROOT / "src"]
            for half, sources in enumerate(order):
                url = storage_for(kind, server, 2 * pair + half, Path(folder))
                figures[sources] = measured(sources, url, server, jobs)
            for phase in PHASES:
                found[phase].append((figures[ROOT / "src"][phase], figures[other][phase]))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def row(kind: str, phase: str, pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    quarter = len(ratios) // 4
    spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
    return (
        f"| {kind} | {phase} | {ours:.2f} | {theirs:.2f} | **{statistics.median(ratios):.3f}** | {spread} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", help="the commit or tag to compare with")
    parser.add_argument("--engine", choices=KINDS, action="append", help="default: all of them")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=20_000, help="in bulk and to drain; a tenth one by one")
    arguments = parser.parse_args()
    print("| engine | phase | this tree, µs/job | before, µs/job | ratio | middle half of the ratios |")
    print("|---|---|---|---|---|---|")
    with tree_at(arguments.revision) as other:
        for kind in arguments.engine or KINDS:
            found = compare(kind, other, arguments.pairs, arguments.jobs)
            for phase in PHASES:
                print(row(kind, phase, found[phase]), flush=True)


if __name__ == "__main__":
    main()

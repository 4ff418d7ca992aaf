"""A ledger outside of the engine: a proof about the engine must not rest on what the engine says."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

from msgspec import Struct

from propolis.app.context import Job
from propolis.core.job import JobInfo, State


def started(job: Job) -> None:
    """Write down that this job runs, in a line of its own."""
    path = os.environ.get("PROPOLIS_DEMO_LEDGER")
    if path is not None:
        ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(ledger, f"{job.id} {job.fence}\n".encode())
        os.close(ledger)


class Proof(Struct):
    """What the ledger and the engine say of the same jobs."""

    sent: int
    ended: dict[State, int]
    lost: list[str]
    further_runs: int
    reasons: dict[str, int]
    unexplained: list[str]

    @property
    def holds(self) -> bool:
        return not self.lost and not self.unexplained and sum(self.ended.values()) == self.sent


def prove(sent: list[str], infos: list[JobInfo], ledger: Path) -> Proof:
    """Compare what was sent, what was started and what has ended."""
    starts: defaultdict[str, list[int]] = defaultdict(list)
    for line in ledger.read_text().splitlines():
        job_id, number = line.split()
        starts[job_id].append(int(number))
    by_id = {info.id: info for info in infos}
    ended = Counter(info.state for info in infos if info.state.terminal)
    reasons: Counter[str] = Counter()
    unexplained = []
    for info in infos:
        explained = {event.fence: _reason(event.kind, event.note) for event in info.history}
        for fence in sorted(starts[info.id])[:-1]:  # each but the last was followed by another
            if fence in explained:
                reasons[explained[fence]] += 1
            else:
                unexplained.append(info.id)
    return Proof(
        sent=len(sent),
        ended=dict(ended),
        lost=[job_id for job_id in sent if job_id not in by_id or not by_id[job_id].state.terminal],
        further_runs=sum(max(len(fences) - 1, 0) for fences in starts.values()),
        reasons=dict(reasons),
        unexplained=unexplained,
    )


def _reason(kind: str, note: str) -> str:
    if kind == "lost":
        return "its worker was killed"
    if kind == "retried":
        return "it timed out" if note.startswith("TimeoutError") else "it raised an error"
    return f"it was {kind}"

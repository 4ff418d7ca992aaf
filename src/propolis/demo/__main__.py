"""Jobs that flow, fail, time out and survive kill -9, and the proof that each of them ended exactly once."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.envelope import Envelope
from propolis.core.job import Event, JobInfo, State
from propolis.core.protocols import Engine, Filter
from propolis.demo.ledger import Proof, prove
from propolis.demo.screen import Screen
from propolis.engines.address import masked

TOO_LONG = 90.0
FIRST_KILL = 3.0
QUEUE = "default"
APP = "propolis.demo.tasks:app"


class Show:
    """Two workers, one of which will be killed, and the jobs that they share."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self._log = folder / "workers.log"
        self.screen = screen
        self.sent: list[str] = []
        self._shown: set[tuple[str, int]] = set()
        self._began = time.monotonic()
        os.environ["PROPOLIS_DEMO_URL"] = f"sqlite:///{folder}/demo.db"
        os.environ["PROPOLIS_DEMO_LEDGER"] = str(self.ledger)
        self._workers = [self._start_worker(), self._start_worker()]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _start_worker(self) -> subprocess.Popen[bytes]:
        command = [
            "worker",
            "propolis.demo.tasks:app",
            "-q",
            f"{QUEUE}=8",
            "--lease",
            "3s",
            "--log-level",
            "error",
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "propolis", *command], stderr=log)

    async def send(self, engine: Engine, jobs: list[Envelope]) -> None:
        await engine.put(jobs)
        self.sent += [job.id for job in jobs]

    def busy(self, infos: list[JobInfo]) -> subprocess.Popen[bytes] | None:
        """A worker in the middle of a job that, as the ledger says, has started."""
        started = set(self.ledger.read_text().split("\n"))
        holders = [r.holder or "" for r in infos if r.holder and f"{r.id} {r.fence}" in started]
        return next((w for w in self._workers for h in holders if f":{w.pid}:" in h), None)

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        self._workers.remove(victim)
        victim.kill()
        victim.wait()
        self.screen.add(f"  {self.seconds:4.1f} s  kill -9 of worker {victim.pid}, in the middle of its jobs")
        self._workers.append(self._start_worker())
        self.screen.add(f"  {self.seconds:4.1f} s  worker {self._workers[-1].pid} takes its place")
        self.screen.add(
            f"  {self.seconds:4.1f} s  the leases of worker {victim.pid} end after 3 s: its jobs run again"
        )

    def check(self) -> None:
        """End the demo if a worker has ended by itself, which is not part of the play."""
        for worker in self._workers:
            if worker.poll() is not None:
                raise SystemExit(f"worker {worker.pid} ended by itself:\n{self._log.read_text()[-2000:]}")

    def workers(self) -> list[str]:
        return [str(worker.pid) for worker in self._workers]

    def stop(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait()

    async def show_events(self, engine: Engine) -> None:
        """Show what has happened to jobs since the last call, as it stands in their histories."""
        events: Counter[str] = Counter()
        for info in await every_record(engine):
            for event in info.history:
                if (info.id, event.fence) not in self._shown:
                    self._shown.add((info.id, event.fence))
                    events[f"{info.task} {_described(event)}"] += 1
        for what, n in sorted(events.items()):
            self.screen.add(f"  {self.seconds:4.1f} s  {n} × {what}")

    async def watch(self, engine: Engine) -> None:
        """Watch until every job has ended; kill the first worker that is busy with long jobs."""
        killed = False
        while self.seconds < TOO_LONG:
            self.check()
            queues = await engine.queues()
            await self.show_events(engine)
            self.screen.show(self.seconds, queues, self.workers(), len(self.sent))
            counts = queues.get(QUEUE)
            if counts is not None and not counts.waiting and not counts.running:
                return
            if not killed and self.seconds > FIRST_KILL:
                page = await engine.find(Filter(state=State.RUNNING, task="import_file"))
                if victim := self.busy(page.jobs):
                    killed = True
                    self.kill(victim)
            await asyncio.sleep(0.2)
        self.screen.add(f"  {self.seconds:4.1f} s  this takes too long: the machine must be very busy")


def _described(event: Event) -> str:
    if event.kind == "released":
        return "released: given back before it began, for whoever is free"
    return f"{event.kind} after {event.note}" if event.note else event.kind


def what_to_send(app: Registry) -> list[Envelope]:
    call, mail = app.tasks["call_partner"], app.tasks["send_mail"]
    jobs = [mail.job(f"customer{n}@example.org") for n in range(200)]
    jobs += [call.job(n % 3 + 1) for n in range(30)]
    # One worker is killed: it can spoil one attempt of a job, so that the last of these times out for sure.
    jobs += [app.tasks["render"].job(n) for n in (2, 2, 2, 2, 3)]
    jobs += [app.tasks["import_file"].job(12) for _ in range(30)]
    jobs += [app.tasks["charge_card"].job() for _ in range(3)]
    return jobs


async def every_record(engine: Engine) -> list[JobInfo]:
    page = await engine.find(Filter(), limit=10_000)
    return page.jobs


async def play(folder: Path) -> Proof:
    with Screen() as screen:
        show = Show(folder, screen)
        app = load_app(APP)  # now, since its URL is in the environment only now
        engine = await app.client.ready()
        try:
            jobs = what_to_send(app)
            await show.send(engine, jobs)
            screen.add(f"  {show.seconds:4.1f} s  sent {len(jobs)} jobs to {masked(app.url)}")
            screen.add(f"  {show.seconds:4.1f} s  two workers: {', '.join(show.workers())}")
            await show.watch(engine)
        finally:
            show.stop()
        proof = prove(show.sent, await every_record(engine), show.ledger)
        await app.aclose()
    return proof


def print_proof(proof: Proof) -> None:
    ended = proof.ended
    print(f"\n{proof.sent} jobs sent, {sum(ended.values())} ended, {len(proof.lost)} lost.")
    done, dead = ended.get(State.DONE, 0), ended.get(State.DEAD, 0)
    print(f"  {done} done, {dead} on the dead shelf (the cards that were declined).")
    print(f"  {proof.further_runs} further runs, each explained in the history of its job:")
    for reason, n in sorted(proof.reasons.items()):
        print(f"    {n:3} because {reason}")
    if proof.holds:
        print("Every job ended exactly once, and every further run has its reason.")
    else:
        print(f"NOT PROVED: lost {proof.lost}, unexplained {proof.unexplained}")


def main() -> int:
    print("The tasks of the demo (propolis/demo/tasks.py; started() writes to a ledger beside the engine):\n")
    source = Path(inspect.getsourcefile(Proof) or "").with_name("tasks.py").read_text(encoding="utf-8")
    print("    " + source.partition("\n\n\n")[2].replace("\n", "\n    ").rstrip())
    print("\nTwo worker processes share a SQLite file; no server is needed.\n")
    with tempfile.TemporaryDirectory(prefix="propolis-demo-") as folder:
        proof = asyncio.run(play(Path(folder)))
    print_proof(proof)
    return 0 if proof.holds else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nstopped")

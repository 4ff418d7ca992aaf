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

from skep.broker import Engine, Filter
from skep.demo.ledger import Proof, prove
from skep.demo.screen import Screen
from skep.job import Event, Job, Record, State
from skep.loading import load_app
from skep.registry import Registry

TOO_LONG = 90.0
FIRST_KILL = 3.0
QUEUE = "default"
APP = "skep.demo.tasks:app"


class Show:
    """Two workers, one of which will be killed, and the jobs that they share."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self._log = folder / "workers.log"
        self.screen = screen
        self.sent: list[str] = []
        self._heard: set[tuple[str, int]] = set()
        self._began = time.monotonic()
        os.environ["SKEP_DEMO_URL"] = f"sqlite:///{folder}/demo.db"
        os.environ["SKEP_DEMO_LEDGER"] = str(self.ledger)
        self._workers = [self._start_worker(), self._start_worker()]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def _start_worker(self) -> subprocess.Popen[bytes]:
        command = [
            "worker",
            "skep.demo.tasks:app",
            "-q",
            f"{QUEUE}=8",
            "--lease",
            "3s",
            "--log-level",
            "error",
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "skep", *command], stderr=log)

    async def send(self, engine: Engine, jobs: list[Job]) -> None:
        await engine.put(jobs)
        self.sent += [job.id for job in jobs]

    def busy(self, records: list[Record]) -> subprocess.Popen[bytes] | None:
        """A worker in the middle of a job that has started, by the word of the ledger."""
        started = set(self.ledger.read_text().split("\n"))
        holders = [r.holder or "" for r in records if r.holder and f"{r.id} {r.fence}" in started]
        return next((w for w in self._workers for h in holders if h.endswith(f":{w.pid}")), None)

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        self._workers.remove(victim)
        victim.kill()
        victim.wait()
        self.screen.tell(
            f"  {self.seconds:4.1f} s  kill -9 of worker {victim.pid}, in the middle of its jobs"
        )
        self._workers.append(self._start_worker())
        self.screen.tell(f"  {self.seconds:4.1f} s  worker {self._workers[-1].pid} takes its place")
        self.screen.tell(f"  {self.seconds:4.1f} s  when the leases of 3 s have run out, its jobs run again")

    def check(self) -> None:
        """A worker that ends by itself is not part of the play."""
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

    async def tell_events(self, engine: Engine) -> None:
        """What has happened to jobs since the last look, as their histories tell it."""
        told: Counter[str] = Counter()
        for record in await every_record(engine):
            for event in record.history:
                if (record.id, event.fence) not in self._heard:
                    self._heard.add((record.id, event.fence))
                    told[f"{record.task} {_said(event)}"] += 1
        for what, n in sorted(told.items()):
            self.screen.tell(f"  {self.seconds:4.1f} s  {n} × {what}")

    async def watch(self, engine: Engine) -> None:
        """Until everything has ended; the first worker is killed once it is busy with long jobs."""
        killed = False
        while self.seconds < TOO_LONG:
            self.check()
            queues = await engine.queues()
            await self.tell_events(engine)
            self.screen.show(self.seconds, queues, self.workers(), len(self.sent))
            counts = queues.get(QUEUE)
            if counts is not None and not counts.waiting and not counts.running:
                return
            if not killed and self.seconds > FIRST_KILL:
                page = await engine.find(Filter(state=State.RUNNING, task="import_file"))
                if victim := self.busy(page.records):
                    killed = True
                    self.kill(victim)
            await asyncio.sleep(0.2)
        self.screen.tell(f"  {self.seconds:4.1f} s  that takes too long: the machine must be very busy")


def _said(event: Event) -> str:
    if event.kind == "released":
        return "released: given back before it began, for whoever is free"
    return f"{event.kind} after {event.note}" if event.note else event.kind


def what_to_send(app: Registry) -> list[Job]:
    call, mail = app.tasks["call_partner"], app.tasks["send_mail"]
    jobs = [mail.job(f"customer{n}@example.org") for n in range(200)]
    jobs += [call.job(n % 3 + 1) for n in range(30)]
    jobs += [app.tasks["render"].job() for _ in range(5)]
    jobs += [app.tasks["import_file"].job(12) for _ in range(30)]
    jobs += [app.tasks["charge_card"].job() for _ in range(3)]
    return jobs


async def every_record(engine: Engine) -> list[Record]:
    page = await engine.find(Filter(), limit=10_000)
    return page.records


async def play(folder: Path) -> Proof:
    with Screen() as screen:
        show = Show(folder, screen)
        app = load_app(APP)  # now, since its URL is in the environment only now
        engine = await app.ready()
        try:
            jobs = what_to_send(app)
            await show.send(engine, jobs)
            screen.tell(f"  {show.seconds:4.1f} s  sent {len(jobs)} jobs to {app.url}")
            screen.tell(f"  {show.seconds:4.1f} s  two workers: {', '.join(show.workers())}")
            await show.watch(engine)
        finally:
            show.stop()
        proof = prove(show.sent, await every_record(engine), show.ledger)
        await app.aclose()
    return proof


def tell(proof: Proof) -> None:
    ended = proof.ended
    print(f"\n{proof.sent} jobs sent, {sum(ended.values())} ended, {len(proof.lost)} lost.")
    done, dead = ended.get(State.DONE, 0), ended.get(State.DEAD, 0)
    print(f"  {done} done, {dead} on the dead shelf (the cards that were declined).")
    print(f"  {proof.second_runs} second runs, each explained in the history of its job:")
    for reason, n in sorted(proof.reasons.items()):
        print(f"    {n:3} because {reason}")
    if proof.holds:
        print("Every job ended exactly once, and every second run has its reason.")
    else:
        print(f"NOT PROVED: lost {proof.lost}, unexplained {proof.unexplained}")


def main() -> int:
    print("These are its tasks (skep/demo/tasks.py; started() writes into a ledger beside the engine):\n")
    source = Path(inspect.getsourcefile(Proof) or "").with_name("tasks.py").read_text(encoding="utf-8")
    print("    " + source.partition("\n\n\n")[2].replace("\n", "\n    ").rstrip())
    print("\nTwo worker processes share a SQLite file; no server is needed.\n")
    with tempfile.TemporaryDirectory(prefix="skep-demo-") as folder:
        proof = asyncio.run(play(Path(folder)))
    tell(proof)
    return 0 if proof.holds else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\nstopped")

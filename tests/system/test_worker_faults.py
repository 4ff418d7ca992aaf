"""Worker processes that are killed, stopped, asked to end, or blocked."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from propolis import App
from propolis.core.ids import new_id
from propolis.core.job import JobInfo
from propolis.testing.engines.samples import a_job
from propolis.values import Filter, State

from .fleet import Fleet, cpu_seconds, wait_for


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def app(fleet: Fleet) -> Iterator[App]:
    app = App(fleet.url)
    yield app
    app.close()


def put(app: App, task: str, *args: object, **fields: object) -> str:
    job = a_job(*args, task=task, **fields)
    app.client.wait(app.client.aput(job))
    return job.id


def record_of(app: App, job_id: str) -> JobInfo:
    record = app.jobs.get(job_id)
    assert record is not None
    return record


def ended(app: App, job_id: str) -> bool:
    return record_of(app, job_id).state.terminal


def events(record: JobInfo) -> list[str]:
    return [event.kind for event in record.history]


@pytest.mark.parametrize(("options", "most"), [(["--lease", "3s"], 5.0), ([], 20.0)], ids=["3s", "default"])
def test_what_a_killed_worker_was_doing_runs_again_soon(
    fleet: Fleet, app: App, options: list[str], most: float, times_count: bool
) -> None:
    """F01, S0.12, S1.29, S2.19, S3.31, S4.8: kill -9, and the history tells why there was a further run."""
    job_id = put(app, "sleep_first", 60)
    victim = fleet.start(*options)
    wait_for(lambda: bool(fleet.lines_of("start", job_id)))
    fleet.start(*options)
    victim.kill()
    marker = put(app, "sleep", 0, delay_ms=int((most + 5) * 1000))
    took = wait_for(lambda: len(fleet.lines_of("start", job_id)) == 2)
    assert took <= most or not times_count
    # The same at any load: leased before what is due some seconds after the end of the lost lease.
    assert all(
        line.fence > fleet.lines_of("start", job_id)[1].fence for line in fleet.lines_of("start", marker)
    )
    wait_for(lambda: ended(app, job_id))
    record = record_of(app, job_id)
    assert (record.state, record.attempts, record.losses, record.crashes) == (State.DONE, 2, 1, 0)
    assert events(record) == ["lost"]


def test_a_long_job_goes_on_where_it_was_when_its_worker_was_killed(fleet: Fleet, app: App) -> None:
    """T3b: what it has saved comes with the next lease, also after kill -9."""
    job_id = put(app, "in_steps", 6)
    victim = fleet.start("--lease", "3s")
    wait_for(lambda: bool(fleet.lines_of("half", job_id)))
    victim.kill()
    fleet.start("--lease", "3s")
    wait_for(lambda: ended(app, job_id))

    assert [len(fleet.lines_of(f"step-{n}", job_id)) for n in range(6)] == [1] * 6
    assert record_of(app, job_id).losses == 1


def test_a_rolling_deploy_loses_no_lease_and_counts_no_attempt(
    fleet: Fleet, app: App, times_count: bool
) -> None:
    """F02, S0.34, S2.24, S3.32: short jobs finish, long ones start elsewhere at once, exit code 0."""
    long_id = put(app, "sleep_once", 100)
    old = fleet.start("--grace", "3s", "--lease", "10m")
    wait_for(lambda: bool(fleet.lines_of("start", long_id)))
    short_id = put(app, "sleep", 0.3)
    wait_for(lambda: bool(fleet.lines_of("start", short_id)))
    new = fleet.start_hinted()
    old.send_signal(signal.SIGTERM)
    assert old.wait(120) == 0

    # Released, and announced: the new one waits neither for the end of the lease nor for a sweep.
    took = wait_for(lambda: len(fleet.lines_of("start", long_id)) == 2)
    assert took < 2 or not times_count
    assert record_of(app, short_id).state is State.DONE
    wait_for(lambda: ended(app, long_id))
    record = record_of(app, long_id)
    assert (record.state, record.attempts, record.losses) == (State.DONE, 1, 0)
    assert events(record) == ["released"]
    assert record.due_at <= record.history[0].at  # without a delay
    new.send_signal(signal.SIGINT)
    assert new.wait(120) == 0


def test_a_second_signal_does_not_wait_for_the_grace_period(fleet: Fleet, app: App) -> None:
    """F03."""
    job_id = put(app, "sleep", 60)
    worker = fleet.start("--grace", "10m")
    wait_for(lambda: bool(fleet.lines_of("start", job_id)))
    worker.send_signal(signal.SIGTERM)
    worker.send_signal(signal.SIGINT)  # another one, since two of a kind may arrive as one
    assert worker.wait(120) == 0
    assert "Traceback" not in (worker.stderr.read() if worker.stderr else "")
    assert record_of(app, job_id).state is State.READY


def test_a_worker_that_was_stopped_past_its_lease_can_neither_settle_nor_renew(
    fleet: Fleet, app: App
) -> None:
    """F04, I4, I5, S4.10: SIGSTOP and SIGCONT; the other run decides."""
    job_id = put(app, "sleep_first", 100)
    zombie = fleet.start("--lease", "3s")
    wait_for(lambda: bool(fleet.lines_of("start", job_id)))
    zombie.send_signal(signal.SIGSTOP)
    fleet.start()
    wait_for(lambda: ended(app, job_id))
    before = record_of(app, job_id)
    zombie.send_signal(signal.SIGCONT)
    marker = put(app, "sleep", 0)
    wait_for(lambda: ended(app, marker))
    zombie.send_signal(signal.SIGTERM)
    assert zombie.wait(120) == 0
    assert "is lost" in (zombie.stderr.read() if zombie.stderr else "")
    assert record_of(app, job_id) == before
    assert (before.state, before.losses) == (State.DONE, 1)
    assert [line.pid for line in fleet.lines_of("end", job_id)].count(zombie.pid) == 0


def test_a_blocked_event_loop_loses_no_lease(fleet: Fleet, app: App) -> None:
    """F05: five times the lease, with another worker waiting for it; and somebody is told."""
    job_id = put(app, "block", 10)
    worker = fleet.start("--lease", "2s")
    fleet.start("--lease", "2s")
    wait_for(lambda: ended(app, job_id))
    record = record_of(app, job_id)
    assert (record.state, record.attempts, record.losses) == (State.DONE, 1, 0)
    assert len(fleet.lines_of("start", job_id)) == 1
    for one in fleet.workers:
        one.send_signal(signal.SIGTERM)
    errors = "".join(one.communicate(timeout=120)[1] for one in fleet.workers)
    assert "blocked for" in errors
    assert worker.returncode == 0


def test_workers_killed_all_the_time_finish_everything_and_explain_every_second_run(
    fleet: Fleet, app: App
) -> None:
    """F01, S0.21, S1.29, S1.34, L2, L3: no start without a lease, no second one without a reason."""
    ids = [put(app, "sleep", 0.02, max_crashes=100) for _ in range(300)]
    ids += [put(app, "fail_once", max_crashes=100) for _ in range(50)]
    options = ("--lease", "1s", "--concurrency", "4")
    for _ in range(3):
        fleet.start(*options)
    wait_for(lambda: any(fleet.lines()))
    for turn in range(8):
        fleet.workers[turn].kill()
        fleet.start(*options)
        seen = len(list(fleet.lines()))
        wait_for(lambda seen=seen: len(list(fleet.lines())) > seen or _all_done(app, ids))  # type: ignore[misc]
    wait_for(lambda: _all_done(app, ids), 240)

    for job_id in ids:
        record = record_of(app, job_id)
        fences = sorted(line.fence for line in fleet.lines_of("start", job_id))
        explained = {event.fence for event in record.history}
        assert set(fences[:-1]) <= explained, f"started at {fences}, explained by {record.history}"
        assert len(set(fences)) == len(fences)


def _all_done(app: App, ids: list[str]) -> bool:
    return len(app.jobs.find(Filter(state=State.DONE), limit=len(ids) + 1)) == len(ids)


def test_a_worker_whose_file_is_gone_ends_with_an_error(fleet: Fleet, app: App, tmp_path: Path) -> None:
    """Within a sweep: what is put now goes nowhere, and somebody is to start it anew."""
    worker = fleet.start()
    marker = put(app, "sleep", 0)
    wait_for(lambda: ended(app, marker))
    for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    assert worker.wait(120) == 1
    assert worker.stderr is not None
    assert "deleted or replaced" in worker.stderr.read()


def test_an_idle_worker_sleeps(fleet: Fleet, app: App) -> None:
    """S1.25, S1.27: it wakes up a few times in a second; and nothing appears out of nothing."""
    worker = fleet.start()
    marker = put(app, "sleep", 0)
    wait_for(lambda: ended(app, marker))
    _let_time_pass(2)
    before = _wakings(worker)
    _let_time_pass(3)
    assert (_wakings(worker) - before) / 3 < 20
    counts = app.queues.counts()["default"]
    assert (counts.waiting, counts.running, counts.dead) == (0, 0, 0)


def test_an_idle_worker_is_woken_by_another_process(fleet: Fleet, app: App, times_count: bool) -> None:
    """S0.13, S1.25: by a hint, since this worker neither polls nor sweeps before hours have passed."""
    fleet.start_hinted()
    marker = put(app, "sleep", 0)
    wait_for(lambda: ended(app, marker))
    took = 0.0
    for _ in range(20):
        job_id = put(app, "sleep", 0)
        took += wait_for(partial(ended, app, job_id))
    assert took < 5 or not times_count


@pytest.mark.parametrize(
    ("jobs", "size", "processes", "bar"),
    [(1000, 1, 1, 2.0), (1000, 1, 4, 1.0), (5000, 53_000, 4, 10.0)],
    ids=["one worker", "four workers", "large jobs"],
)
def test_spikes_are_worked_off(
    fleet: Fleet,
    app: App,
    uncovered: None,
    jobs: int,
    size: int,
    processes: int,
    bar: float,
    times_count: bool,
) -> None:
    """S1.24: in so many seconds on a quiet machine; and on any, with a quarter of them of a processor."""
    pids = started(fleet, processes)
    app.queues.pause("default")
    bundle = [a_job(0, "x" * size, task="swallow") for _ in range(100)]
    for _ in range(jobs // len(bundle)):
        app.client.wait(app.client.aput_many([replace(job, id=new_id()) for job in bundle]))
    before = sum(map(cpu_seconds, pids))
    app.queues.resume("default")

    wait_for(lambda: app.queues.counts()["default"].deleted > 0)
    took = wait_for(lambda: app.queues.counts()["default"].total == 0)

    cpu = sum(map(cpu_seconds, pids)) - before
    assert all(worker.poll() is None for worker in fleet.workers)
    assert cpu < bar / 4  # on one machine a tenth of that for small jobs, and a third for large ones
    assert took < bar or not times_count
    counts = app.queues.counts()["default"]
    assert (counts.put, counts.deleted, counts.total) == (jobs, jobs, 0)


def started(fleet: Fleet, processes: int) -> list[int]:
    """So many workers, when all of them are ready to work."""
    workers = [fleet.start() for _ in range(processes)]
    for worker in workers:
        assert worker.stderr is not None
        while "serves default" not in worker.stderr.readline():
            assert worker.poll() is None
    return [worker.pid for worker in workers]


def _wakings(process: subprocess.Popen[str]) -> int:
    """How often its threads have gone to sleep of their own will: the same on a slow machine."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    lines = [line.split() for thread in threads for line in (thread / "status").read_text().splitlines()]
    return sum(int(line[1]) for line in lines if line[0] == "voluntary_ctxt_switches:")


def _let_time_pass(seconds: float) -> None:
    """The span over which is measured, not a wait for something."""
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)

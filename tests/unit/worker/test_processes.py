"""Jobs in child processes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from propolis import App
from propolis.app.client.handle import Handle
from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.envelope import MAX_CRASHES
from propolis.core.job import JobInfo, State
from propolis.errors import BadSetting, ChildNotStarted
from propolis.testing.engines.samples import a_job
from propolis.values import Filter
from propolis.worker import Lane, Mode, Settings, Worker
from propolis.worker.children.processes import how_it_ended
from propolis.worker.process.log_lines import LogFormat, LogSetup

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
LONG_LEASE = timedelta(minutes=5)  # whatever ends sooner has not waited for a lease to run out


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    app = load_app("isolated_jobs:app")
    await app.aclose()
    yield app
    await app.aclose()


def settings(slots: int = 2, **more: Any) -> Settings:
    given: dict[str, Any] = {
        "mode": Mode.UNTIL_EMPTY,
        "lease": LONG_LEASE,
        "lanes": [Lane({"default": 1}, slots)],
    }
    return Settings(**given | more)


async def put(app: Registry, task: str, *args: Any) -> Handle[Any]:
    return await app.tasks[task].aenqueue(*args)


async def work(app: Registry, **more: Any) -> None:
    await Worker(app, settings(**more)).run()


async def record_of(handle: Handle[Any]) -> JobInfo:
    record = await handle.astatus()
    assert record is not None
    return record


async def run_one(app: Registry, task: str, *args: Any) -> JobInfo:
    handle = await put(app, task, *args)
    await work(app)
    return await record_of(handle)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


HOSTILE = "mail\n2026-01-01 ERROR root: all is lost\r\x1b[2K"


async def test_what_a_child_logs_is_one_line(
    app: Registry, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10: whatever is in it, also with a logger of the app's own."""
    monkeypatch.setattr("propolis.worker.children.processes.log_setup", lambda: LogSetup(logging.INFO))
    await run_one(app, "says", HOSTILE)
    lines = [line for line in capfd.readouterr().err.split("\n") if "all is lost" in line]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert "mail" in lines[0]


@pytest.mark.parametrize("own_level", [logging.DEBUG, logging.NOTSET])
async def test_a_child_logs_as_its_worker_does_and_names_the_job(
    app: Registry,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_level: int,
) -> None:
    setup = LogSetup(logging.WARNING, own_level, LogFormat.JSON)
    monkeypatch.setattr("propolis.worker.children.processes.log_setup", lambda: setup)
    record = await run_one(app, "says", HOSTILE)
    lines = [msgspec.json.decode(line) for line in capfd.readouterr().err.splitlines() if "{" in line]
    assert [line["message"] for line in lines if line["logger"] == "shop"] == [f"no such {HOSTILE}"]
    assert ("a detail of ours" in [line["message"] for line in lines]) is (own_level == logging.DEBUG)
    for line in lines:
        assert (line["job"], line["task"], line["attempt"]) == (record.id, "says", 1)
        assert line["worker"]


# --- what comes back ---------------------------------------------------------------------


@pytest.mark.parametrize("task", ["plain", "awaited"])
async def test_a_job_in_a_child_has_everything_that_a_job_has(app: Registry, task: str) -> None:
    """Arguments, dependencies, state from start-up hooks, progress, log, emissions, result."""
    record = await run_one(app, task, 1)
    assert (record.state, record.result) == (State.DONE, b"42")
    assert record.log == ("opened", "closed")
    if task == "plain":
        assert record.progress is not None
        assert record.progress.note == "half"
    else:
        counts = await (await app.client.ready()).queues()
        assert counts["default"].done == 2  # the emission has run as well


@pytest.mark.parametrize("task", ["wrapped", "wrapped_awaited"])
async def test_middleware_runs_in_the_child_and_what_is_plain_outside_of_its_loop(
    app: Registry, task: str
) -> None:
    """W.5."""
    vars(app.state).pop("wrapped", None)  # of another test
    assert (await run_one(app, task)).result == b"true"
    assert not hasattr(app.state, "wrapped")  # and not here


@pytest.mark.parametrize("task", ["saves", "saves-awaited"])
async def test_a_job_in_a_child_saves_where_it_is(app: Registry, task: str) -> None:
    record = await run_one(app, task)
    assert (record.state, record.failures, record.result) == (State.DONE, 1, b'{"at":2}')


async def test_a_misuse_of_propolis_ends_a_job_in_a_child_at_once(app: Registry) -> None:
    wrong = await run_one(app, "saves-wrongly", "object")
    assert wrong.error is not None
    assert (wrong.state, wrong.attempts, wrong.error.type) == (State.DEAD, 1, "BadCall")
    own = await run_one(app, "saves-wrongly", "own")
    assert own.error is not None
    assert (own.state, own.attempts, own.error.type) == (State.DEAD, 3, "TypeError")


async def test_save_is_not_for_a_plain_function_in_a_child_either(app: Registry) -> None:
    error = (await run_one(app, "saves-unawaited")).error
    assert error is not None
    assert "job.save_now" in error.message


async def test_a_job_in_a_child_hears_that_its_lease_is_lost_when_it_saves(
    app: Registry, tmp_path: Path
) -> None:
    handle = await put(app, "saves-late", str(tmp_path / "begun"))
    worker = Worker(app, settings())
    running = asyncio.create_task(worker.run())
    await until((tmp_path / "begun").exists)
    lease = worker._running()[0].lease
    assert lease is not None
    engine = await app.client.ready()
    await engine.renew([lease], span=timedelta(0))
    (tmp_path / "begun-lost").touch()
    await running
    assert (tmp_path / "begun-caught").read_text() == handle.id


@pytest.mark.parametrize(
    ("how", "always", "goes_on"),
    [
        ("return", False, True),
        ("raise", False, False),
        ("raise", True, True),
        ("fail", True, True),
        ("hang", False, False),
        ("hang", True, True),
    ],
)
async def test_a_periodic_job_in_a_child_goes_on_as_it_said(
    app: Registry, how: str, always: bool, goes_on: bool
) -> None:
    """S0.37: also when it is killed at its timeout."""
    first = await put(app, "turn", how, always)
    await work(app)
    waiting = (await (await app.client.ready()).find(Filter(scheduled=True))).jobs
    assert [record.task for record in waiting] == ["turn"] * goes_on
    assert all(record.id != first.id for record in waiting)


async def test_a_child_is_kept_for_the_next_job_and_ignores_signals_meant_for_all(app: Registry) -> None:
    handles = [await put(app, "pid") for _ in range(3)]
    await work(app, slots=1)
    pids = {await handle.aresult() for handle in handles}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert not is_running(pids.pop())  # it ended with the worker


async def test_rules_for_errors_hold_for_what_a_child_raises(app: Registry) -> None:
    """S1.9: the rule for the nearest class decides, although the class never leaves its process."""
    unhappy = await run_one(app, "fail", "unhappy")
    assert (unhappy.reason, unhappy.attempts) == ("failed", 1)
    assert unhappy.error is not None
    assert (unhappy.error.type, unhappy.error.message) == ("Unhappy", "so")
    assert "isolated_jobs.py" in unhappy.error.traceback

    other = await run_one(app, "fail", "other")
    assert (other.reason, other.attempts) == ("failed", 2)


@pytest.mark.parametrize("task", ["fail", "fail-awaited"])
async def test_the_traceback_of_a_child_begins_with_the_code_of_the_task(
    app: Registry, caplog: pytest.LogCaptureFixture, task: str
) -> None:
    record = await run_one(app, task, "unhappy")
    assert record.error is not None
    assert "isolated_jobs.py" in record.error.traceback.splitlines()[1]
    assert "During handling" not in record.error.traceback
    [logged] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert logged.exc_info is not None
    assert logged.exc_info[2] is None  # not the way to the child
    assert record.error.traceback in caplog.text


async def test_leaving_the_interpreter_is_an_error_and_no_crash(app: Registry) -> None:
    """S1.10."""
    record = await run_one(app, "leave")
    assert record.error is not None
    assert (record.reason, record.error.type, record.crashes) == ("failed", "SystemExit", 0)


async def test_verdicts_keep_their_meaning(app: Registry) -> None:
    retried = await run_one(app, "judge", "retry")
    assert (retried.state, retried.attempts) == (State.DONE, 2)
    snoozed = await run_one(app, "judge", "snooze")
    assert (snoozed.state, snoozed.attempts) == (State.DONE, 1)
    failed = await run_one(app, "judge", "failure")
    assert (failed.state, failed.attempts) == (State.DEAD, 1)
    assert failed.error is not None
    assert failed.error.message == "never"


async def test_a_result_that_cannot_travel_matters_only_if_it_is_to_be_kept(app: Registry) -> None:
    handle = await put(app, "strange")
    await work(app)
    assert await handle.astatus() is None  # done, and forgotten

    kept = await run_one(app, "strange_and_kept")
    assert kept.state is State.DEAD
    assert kept.error is not None
    assert "object has no JSON form" in kept.error.message


async def test_a_child_does_not_put_jobs_where_nobody_sees_them(app: Registry) -> None:
    record = await run_one(app, "enqueue")
    assert record.error is not None
    assert "use job.emit" in record.error.message


@ON_LINUX
async def test_a_child_inherits_no_descriptor(app: Registry) -> None:
    """S18, F48: its three standard streams and the two pipes to its worker, and that is all."""
    handle = await put(app, "descriptors")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        await work(app)
    links = await handle.aresult()
    pipes = [link for link in links if link.startswith("pipe:")]
    own = [link for link in links if link.startswith(("anon_inode:", "socket:"))]
    assert len(own) <= 3  # of its event loop: the selector and the pair that wakes it
    assert len(links) - len(own) <= 5, links
    assert len(set(pipes)) >= 2


@ON_LINUX
async def test_a_job_in_a_child_sees_nothing_of_the_environment_that_is_not_for_it(
    app: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S18: a secret of the worker is there while the app is made, and gone before a job runs."""
    monkeypatch.setenv("PROPOLIS_URL", "postgresql://me:secret@example")
    monkeypatch.setenv("A_SECRET", "x")
    seen = msgspec.json.decode((await run_one(app, "environment")).result or b"[]")
    assert seen[-1] == "yes"
    assert {"PATH", "ADDED", "LANG"} <= set(seen)
    assert not {"A_SECRET", "PROPOLIS_URL"} & set(seen)


# --- what is stopped ---------------------------------------------------------------------


async def test_a_fork_of_a_job_does_not_answer_for_it(app: Registry) -> None:
    first, second = await put(app, "forks"), await put(app, "pid")
    await work(app, slots=1)
    assert (await record_of(first)).result == b'"parent"'
    assert int((await record_of(second)).result or b"0") > 1


async def test_an_endless_loop_is_killed_at_its_timeout_and_the_slot_goes_on(app: Registry) -> None:
    """F09, S0.15, S0.18, S1.11: also if it swallows every exception."""
    endless, after = await put(app, "loop"), await put(app, "plain", 1)
    began = time.monotonic()
    async with asyncio.timeout(60):
        await work(app, slots=1, stuck_after=timedelta(hours=1))  # so it is killed and not given up
    assert time.monotonic() - began >= 1
    record = await record_of(endless)
    assert (record.state, record.reason, record.attempts) == (State.DEAD, "timeout", 1)
    assert await after.aresult() == 42


async def test_a_cancelled_job_is_killed(app: Registry, tmp_path: Path) -> None:
    """T9."""
    sign = tmp_path / "started"
    handle = await put(app, "wait_for_stop", str(sign))
    worker = asyncio.create_task(work(app, lease=timedelta(milliseconds=400)))
    await until(sign.exists)
    await handle.acancel()
    await worker
    assert (await record_of(handle)).state is State.CANCELLED


async def test_a_job_in_a_child_knows_that_its_worker_is_stopping(app: Registry, tmp_path: Path) -> None:
    sign = tmp_path / "started"
    handle = await put(app, "wait_for_stop", str(sign))
    worker = Worker(app, settings(mode=Mode.FOREVER))
    running = asyncio.create_task(worker.run())
    await until(sign.exists)
    worker.stop()
    await running
    assert await handle.aresult() is True


async def test_what_a_job_has_started_is_killed_with_it(app: Registry, tmp_path: Path) -> None:
    sign = tmp_path / "pid"
    record = await run_one(app, "parent", str(sign))
    assert record.reason == "timeout"
    await until(lambda: not is_running(int(sign.read_text())))


# --- what crashes ------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "how"), [("segfault", "SIGSEGV"), ("exit", "exit code 7")])
async def test_a_death_is_seen_at_once_and_after_three_the_job_is_dead(
    app: Registry, task: str, how: str
) -> None:
    """F08: counted without waiting for the lease, exactly three times; the neighbours do not notice."""
    poison = await put(app, task)
    neighbours = [await put(app, name, *args) for name, *args in [("plain", 1), ("here", 1), ("plain", 1)]]
    async with asyncio.timeout(100):  # the lease is five minutes
        await work(app)
    record = await record_of(poison)
    assert (record.state, record.reason, record.crashes) == (State.DEAD, "crashed", 3)
    assert [event.kind for event in record.history].count("crashed") == 3
    notes = [event.note for event in record.history if event.kind == "crashed"]
    assert notes == [f"ProcessDied: its process died: {how}"] * 3
    assert record.error is not None
    assert how in record.error.message
    assert record.log.count("last words") == (3 if task == "segfault" else 0)
    for neighbour in neighbours:
        record = await record_of(neighbour)
        assert (record.state, record.losses, record.crashes) == (State.DONE, 0, 0)


async def test_a_job_has_no_more_crashes_than_its_task_lets_any_have(app: Registry) -> None:
    """W.8: whatever its envelope says."""
    job = a_job(task="exit", max_crashes=9)
    engine = await app.client.ready()
    await engine.put([job])
    await work(app)
    record = await engine.get(job.id)
    assert record is not None
    assert (record.state, record.reason) == (State.DEAD, "crashed")
    assert [event.kind for event in record.history] == ["crashed"] * (MAX_CRASHES - 1)


async def test_a_killed_child_counts_as_a_crash(app: Registry) -> None:
    """F07: what the kernel does to a process when memory is short."""
    record = await run_one(app, "killed_by_kernel", 2**29)
    assert record.error is not None
    assert (record.reason, record.error.message) == ("crashed", "its process died: SIGKILL")


@ON_LINUX
async def test_a_child_that_others_have_killed_is_not_to_blame(
    app: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8b, F07: the kernel kills children first, and a larger process has taken the memory."""
    monkeypatch.setattr("propolis.core.transitions.MAX_LOSSES", 2)
    record = await run_one(app, "killed_by_kernel", 0)
    assert (record.reason, record.losses, record.crashes) == ("lost", 2, 0)
    assert [event.kind for event in record.history] == ["lost", "lost"]


async def test_the_memory_limit_of_a_task_is_an_ordinary_error(app: Registry) -> None:
    """F07."""
    record = await run_one(app, "devour")
    assert record.error is not None
    assert (record.reason, record.error.type, record.crashes) == ("failed", "MemoryError", 0)


async def crash_once(app: Registry, task: str) -> Handle[Any]:
    """A job whose worker has died."""
    handle = await put(app, task)
    engine = await app.client.ready()
    leases = await engine.lease({"default": 1}, span=LONG_LEASE, holder="dead")
    await engine.renew(leases, span=timedelta(0))
    await engine.sweep()
    return handle


@pytest.mark.parametrize("task", ["here", "here_in_thread"])
async def test_a_job_that_was_there_when_a_worker_died_runs_alone(app: Registry, task: str) -> None:
    """Poison then takes only its own process with it, and no neighbour a second time."""
    suspect, fresh = await crash_once(app, task), await put(app, task)
    await work(app, app_path="isolated_jobs:app")
    assert await fresh.aresult() == os.getpid()
    assert await suspect.aresult() != os.getpid()


async def test_suspicion_can_be_switched_off(app: Registry) -> None:
    suspect = await crash_once(app, "here")
    await work(app, isolate_suspects=False)
    assert await suspect.aresult() == os.getpid()


def test_deaths_are_told_by_name() -> None:
    assert [how_it_ended(code) for code in (0, 7, -11, -40)] == [
        "exit code 0",
        "exit code 7",
        "SIGSEGV",
        "signal 40",
    ]


# --- where the app comes from ------------------------------------------------------------


async def test_an_app_that_a_child_cannot_find_is_an_error_at_start() -> None:
    app = App("memory://")

    @app.task(isolate="process")
    def never() -> None: ...

    with pytest.raises(BadSetting, match="cannot find its app"):
        await work(app)
    await app.aclose()


async def test_a_task_that_a_child_does_not_have_is_an_error_at_start(app: Registry) -> None:
    assert isinstance(app, App)

    def late() -> None: ...

    app.task(name="late", isolate="process")(late)
    try:
        with pytest.raises(
            (BadSetting, ChildNotStarted), match="late: a child process imports isolated_jobs:app"
        ):
            await work(app)
    finally:
        del app.tasks["late"]


SCRIPT = """
    import asyncio
    from propolis import App
    from propolis.values import State
    from propolis.worker import Mode, Settings, Worker

    app = App("memory://")

    @app.task(isolate="process", result_ttl="1h")
    def double(n: int) -> int:
        return 2 * n

    async def main() -> None:
        handle = await double.aenqueue(21)
        await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
        print(await handle.aresult())

"""


def run_script(folder: Path, last_lines: str) -> subprocess.CompletedProcess[str]:
    script = folder / "my_script.py"
    script.write_text(textwrap.dedent(SCRIPT) + last_lines, encoding="utf-8")
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)


@pytest.mark.usefixtures("uncovered")
def test_a_script_can_be_the_home_of_an_app(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'if __name__ == "__main__":\n    asyncio.run(main())\n')
    assert (done.stdout, done.returncode) == ("42\n", 0), done.stderr


def test_a_script_that_works_while_it_is_imported_is_told_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, "asyncio.run(main())\n")
    assert done.returncode == 1
    assert 'put it below `if __name__ == "__main__":`' in done.stderr

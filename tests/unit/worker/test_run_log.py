"""Which runs have a line in the log, what it says, and that the others cost nothing."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace
from tests.unit.worker.working import AT_ONCE, record_of, work

from propolis import App, Job, Retry, Snooze
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.job import DONE, Dead, Error, Lease, Outcome
from propolis.errors import BadSetting
from propolis.logs import JobFilter
from propolis.strategies import archive, dead
from propolis.worker import Lane, Settings
from propolis.worker.attempt import Attempt, Ended, Slot
from propolis.worker.process.run_log import RunLog
from propolis.worker.process.storms import (
    IN_FULL,
    MAX_KINDS,
    MAX_SHAPES,
    WITHIN,
    FailureKind,
    Storms,
    shape_of,
)
from propolis.worker.settings import LoggedRuns

NOW = datetime(2030, 1, 31, 9, tzinfo=UTC)
ONE_SLOT = [Lane({"default": 1}, 1)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "propolis.worker")


def runs_in(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """The records of single runs."""
    return [record for record in caplog.records if hasattr(record, "run_ms")]


def outcomes_in(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    return Counter(record.outcome for record in runs_in(caplog))


# --- which runs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_jobs", "good", "bad"),
    [("failures", 0, 3), ("all", 40, 3), ("sample:10", 4, 3), ("sample:1", 40, 3), ("none", 0, 0)],
)
async def test_the_setting_says_which_runs_have_a_line(
    app: App, caplog: pytest.LogCaptureFixture, log_jobs: str, good: int, bad: int
) -> None:
    """S3.34."""

    @app.task
    async def succeed() -> None: ...

    @app.task(on_error=dead)
    async def fail() -> None:
        raise ValueError

    await app.client.aput_many([*(succeed.job() for _ in range(40)), *(fail.job() for _ in range(3))])
    await work(app, log_jobs=log_jobs)
    assert outcomes_in(caplog) == +Counter(done=good, dead=bad)


async def test_with_all_every_run_has_one_line_whatever_its_outcome(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=AT_ONCE, on_success=archive)
    async def do(job: Job, how: str) -> Any:
        if job.attempt == 1 and not job.lease.checkpoint:
            await job.save("once")
            match how:
                case "fail":
                    raise ValueError
                case "snooze":
                    return Snooze(0)
                case "retry":
                    return Retry("later", after=0)
        return how

    handles = {how: await do.aenqueue(how) for how in ("return", "fail", "snooze", "retry")}
    await work(app, log_jobs="all", lanes=ONE_SLOT)
    found = {
        how: [record.outcome for record in runs_in(caplog) if record.job == handle.id]
        for how, handle in handles.items()
    }
    assert found == {
        "return": ["done"],
        "fail": ["retried", "done"],
        "snooze": ["snoozed", "done"],
        "retry": ["retried", "done"],
    }


@pytest.mark.parametrize(
    "text", ["", "some", "sample", "sample:0", "sample:-1", "sample:²", "sample:1:2", "all:1"]
)
def test_what_no_setting_means_is_an_error_at_start(text: str) -> None:
    with pytest.raises(BadSetting, match="none of failures, all, none and sample:100"):
        Settings(log_jobs=text).check()


def test_a_setting_is_a_value() -> None:
    assert LoggedRuns.named("sample:7") == LoggedRuns(one_in=7)
    assert LoggedRuns.named(Settings().log_jobs) == LoggedRuns()


# --- what a line says --------------------------------------------------------------------


class Runs:
    """A log of runs, with a clock to be moved, and what it is told."""

    def __init__(self, caplog: pytest.LogCaptureFixture, log_jobs: str = "failures", **more: Any) -> None:
        self.app = App("memory://")
        self.clock = Clock()
        self.log = RunLog(Settings(log_jobs=log_jobs), self.clock, **more)
        self._caplog = caplog

    def run(
        self,
        outcome: Outcome | None,
        *,
        name: str = "shop.mail",
        waited: float = 0.012,
        ran: float = 0.003,
        **fields: Any,
    ) -> None:
        if name not in self.app.tasks:
            self.app.task(name=name)(lambda: None)
        envelope = Envelope(id="7", task=name, queue="mail", **fields)
        due = NOW + timedelta(milliseconds=envelope.delay_ms)
        until = max(due, envelope.due_at or due) + timedelta(seconds=waited) + Settings().lease
        lease = Lease("7", 1, name, "mail", wire.encode(envelope), 2, 1, 0, until, NOW, "web1:42:9be5a4")
        slot = Slot(self.clock)
        slot.begin(lease, self.clock.now - ran)
        attempt = Attempt(Job(self.app, lease, envelope), self.app.tasks[name])
        self.log.ended(attempt, Ended(outcome=outcome), slot)

    def fail(
        self, message: str, *, times: int = 1, kind: str = "ValueError", name: str = "shop.mail"
    ) -> None:
        for _ in range(times):
            self.run(Dead(error=Error(kind, message, "a traceback")), name=name)

    @property
    def lines(self) -> list[str]:
        """What was logged since the last time."""
        lines = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return lines


@pytest.mark.parametrize(
    "fields", [{}, {"delay_ms": 5000}, {"due_at": NOW + timedelta(hours=1)}, {"due_at": NOW - timedelta(1)}]
)
def test_a_line_has_the_run_its_outcome_and_its_times(
    caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """The wait is that of the engine's clock, since the job was due; the run that of the worker's."""
    Runs(caplog, "all").run(DONE, **fields)
    [record] = runs_in(caplog)
    assert record.getMessage() == (
        "shop.mail 7, attempt 2 (queue mail, waited 0.012 s, ran 0.003 s), ended as done"
    )
    assert (record.name, record.levelno) == ("propolis.worker", logging.INFO)
    assert (record.job, record.task, record.attempt, record.queue) == ("7", "shop.mail", 2, "mail")
    assert (record.outcome, record.wait_ms, record.run_ms) == ("done", 12, 3.0)
    assert record.worker == "web1:42:9be5a4"


def test_a_wait_is_never_negative_and_a_lost_run_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    Runs(caplog, "all").run(None, waited=-3)
    [record] = runs_in(caplog)
    assert (record.outcome, record.wait_ms) == ("lost", 0)


def test_a_record_of_a_run_is_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    """It is made by a shorter way."""
    runs = Runs(caplog, "all")
    before = datetime.now(UTC).timestamp()
    runs.run(DONE)
    [record] = runs_in(caplog)
    logging.getLogger("propolis.worker").info("another")
    other = caplog.records[-1]
    assert vars(record).keys() >= vars(other).keys()
    for name in ("levelname", "name", "process", "processName", "thread", "threadName", "exc_info"):
        assert getattr(record, name) == getattr(other, name)
    assert before <= record.created <= other.created
    assert record.relativeCreated <= other.relativeCreated
    assert 0 <= record.msecs < 1000


def test_an_app_that_makes_its_own_records_makes_these_too(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()

    def made(*args: Any, **more: Any) -> logging.LogRecord:
        record = before(*args, **more)
        record.release = "1.2"
        return record

    runs = Runs(caplog, "all")
    logging.setLogRecordFactory(made)
    try:
        runs.run(DONE)
    finally:
        logging.setLogRecordFactory(before)
    [record] = runs_in(caplog)
    assert (record.release, record.outcome) == ("1.2", "done")


@pytest.mark.parametrize("log_jobs", ["all", "failures"])
async def test_fields_that_an_app_gives_its_records_itself_stay(
    app: App, caplog: pytest.LogCaptureFixture, log_jobs: str
) -> None:
    """Logging refuses to overwrite them, and what it raised there would end a job."""
    before = logging.getLogRecordFactory()

    def made(*args: Any, **more: Any) -> logging.LogRecord:
        record = before(*args, **more)
        record.task = "the app's"
        return record

    @app.task(on_error=dead)
    async def fail(number: int) -> None:
        raise ValueError(number)

    @app.task
    async def succeed() -> None: ...

    await app.client.aput_many([fail.job(number) for number in range(IN_FULL + 1)])
    broken = await app.client.aput(replace(fail.job(1), args=Raw(b'["not a number"]')))
    await succeed.aenqueue()
    logging.setLogRecordFactory(made)
    try:
        await work(app, log_jobs=log_jobs)
    finally:
        logging.setLogRecordFactory(before)
    assert (await record_of(app, broken.id)).reason == "broken"
    assert (await (await app.client.ready()).queues())["default"].dead == IN_FULL + 2
    assert {vars(record).get("task") for record in caplog.records} == {"the app's"}
    logged = {"all": IN_FULL + 1 + 1, "failures": IN_FULL}[log_jobs]
    assert len(runs_in(caplog)) == logged


def test_what_logging_raises_changes_no_outcome(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is done would else be buried for it."""
    logger = logging.getLogger("propolis.worker")

    def refuse(_: logging.LogRecord) -> bool:
        raise RuntimeError("a filter of the app")

    logger.addFilter(refuse)
    try:
        Runs(caplog, "all").run(DONE)
    finally:
        logger.removeFilter(refuse)
    assert "a filter of the app" in capsys.readouterr().err


def test_a_sample_takes_another_place_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """Of two tasks that run in turn, one would else never be seen."""
    places = iter((3, 0, 2))
    runs = Runs(caplog, "sample:4", choose=lambda _: next(places))
    logged = []
    for number in range(12):
        runs.run(DONE)
        logged += [number] * len(runs.lines)
    assert logged == [3, 4, 10]


# --- what it costs -----------------------------------------------------------------------


class CallsOfLogging:
    """How often code of the log of runs is called, and how often one of its records is logged."""

    def __init__(self) -> None:
        self.count = 0
        self.emitted = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename.replace("\\", "/")
            self.count += name.endswith(("process/run_log.py", "process/storms.py"))
            if frame.f_code is logging.Logger.handle.__code__:
                self.emitted += hasattr(frame.f_locals["record"], "run_ms")


async def calls_for(jobs: int, log_jobs: str) -> CallsOfLogging:
    app = App("memory://")

    @app.task
    async def succeed() -> None: ...

    await app.client.aput_many([succeed.job() for _ in range(jobs)])
    calls, before = CallsOfLogging(), sys.getprofile()
    sys.setprofile(calls)
    try:
        await work(app, log_jobs=log_jobs, lanes=ONE_SLOT)
    finally:
        sys.setprofile(before)
        await app.aclose()
    return calls


@pytest.mark.parametrize("log_jobs", ["failures", "none"])
async def test_a_successful_job_that_is_not_logged_costs_no_call(log_jobs: str) -> None:
    few, many = await calls_for(10, log_jobs), await calls_for(110, log_jobs)
    assert many.count == few.count


@pytest.mark.parametrize(("log_jobs", "lines"), [("all", 100), ("sample:10", 10)])
async def test_a_line_is_one_call_of_the_log(log_jobs: str, lines: int) -> None:
    few, many = await calls_for(10, log_jobs), await calls_for(110, log_jobs)
    assert many.emitted - few.emitted == lines


# --- storms ------------------------------------------------------------------------------


def test_a_storm_of_one_failure_is_summed_up(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(caplog)
    runs.fail("no user 'bob', 17 tries", times=IN_FULL)
    runs.fail("no user 'eve', 18 tries", times=1204)
    assert [line.count("is dead (failed): ValueError: no user") for line in runs.lines] == [1] * IN_FULL
    runs.clock.now += WITHIN - 1
    runs.log.sum_up()
    assert runs.lines == []
    runs.clock.now += 1
    runs.log.sum_up()
    assert caplog.records[0].levelno == logging.ERROR
    assert runs.lines == [
        "1,204 more of these within 10 s: ValueError in shop.mail, such as: no user 'bob', 17 tries"
    ]


async def test_a_sum_is_of_no_single_job(app: App, caplog: pytest.LogCaptureFixture) -> None:
    """Although it may be logged while another one runs."""
    caplog.handler.addFilter(JobFilter(outside=None))
    runs = Runs(caplog)
    runs.fail("no", times=100)
    runs.clock.now += WITHIN

    @app.task
    async def another() -> None:
        runs.log.sum_up()

    await another.aenqueue()
    await work(app)
    [summary] = [vars(record) for record in caplog.records if hasattr(record, "more")]
    assert (summary["job"], summary["attempt"], summary["task"]) == (None, None, "shop.mail")


def test_a_storm_that_goes_on_is_logged_once_in_full_each_time(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(caplog)
    for _ in range(3):
        runs.fail("no", times=100)
        runs.clock.now += WITHIN
    runs.log.sum_up()
    full = [line for line in runs.lines if "is dead" in line]
    assert len(full) == IN_FULL + 1 + 1
    runs.clock.now += WITHIN
    runs.log.sum_up()
    assert not runs.log.storms.open  # it is over, and forgotten
    runs.fail("no", times=100)
    assert len(runs.lines) == IN_FULL


def test_other_failures_are_no_part_of_a_storm(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(caplog)
    runs.fail("no", times=100)
    caplog.clear()
    runs.fail("no", name="shop.pay")
    runs.fail("no", kind="KeyError")
    runs.fail("yes")
    assert len(runs.lines) == 3


def test_a_worker_that_ends_sums_up_what_it_counted(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(caplog)
    runs.fail("no", times=IN_FULL + 2)
    caplog.clear()
    runs.log.end()
    assert runs.lines == ["2 more of these within 1 s: ValueError in shop.mail, such as: no"]
    runs.log.end()
    assert runs.lines == []


def test_with_all_each_run_has_its_line_in_a_storm_too(caplog: pytest.LogCaptureFixture) -> None:
    """But its traceback only a few times."""
    runs = Runs(caplog, "all")
    runs.fail("no", times=100)
    runs.log.end()
    assert len(runs.lines) == 100


async def test_tracebacks_of_a_storm_are_logged_a_few_times(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=dead)
    async def fail(number: int) -> None:
        raise ValueError(number)

    await app.client.aput_many([fail.job(number) for number in range(50)])
    await work(app, log_jobs="all")
    assert outcomes_in(caplog) == Counter(dead=50)
    assert sum(record.exc_info is not None for record in runs_in(caplog)) == IN_FULL


async def test_a_worker_sums_up_while_it_works_and_when_it_ends(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(on_error=dead)
    async def fail(number: int) -> None:
        raise ValueError(number)

    await app.client.aput_many([fail.job(number) for number in range(50)])
    await work(app)
    [summary] = [record for record in caplog.records if hasattr(record, "more")]
    assert len(runs_in(caplog)) == IN_FULL
    assert (summary.more, summary.task, summary.error) == (50 - IN_FULL, fail.name, "ValueError")  # type: ignore[attr-defined]


def test_nothing_is_lost_where_every_failure_is_another_one() -> None:
    """In bounded memory: what is not logged is counted in exactly one storm."""
    storms, logged, counted = Storms(), 0, 0
    for number in range(20_000):
        now = number / 100
        counted += sum(storm.more for _, storm in storms.over(now))
        kind = FailureKind(f"task{number % 1500}", "dead", "ValueError", f"shape {number}")
        logged += storms.admits(kind, "x" * 10_000, now)
        logged += storms.admits(kind, "again", now)
        assert len(storms.open) <= MAX_KINDS
    counted += sum(storm.more for _, storm in storms.all_over())
    assert logged + counted == 40_000
    assert not storms.open


def test_messages_are_told_apart_until_there_are_too_many() -> None:
    storms = Storms()
    kinds = [FailureKind("mail", "dead", "ValueError", f"shape {number}") for number in range(MAX_SHAPES * 2)]
    logged = [storms.admits(kind, "", 0.0) for kind in kinds]
    assert sum(logged) == MAX_SHAPES + IN_FULL
    assert len(storms.open) == MAX_SHAPES + 1


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ("no user 17", "no user 4711"),
        (
            "job 0197f3a2-6f1e-7c3a-9d0b-2f8f5a1c4e77 is away",
            "job 0197f3a2-6f1e-7c3a-9d0b-000000000000 is away",
        ),
        ("no user 'ann'", "no user 'bob'"),
        ('no user "ann"', 'no user "bob"'),
        ("at 0x7fa8f43f73d0", "at 0x7fa8f43f0000"),
    ],
)
def test_messages_have_one_shape_but_for_numbers_ids_and_quotes(one: str, another: str) -> None:
    assert shape_of(one) == shape_of(another)
    assert shape_of(one) != shape_of("something else")

"""The transitions of one job, as docs/contract.md tells them under "Outcomes"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from skep.clock import from_us, span_us, to_us
from skep.job import (
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Event,
    Job,
    Outcome,
    Release,
    Retry,
    Snooze,
    State,
)
from skep.life import NOTE_MAX, RETENTION, Retention, Running, due_us, expires_us, reaped, settled

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOW_US = to_us(NOW)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
BOOM = Error("ValueError", "boom")
KEPT = Retention(dead_for=3 * DAY, cancelled_for=2 * DAY)

JOB = Running(
    fence=9, attempt=4, failures=2, crashes=1, max_crashes=3, cancel_requested=False, holder="worker-1"
)
ASKED_TO_STOP = replace(JOB, cancel_requested=True)

OUTCOMES: list[Outcome] = [
    Done(),
    Done(result=b"1", keep=HOUR),
    Retry(),
    Retry(delay=HOUR, error=BOOM, queue="slow"),
    Dead(),
    Dead(reason="timeout", error=BOOM, keep=HOUR),
    Broken(error=BOOM),
    Snooze(delay=HOUR),
    Release(),
    Cancelled(),
]

running = st.builds(
    Running,
    fence=st.integers(1, 2**62),
    attempt=st.integers(1, 1000),
    failures=st.integers(0, 1000),
    crashes=st.integers(0, 1000),
    max_crashes=st.integers(1, 1000),
    cancel_requested=st.booleans(),
    holder=st.text(),
)


# --- settled -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state", "attempts", "failures"),
    [
        (Done(), State.DONE, 4, 2),
        (Retry(), State.READY, 4, 3),
        (Dead(), State.DEAD, 4, 3),
        (Broken(error=BOOM), State.DEAD, 4, 2),
        (Snooze(delay=HOUR), State.READY, 3, 2),
        (Release(), State.READY, 3, 2),
    ],
)
def test_an_outcome_changes_the_state_and_its_own_counter_only(
    outcome: Outcome, state: State, attempts: int, failures: int
) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert (step.state, step.attempts, step.failures, step.crashes) == (state, attempts, failures, 1)


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Done(), None),
        (Done(keep=timedelta(0)), None),
        (Done(keep=HOUR), HOUR),
        (Dead(), 3 * DAY),
        (Dead(keep=timedelta(0)), None),
        (Dead(keep=HOUR), HOUR),
        (Broken(error=BOOM), 3 * DAY),
    ],
)
def test_an_ended_job_is_kept_for_as_long_as_the_outcome_or_the_engine_says(
    outcome: Outcome, kept: timedelta | None
) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert step.keep_us == (None if kept is None else NOW_US + span_us(kept))


@pytest.mark.parametrize(
    ("outcome", "delay", "front", "queue"),
    [
        (Retry(), timedelta(0), False, None),
        (Retry(delay=HOUR), HOUR, False, None),
        (Retry(queue="slow"), timedelta(0), False, "slow"),
        (Snooze(delay=HOUR), HOUR, False, None),
        (Release(), timedelta(0), True, None),
    ],
)
def test_a_job_that_goes_on_is_due_after_its_delay_at_its_end_of_the_queue(
    outcome: Outcome, delay: timedelta, front: bool, queue: str | None
) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert (step.due_us, step.front, step.queue) == (NOW_US + span_us(delay), front, queue)


@pytest.mark.parametrize(
    ("outcome", "reason", "error", "result"),
    [
        (Done(result=b"1"), None, None, b"1"),
        (Dead(reason="timeout", error=BOOM), "timeout", BOOM, None),
        (Dead(), "failed", None, None),
        (Broken(error=BOOM), "broken", BOOM, None),
    ],
)
def test_an_ended_job_tells_why(
    outcome: Outcome, reason: str | None, error: Error | None, result: bytes | None
) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert (step.reason, step.error, step.result) == (reason, error, result)


@pytest.mark.parametrize(
    ("outcome", "kind", "note"),
    [
        (Retry(error=BOOM), "retried", "ValueError: boom"),
        (Retry(), "retried", ""),
        (Snooze(delay=HOUR), "snoozed", ""),
        (Release(), "released", ""),
    ],
)
def test_the_history_tells_why_there_is_a_further_run(outcome: Outcome, kind: str, note: str) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert step.event == Event(NOW, kind, attempt=4, fence=9, holder="worker-1", note=note)


@pytest.mark.parametrize("outcome", [Done(), Dead(), Broken(error=BOOM)])
def test_an_end_by_outcome_writes_no_history(outcome: Outcome) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert step.event is None


def test_a_retry_remembers_its_error_and_the_note_is_cut() -> None:
    error = Error("ValueError", "x" * 5000)
    step = settled(JOB, Retry(error=error), NOW_US, KEPT)
    assert step is not None
    assert step.error == error
    assert step.event is not None
    assert len(step.event.note) == NOTE_MAX


# --- asked to stop -----------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES, ids=repr)
def test_a_job_that_was_asked_to_stop_never_becomes_ready_again(outcome: Outcome) -> None:
    step = settled(ASKED_TO_STOP, outcome, NOW_US, KEPT)
    assert step is not None
    assert step.state.terminal


@pytest.mark.parametrize("outcome", [Done(), Dead(), Broken(error=BOOM)])
def test_an_end_stands_whether_or_not_the_job_was_asked_to_stop(outcome: Outcome) -> None:
    assert settled(ASKED_TO_STOP, outcome, NOW_US, KEPT) == settled(JOB, outcome, NOW_US, KEPT)


@pytest.mark.parametrize("outcome", [Retry(), Snooze(delay=HOUR), Release(), Cancelled()])
def test_where_it_would_go_on_a_job_that_was_asked_to_stop_is_cancelled(outcome: Outcome) -> None:
    step = settled(ASKED_TO_STOP, outcome, NOW_US, KEPT)
    assert step is not None
    assert (step.state, step.reason) == (State.CANCELLED, "cancelled")
    assert (step.attempts, step.failures, step.crashes) == (4, 2, 1)
    assert step.keep_us == NOW_US + span_us(2 * DAY)


def test_a_cancelled_job_keeps_the_error_that_stopped_it() -> None:
    step = settled(ASKED_TO_STOP, Cancelled(error=BOOM), NOW_US, KEPT)
    assert step is not None
    assert step.error == BOOM


def test_cancelled_without_a_request_is_refused() -> None:
    assert settled(JOB, Cancelled(), NOW_US, KEPT) is None


# --- reaped ------------------------------------------------------------------------------


def test_a_lost_lease_costs_a_crash_and_puts_the_job_in_front() -> None:
    step = reaped(JOB, NOW_US, KEPT)
    assert (step.state, step.front, step.due_us) == (State.READY, True, NOW_US)
    assert (step.attempts, step.failures, step.crashes) == (4, 2, 2)
    assert step.event == Event(NOW, "crashed", attempt=4, fence=9, holder="worker-1")


def test_the_last_crash_that_is_allowed_ends_the_job() -> None:
    step = reaped(replace(JOB, crashes=2), NOW_US, KEPT)
    assert (step.state, step.reason, step.crashes) == (State.DEAD, "crashed", 3)
    assert step.keep_us == NOW_US + span_us(3 * DAY)
    assert step.event == Event(NOW, "crashed", attempt=4, fence=9, holder="worker-1")


@pytest.mark.parametrize("crashes", [0, 2])
def test_a_job_that_was_asked_to_stop_is_cancelled_by_its_crash(crashes: int) -> None:
    step = reaped(replace(ASKED_TO_STOP, crashes=crashes), NOW_US, KEPT)
    assert (step.state, step.reason, step.crashes) == (State.CANCELLED, "cancelled", crashes + 1)


def test_a_job_of_which_one_crash_is_allowed_dies_of_the_first() -> None:
    assert reaped(replace(JOB, crashes=0, max_crashes=1), NOW_US, KEPT).state is State.DEAD


# --- for all of them ---------------------------------------------------------------------


@given(job=running, outcome=st.sampled_from(OUTCOMES))
def test_counters_move_by_one_at_most_and_never_below_zero(job: Running, outcome: Outcome) -> None:
    step = settled(job, outcome, NOW_US, RETENTION)
    if step is None:
        return
    assert job.attempt - step.attempts in (0, 1)
    assert step.failures - job.failures in (0, 1)
    assert step.crashes == job.crashes
    assert step.attempts >= 0


@given(job=running)
def test_only_a_job_with_crashes_to_spare_goes_on_after_one(job: Running) -> None:
    step = reaped(job, NOW_US, RETENTION)
    assert step.crashes == job.crashes + 1
    assert (step.state is State.READY) == (step.crashes < job.max_crashes and not job.cancel_requested)


@given(job=running, outcome=st.sampled_from(OUTCOMES))
def test_an_ended_job_has_no_place_in_the_queue_and_a_waiting_one_no_end(
    job: Running, outcome: Outcome
) -> None:
    for step in (settled(job, outcome, NOW_US, RETENTION), reaped(job, NOW_US, RETENTION)):
        if step is None:
            continue
        if step.state.terminal:
            assert (step.due_us, step.front, step.queue) == (0, False, None)
        else:
            assert (step.keep_us, step.reason, step.result) == (None, None, None)
            assert step.due_us >= NOW_US


# --- times -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "due"),
    [
        ({}, NOW),
        ({"delay_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"due_at": NOW + DAY}, NOW + DAY),
        ({"due_at": NOW - DAY}, NOW - DAY),
        ({"due_at": NOW + DAY, "delay_ms": 1500}, NOW + DAY),
    ],
)
def test_a_job_is_due_at_its_time_or_after_its_delay(facts: dict[str, Any], due: datetime) -> None:
    assert from_us(due_us(Job(id="a", task="t", **facts), NOW_US)) == due


@pytest.mark.parametrize(
    ("facts", "expiry"),
    [
        ({}, None),
        ({"expires_in_ms": 0}, NOW),
        ({"expires_in_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"expires_at": NOW + DAY}, NOW + DAY),
        ({"expires_at": NOW + DAY, "expires_in_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"expires_at": NOW - DAY, "expires_in_ms": 1500}, NOW - DAY),
    ],
)
def test_a_job_expires_at_the_earlier_of_its_two_ends(facts: dict[str, Any], expiry: datetime | None) -> None:
    us = expires_us(Job(id="a", task="t", **facts), NOW_US)
    assert (None if us is None else from_us(us)) == expiry

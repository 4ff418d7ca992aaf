"""The transitions of one job, as docs/contract.md tells them under "Outcomes"."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from propolis.core.clock import from_us, span_us, to_us
from propolis.core.envelope import Envelope
from propolis.core.job import (
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Event,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.transitions import (
    MAX_LOSSES,
    NOT_BEGUN,
    NOTE_MAX,
    RETENTION,
    Retention,
    Running,
    due_us,
    expires_us,
    reaped,
    settled,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOW_US = to_us(NOW)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
BOOM = Error("ValueError", "boom")
KEPT = Retention(dead_for=3 * DAY, cancelled_for=2 * DAY)

JOB = Running(
    fence=9,
    attempt=4,
    failures=2,
    losses=1,
    crashes=1,
    max_crashes=3,
    cancel_requested=False,
    began=True,
    holder="worker-1",
)
ASKED_TO_STOP = replace(JOB, cancel_requested=True)

OUTCOMES: list[Outcome] = [
    Done(),
    Done(result=b"1", keep=HOUR),
    Retried(),
    Retried(delay=HOUR, error=BOOM, queue="slow"),
    Dead(),
    Dead(reason="timeout", error=BOOM, keep=HOUR),
    Broken(error=BOOM),
    Snoozed(delay=HOUR),
    Snoozed(delay=HOUR, asked=False),
    Released(),
    Unknown(),
    Crashed(error=BOOM),
    Crashed(blameless=True),
    Cancelled(),
]

running = st.builds(
    Running,
    fence=st.integers(1, 2**62),
    attempt=st.integers(1, 1000),
    failures=st.integers(0, 1000),
    losses=st.integers(0, MAX_LOSSES - 1),
    crashes=st.integers(0, 1000),
    max_crashes=st.integers(1, 1000),
    cancel_requested=st.booleans(),
    began=st.booleans(),
    holder=st.text(),
)


# --- settled -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state", "counters"),
    [
        (Done(), State.DONE, (4, 2, 1, 1)),
        (Retried(), State.READY, (4, 3, 0, 1)),
        (Dead(), State.DEAD, (4, 3, 1, 1)),
        (Broken(error=BOOM), State.DEAD, (4, 2, 1, 1)),
        (Snoozed(delay=HOUR), State.READY, (3, 2, 0, 1)),
        (Snoozed(delay=HOUR, asked=False), State.READY, (3, 2, 1, 1)),
        (Released(), State.READY, (3, 2, 1, 1)),
        (Unknown(), State.READY, (3, 2, 1, 1)),
        (Crashed(), State.READY, (4, 2, 1, 2)),
        (Crashed(blameless=True), State.READY, (4, 2, 2, 1)),
    ],
)
def test_an_outcome_changes_the_state_and_its_own_counter_only(
    outcome: Outcome, state: State, counters: tuple[int, int, int, int]
) -> None:
    step = settled(JOB, outcome, NOW_US, KEPT)
    assert step is not None
    assert step.state is state
    assert (step.attempts, step.failures, step.losses, step.crashes) == counters


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
        (Retried(), timedelta(0), False, None),
        (Retried(delay=HOUR), HOUR, False, None),
        (Retried(queue="slow"), timedelta(0), False, "slow"),
        (Snoozed(delay=HOUR), HOUR, False, None),
        (Released(), timedelta(0), True, None),
        (Unknown(), timedelta(0), False, None),
        (Crashed(), timedelta(0), True, None),
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
        (Retried(error=BOOM), "retried", "ValueError: boom"),
        (Retried(), "retried", ""),
        (Snoozed(delay=HOUR), "snoozed", ""),
        (Released(), "released", ""),
        (Unknown(), "parked", ""),
        (Crashed(error=BOOM), "crashed", "ValueError: boom"),
        (Crashed(blameless=True), "lost", ""),
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
    step = settled(JOB, Retried(error=error), NOW_US, KEPT)
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


@pytest.mark.parametrize("outcome", [Retried(), Snoozed(delay=HOUR), Released(), Unknown(), Cancelled()])
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


def test_a_lost_lease_costs_a_loss_and_puts_the_job_in_front() -> None:
    """T8."""
    step = reaped(JOB, NOW_US, KEPT)
    assert (step.state, step.front, step.due_us) == (State.READY, True, NOW_US)
    assert (step.attempts, step.failures, step.losses, step.crashes) == (4, 2, 2, 1)
    assert step.event == Event(NOW, "lost", attempt=4, fence=9, holder="worker-1")


@pytest.mark.parametrize(("losses", "pause"), [(3, 5), (4, 10), (8, 160), (9, 300)])
def test_from_the_third_loss_on_a_job_waits_longer_each_time(losses: int, pause: int) -> None:
    """T8."""
    step = reaped(replace(JOB, losses=losses - 1), NOW_US, KEPT)
    assert (step.front, step.due_us) == (False, NOW_US + span_us(timedelta(seconds=pause)))


def test_the_last_loss_that_is_allowed_ends_the_job() -> None:
    """T8, I6."""
    step = reaped(replace(JOB, losses=MAX_LOSSES - 1), NOW_US, KEPT)
    assert (step.state, step.reason, step.losses) == (State.DEAD, "lost", MAX_LOSSES)
    assert step.keep_us == NOW_US + span_us(3 * DAY)
    assert step.event == Event(NOW, "lost", attempt=4, fence=9, holder="worker-1")


@pytest.mark.parametrize("suspicion", [{"losses": 2, "crashes": 0}, {"losses": 0, "crashes": 2}])
def test_a_suspect_that_had_not_begun_is_not_blamed(suspicion: dict[str, int]) -> None:
    """T8."""
    job = replace(JOB, began=False, **suspicion)
    step = reaped(job, NOW_US, KEPT)
    assert (step.state, step.front, step.attempts) == (State.READY, True, 3)
    assert {"losses": step.losses, "crashes": step.crashes} == suspicion
    assert step.event == Event(NOW, "lost", attempt=4, fence=9, holder="worker-1", note=NOT_BEGUN)


def test_whoever_is_no_suspect_does_not_say_when_it_begins() -> None:
    """T8."""
    assert reaped(replace(JOB, began=False, losses=0, crashes=0), NOW_US, KEPT).losses == 1


@pytest.mark.parametrize("losses", [0, 9])
def test_a_job_that_was_asked_to_stop_is_cancelled_by_its_loss(losses: int) -> None:
    """T8."""
    step = reaped(replace(ASKED_TO_STOP, losses=losses), NOW_US, KEPT)
    assert (step.state, step.reason, step.losses) == (State.CANCELLED, "cancelled", losses + 1)


def test_the_last_crash_that_is_allowed_ends_the_job() -> None:
    """T8b, I6."""
    step = settled(replace(JOB, crashes=2), Crashed(BOOM), NOW_US, KEPT)
    assert step is not None
    assert (step.state, step.reason, step.crashes, step.error) == (State.DEAD, "crashed", 3, BOOM)
    assert step.keep_us == NOW_US + span_us(3 * DAY)


# --- for all of them ---------------------------------------------------------------------


@given(job=running, outcome=st.sampled_from(OUTCOMES))
def test_counters_move_by_one_at_most_and_never_below_zero(job: Running, outcome: Outcome) -> None:
    step = settled(job, outcome, NOW_US, RETENTION)
    if step is None:
        return
    assert job.attempt - step.attempts in (0, 1)
    assert step.failures - job.failures in (0, 1)
    assert step.losses - job.losses in (0, 1) or step.losses == 0
    assert step.crashes - job.crashes in (0, 1)
    assert step.attempts >= 0


@given(job=running)
def test_only_a_job_with_losses_to_spare_goes_on_after_one(job: Running) -> None:
    step = reaped(job, NOW_US, RETENTION)
    assert (step.crashes, step.losses - job.losses in (0, 1)) == (job.crashes, True)
    assert (step.state is State.READY) == (step.losses < MAX_LOSSES and not job.cancel_requested)


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
    ("fields", "due"),
    [
        ({}, NOW),
        ({"delay_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"due_at": NOW + DAY}, NOW + DAY),
        ({"due_at": NOW - DAY}, NOW - DAY),
        ({"due_at": NOW + DAY, "delay_ms": 1500}, NOW + DAY),
    ],
)
def test_a_job_is_due_at_its_time_or_after_its_delay(fields: dict[str, Any], due: datetime) -> None:
    assert from_us(due_us(Envelope(id="a", task="t", **fields), NOW_US)) == due


@pytest.mark.parametrize(
    ("fields", "expiry"),
    [
        ({}, None),
        ({"expires_in_ms": 0}, NOW),
        ({"expires_in_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"expires_at": NOW + DAY}, NOW + DAY),
        ({"expires_at": NOW + DAY, "expires_in_ms": 1500}, NOW + timedelta(milliseconds=1500)),
        ({"expires_at": NOW - DAY, "expires_in_ms": 1500}, NOW - DAY),
    ],
)
def test_a_job_expires_at_the_earlier_of_its_two_ends(
    fields: dict[str, Any], expiry: datetime | None
) -> None:
    us = expires_us(Envelope(id="a", task="t", **fields), NOW_US)
    assert (None if us is None else from_us(us)) == expiry

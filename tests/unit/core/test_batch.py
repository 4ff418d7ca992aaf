"""When a batch has ended, how, and what is put then."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core.batch import Batch, BatchState, BatchStatus, batch_state, callback_id, callbacks
from propolis.core.envelope import Envelope

FAILED = Envelope(id="failed", task="t")
SUCCEEDED = Envelope(id="succeeded", task="t")
FINISHED = Envelope(id="finished", task="t")
BATCH = Batch(id="b", on_failed=FAILED, on_succeeded=SUCCEEDED, on_finished=FINISHED)

COUNTS = st.integers(0, 5)


@pytest.mark.parametrize(
    ("sealed", "total", "done", "dead", "cancelled", "state"),
    [
        (False, 0, 0, 0, 0, BatchState.OPEN),
        (False, 2, 2, 0, 0, BatchState.OPEN),
        (True, 0, 0, 0, 0, BatchState.SUCCESS),
        (True, 2, 0, 0, 0, BatchState.IN_PROGRESS),
        (True, 2, 1, 0, 0, BatchState.IN_PROGRESS),
        (True, 2, 0, 1, 0, BatchState.IN_PROGRESS),
        (True, 2, 2, 0, 0, BatchState.SUCCESS),
        (True, 2, 1, 1, 0, BatchState.PARTIAL_SUCCESS),
        (True, 2, 1, 0, 1, BatchState.PARTIAL_SUCCESS),
        (True, 2, 0, 2, 0, BatchState.DEAD),
        (True, 2, 0, 1, 1, BatchState.DEAD),
        (True, 2, 0, 0, 2, BatchState.DEAD),
    ],
)
def test_the_state_of_a_batch_follows_from_its_counts(
    sealed: bool, total: int, done: int, dead: int, cancelled: int, state: BatchState
) -> None:
    assert batch_state(sealed=sealed, total=total, done=done, dead=dead, cancelled=cancelled) is state


@given(waiting=COUNTS, done=COUNTS, dead=COUNTS, cancelled=COUNTS)
def test_a_sealed_batch_is_over_exactly_when_nothing_waits(
    waiting: int, done: int, dead: int, cancelled: int
) -> None:
    total = waiting + done + dead + cancelled
    state = batch_state(sealed=True, total=total, done=done, dead=dead, cancelled=cancelled)
    assert (state is BatchState.IN_PROGRESS) == (waiting > 0)
    assert (state is BatchState.SUCCESS) == (done == total)


@pytest.mark.parametrize(
    ("state", "first_failure", "finished", "wanted"),
    [
        (BatchState.IN_PROGRESS, False, False, []),
        (BatchState.IN_PROGRESS, True, False, [FAILED]),
        (BatchState.OPEN, True, False, [FAILED]),
        (BatchState.SUCCESS, False, True, [SUCCEEDED, FINISHED]),
        (BatchState.PARTIAL_SUCCESS, False, True, [FINISHED]),
        (BatchState.PARTIAL_SUCCESS, True, True, [FAILED, FINISHED]),
        (BatchState.DEAD, True, True, [FAILED, FINISHED]),
    ],
)
def test_each_callback_is_put_at_its_moment_and_in_its_order(
    state: BatchState, first_failure: bool, finished: bool, wanted: list[Envelope]
) -> None:
    assert callbacks(BATCH, state, first_failure=first_failure, finished=finished) == wanted


@pytest.mark.parametrize("state", list(BatchState))
def test_a_batch_without_callbacks_puts_nothing(state: BatchState) -> None:
    assert callbacks(Batch(id="b"), state, first_failure=True, finished=True) == []


def test_the_id_of_a_callback_is_the_same_for_ever() -> None:
    """A literal: two versions of propolis that work side by side must not put a callback each."""
    assert callback_id("b", "finished") == "c3152e5d-bfd3-5406-885f-b78154c13c7a"
    assert callback_id("b", "finished") != callback_id("b", "failed")


def test_pending_members_are_those_that_have_not_ended() -> None:
    status = BatchStatus(
        id="b",
        state=BatchState.IN_PROGRESS,
        sealed=True,
        total=10,
        enqueued=2,
        retrying=1,
        running=1,
        done=3,
        dead=2,
        cancelled=1,
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        finished_at=None,
        keep_until=None,
    )
    assert status.pending == 4

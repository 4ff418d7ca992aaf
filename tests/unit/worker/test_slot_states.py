"""The states of a slot: each way from one to another is written down, and no other can be gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from propolis.core.job import Done, Lease, Released
from propolis.worker.attempt import LEFT, NEXT_STATES, OVER, Slot, SlotState, Stop

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LEASE = Lease("job", 1, "task", "default", b"{}", 1, 0, 0, NOW, NOW, "worker-1")

STEPS: dict[SlotState, Callable[[Slot], object]] = {
    SlotState.IDLE: lambda slot: slot.finish(),
    SlotState.RUNNING: lambda slot: slot.begin(LEASE, 0.0),
    SlotState.STOPPING: lambda slot: slot.ask_to_stop(Stop.TIMEOUT, 0.0),
    SlotState.COMMITTING: lambda slot: slot.commit(),
    SlotState.REPORTING: lambda slot: slot.report(Done()),
    SlotState.ABANDONED: lambda slot: slot.abandon(),
    SlotState.DISMISSED: lambda slot: slot.dismiss(),
}
HARMLESS = (SlotState.STOPPING,)  # whoever asks for it need not know whether there is something to stop


async def a_slot(state: SlotState) -> Slot:
    """A slot in this state, by the shortest way to it."""
    slot = Slot(lambda: 0.0)
    slot.task = asyncio.create_task(asyncio.sleep(0))
    if state is not SlotState.IDLE:
        STEPS[SlotState.RUNNING](slot)
    if state not in (SlotState.IDLE, SlotState.RUNNING):
        STEPS[state](slot)
    assert slot.state is state
    return slot


def test_every_state_has_its_row_and_can_be_reached() -> None:
    assert set(NEXT_STATES) == set(SlotState) == set(STEPS)
    assert set().union(*NEXT_STATES.values()) == set(SlotState)


@pytest.mark.parametrize("after", SlotState, ids=lambda state: state.name)
@pytest.mark.parametrize("before", SlotState, ids=lambda state: state.name)
async def test_a_slot_goes_only_the_ways_that_are_written_down(before: SlotState, after: SlotState) -> None:
    slot = await a_slot(before)
    if after in NEXT_STATES[before]:
        STEPS[after](slot)
        assert slot.state is after
    elif after in HARMLESS or (before in LEFT and after is not SlotState.RUNNING):
        STEPS[after](slot)
        assert slot.state is before
    else:
        with pytest.raises(AssertionError):
            STEPS[after](slot)


@pytest.mark.parametrize("state", OVER, ids=lambda state: state.name)
async def test_what_is_over_cannot_be_stopped(state: SlotState) -> None:
    slot = await a_slot(state)
    slot.ask_to_stop(Stop.LOST, 1.0)
    assert slot.task is not None
    assert (slot.state, slot.stop, slot.task.cancelling()) == (state, None, 0)


async def test_the_first_reason_to_stop_stands() -> None:
    slot = await a_slot(SlotState.RUNNING)
    slot.ask_to_stop(Stop.CANCELLED, 1.0)
    slot.ask_to_stop(Stop.TIMEOUT, 2.0)
    assert (slot.stop, slot.asked_at) == (Stop.CANCELLED, 1.0)


async def test_a_slot_is_stopping_only_until_its_run_is_over() -> None:
    slot = await a_slot(SlotState.RUNNING)
    assert slot.stopping_for(9.0) == 0
    slot.ask_to_stop(Stop.TIMEOUT, 1.0)
    assert slot.stopping_for(9.0) == 8.0
    slot.report(Done())
    assert slot.stopping_for(9.0) == 0


async def test_a_known_outcome_is_recorded_for_a_slot_that_nobody_waits_for() -> None:
    slot = await a_slot(SlotState.RUNNING)
    assert slot.unrecorded(Released()) == Released()
    slot.report(Done())
    assert slot.unrecorded(Released()) == Done()
    slot.report(None)  # it is recorded already, or its lease is lost
    assert slot.unrecorded(Released()) is None


@pytest.mark.parametrize("state", LEFT, ids=lambda state: state.name)
async def test_a_slot_that_is_left_gets_no_other_job(state: SlotState) -> None:
    slot = await a_slot(state)
    assert not slot.finish()
    assert slot.lease is LEASE


async def test_a_finished_slot_begins_again_with_nothing_of_the_last_job() -> None:
    slot = await a_slot(SlotState.STOPPING)
    slot.report(Done())
    assert slot.finish()
    slot.begin(LEASE, 5.0)
    assert slot.started == 5.0
    assert [slot.deadline, slot.stop, slot.asked_at, slot.outcome, slot.job] == [None] * 5

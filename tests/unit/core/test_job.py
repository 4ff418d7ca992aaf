"""The vocabulary: ids, states and errors as values."""

from __future__ import annotations

import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.app.operate.workers import WorkerInfo
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.ids import derive_id, is_own, new_id
from propolis.core.job import Error, JobInfo, State, describe
from propolis.core.schedule import ScheduleRecord, every


def test_a_new_id_is_a_uuid_of_version_7() -> None:
    for _ in range(100):
        made = uuid.UUID(new_id())
        assert made.version == 7
        assert made.variant == uuid.RFC_4122


def test_a_new_id_tells_the_time_so_that_ids_sort_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time_ns() // 1_000_000
    milliseconds = uuid.UUID(new_id()).int >> 80
    assert before <= milliseconds <= time.time_ns() // 1_000_000

    ids = []
    for now in (1, 2, 2**40):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now * 1_000_000)
        ids.append(new_id())
    assert ids == sorted(ids)


def test_a_value_shows_only_what_is_not_its_default() -> None:
    """In a shell, and in the message of an assertion: a job has some thirty fields, most of them empty."""
    at = datetime(2030, 1, 1, tzinfo=UTC)
    info = JobInfo(
        id="a",
        task="t",
        queue="q",
        state=State.READY,
        body=b"{}",
        priority=0,
        put_at=at,
        due_at=at,
        failures=2,
    )
    assert repr(info) == (
        f"JobInfo(id='a', task='t', queue='q', state={State.READY!r}, body=b'{{}}', priority=0, "
        f"put_at={at!r}, due_at={at!r}, failures=2)"
    )
    schedule = ScheduleRecord(
        schedule=every("5m", jitter="1s").schedule("tick", Envelope(id="b", task="t")), next_at=at
    )
    shown = repr(schedule)
    assert "period_ms=300000" in shown
    assert "jitter_ms=1000" in shown
    assert not [name for name in ("misfire_limit", "delay_ms", "headers", "last_at") if name in shown]
    assert "more_tasks" not in repr(WorkerInfo(id="w", seen_at=at, started_at=at))


def test_new_ids_differ() -> None:
    assert len({new_id() for _ in range(10_000)}) == 10_000


def test_a_process_knows_the_ids_that_it_has_made() -> None:
    """But not those of others, nor what only looks like them; and in a fork not those of its parent."""
    own = new_id()
    assert is_own(own)
    other = f"{own[:19]}{(int(own[19], 16) ^ 3):x}{own[20:]}"
    for stranger in (str(uuid.uuid4()), derive_id("a"), "", "x", own[:30], other):
        assert not is_own(stranger)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, f"{is_own(own)} {is_own(new_id())}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"False True"
    os.close(read)
    os.close(write)


def test_new_ids_of_one_thread_ascend() -> None:
    """Also within a millisecond: so jobs that are put together stand together in every index."""
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(ids)


def test_threads_do_not_draw_the_same_ids() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: [new_id() for _ in range(2_000)], range(8)))
    assert len({one for ids in found for one in ids}) == 16_000


def test_a_fork_does_not_go_on_with_the_ids_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one millisecond, of which the test makes a long one."""
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    new_id()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100).decode() != new_id()
    os.close(read)
    os.close(write)


def test_a_derived_id_is_the_same_for_ever() -> None:
    """A literal: two versions of propolis that work side by side must derive the same ids."""
    assert derive_id("a", 1) == "39b60eed-8894-5d33-bebe-d62df7c86d98"


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1, max_size=4))
def test_a_derived_id_follows_from_its_parts_and_from_nothing_else(parts: list[str]) -> None:
    assert derive_id(*parts) == derive_id(*parts)
    assert derive_id(*parts) != derive_id(*parts, "")
    assert derive_id(*parts) != derive_id("x" + parts[0], *parts[1:])


def test_only_three_states_are_terminal() -> None:
    assert [state for state in State if state.terminal] == [State.DONE, State.DEAD, State.CANCELLED]


def test_a_job_needs_no_more_than_an_id_and_a_task() -> None:
    job = Envelope(id="a", task="mail.send")
    assert (job.queue, job.priority, job.max_crashes) == ("default", 0, 3)
    assert (bytes(job.args), bytes(job.kwargs)) == (b"[]", b"{}")
    assert job.unique_until is UniqueUntil.ENDED


def test_jobs_do_not_share_their_headers() -> None:
    Envelope(id="a", task="t").headers["trace"] = "1"
    assert Envelope(id="b", task="t").headers == {}


# --- describe ----------------------------------------------------------------------------


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_error_becomes_text() -> None:
    assert describe(ValueError("boom"), "Traceback") == Error("ValueError", "boom", "Traceback")
    assert describe(KeyboardInterrupt()) == Error("KeyboardInterrupt")


def test_a_nested_class_is_named_with_its_surroundings() -> None:
    class Inner(Exception):
        pass

    assert describe(Inner()).type.endswith(
        "test_a_nested_class_is_named_with_its_surroundings.<locals>.Inner"
    )


def test_the_beginning_of_a_message_is_kept_and_the_end_of_a_traceback() -> None:
    error = describe(ValueError("m" * 5000), "first" + "t" * 10_000 + "last")
    assert error.message == "m" * 2000
    assert len(error.traceback) == 8000
    assert error.traceback.endswith("last")


def test_an_error_that_cannot_be_read_is_still_described() -> None:
    assert describe(Unreadable()) == Error("Unreadable", "(its message cannot be read: RuntimeError)")


@pytest.mark.parametrize(
    ("text", "stored"),
    [("no file '\udc80'", "no file '\\udc80'"), ("a\0b", "a\\x00b"), ("naïve 🐝", "naïve 🐝")],
)
def test_a_described_error_can_be_stored_by_every_engine(text: str, stored: str) -> None:
    error = describe(OSError(text), text)
    assert (error.message, error.traceback) == (stored, stored)
    error.message.encode()

"""What an attempt's end means for its job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.core.duration import LONGEST_MS, Duration
from propolis.core.envelope import Envelope
from propolis.core.job import Dead, Done, Error, Lease, Retried
from propolis.core.policy import TIMED_OUT, Policy, after_failure, after_success, backoff_delay
from propolis.core.strategy import (
    Archive,
    Exponential,
    Strategy,
    archive,
    dead,
    delete,
    exponential,
    fixed,
    repeat,
    repeat_forever,
)
from propolis.errors import BadDuration

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
BOOM = Error("ValueError", "boom")


def lowest() -> float:
    return 0.0


def highest() -> float:
    return 1.0


def a_lease(attempt: int, crashes: int = 0) -> Lease:
    return Lease(
        "a", 9, "tests.echo", "default", b"", attempt, attempt - crashes - 1, crashes, NOW, NOW, "worker-1"
    )


# --- success -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "result_ttl", "kept"),
    [
        (delete, None, None),
        (archive.keep("1h"), None, HOUR),
        (delete, HOUR, HOUR),
        (archive.keep("1h"), HOUR / 2, HOUR),
        (archive.keep("1h"), HOUR * 2, HOUR * 2),
        (delete, timedelta(0), timedelta(0)),
    ],
)
def test_a_job_that_worked_is_kept_for_its_archive_or_its_result_whichever_is_longer(
    strategy: Strategy, result_ttl: timedelta | None, kept: timedelta | None
) -> None:
    assert after_success(strategy, result=b"1", result_ttl=result_ttl).keep == kept


def test_a_result_that_nobody_wants_is_not_stored() -> None:
    assert after_success(archive, result=b"1").result is None
    assert after_success(archive, result=b"1", result_ttl=HOUR).result == b"1"


def test_a_job_that_worked_hands_on_its_emissions() -> None:
    following = Envelope(id="b", task="tests.echo")
    assert after_success(delete, emit=(following,)) == Done(emit=(following,))


# --- failure -----------------------------------------------------------------------------


@pytest.mark.parametrize("times", [0, 1, 5])
def test_times_repetitions_are_times_plus_one_runs(times: int) -> None:
    outcomes = [
        type(after_failure(repeat(times), a_lease(attempt), random=lowest)) for attempt in range(1, times + 2)
    ]
    assert outcomes == [Retried] * times + [Dead]


@given(times=st.integers(0, 50), runs=st.integers(1, 60), crashes=st.integers(0, 10))
def test_crashes_take_nothing_from_the_repetitions(times: int, runs: int, crashes: int) -> None:
    strategy = repeat(times, exponential("1s"))
    with_crashes = after_failure(strategy, a_lease(runs + crashes, crashes), random=lowest)
    assert with_crashes == after_failure(strategy, a_lease(runs), random=lowest)


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        (delete, timedelta(0)),
        (archive.keep("1h"), HOUR),
        (dead, None),
        (repeat(0).then(delete), timedelta(0)),
        (repeat(0).then(archive.keep("1h")), HOUR),
        (repeat(0), None),
    ],
)
def test_the_ending_says_how_long_the_dead_job_is_kept(strategy: Strategy, kept: timedelta | None) -> None:
    outcome = after_failure(strategy, a_lease(1), random=lowest, reason=TIMED_OUT, error=BOOM)
    assert outcome == Dead(reason="timeout", error=BOOM, keep=kept)


def test_a_failure_is_called_failed_unless_it_was_a_timeout() -> None:
    assert after_failure(dead, a_lease(1), random=lowest) == Dead(reason="failed")


def test_repeating_for_ever_never_ends() -> None:
    outcome = after_failure(repeat_forever("1s"), a_lease(10**9), random=lowest, error=BOOM)
    assert outcome == Retried(delay=timedelta(seconds=1), error=BOOM)


def test_repetitions_may_move_to_another_queue() -> None:
    assert after_failure(repeat(1).on("slow"), a_lease(1), random=lowest) == Retried(queue="slow")


def test_a_function_chooses_the_delay_from_the_number_of_the_repetition() -> None:
    def delays(number: int) -> Duration:
        return f"{number * 10}s"

    outcomes = [
        after_failure(repeat(2, delays), a_lease(attempt, crashes=1), random=lowest) for attempt in (2, 3, 4)
    ]
    assert outcomes == [Retried(timedelta(seconds=10)), Retried(timedelta(seconds=20)), Dead()]


def test_a_function_that_gives_no_duration_is_told_so() -> None:
    with pytest.raises(BadDuration):
        after_failure(repeat(2, lambda _: -1), a_lease(1), random=lowest)


# --- delays ------------------------------------------------------------------------------


def seconds(backoff: Exponential, repetitions: range, random: float = 0.0) -> list[float]:
    return [backoff_delay(backoff, number, lambda: random).total_seconds() for number in repetitions]


def test_a_fixed_delay_stays_the_same() -> None:
    delays = {backoff_delay(fixed("5s"), number, highest) for number in (1, 2, 1000)}
    assert delays == {timedelta(seconds=5)}


def test_an_exponential_delay_grows_up_to_its_cap() -> None:
    assert seconds(exponential("2s", cap="20s", jitter=0), range(1, 7)) == [2, 4, 8, 16, 20, 20]
    assert seconds(exponential("1s", factor=3, cap="1h", jitter=0), range(1, 4)) == [1, 3, 9]


@pytest.mark.parametrize(("jitter", "longest", "shortest"), [(0.0, 8, 8), (0.5, 8, 4), (1.0, 8, 0)])
def test_jitter_is_the_share_of_the_delay_that_is_drawn(
    jitter: float, longest: float, shortest: float
) -> None:
    backoff = exponential("2s", jitter=jitter)
    assert seconds(backoff, range(3, 4), random=0.0) == [longest]
    assert seconds(backoff, range(3, 4), random=1.0) == [shortest]


def test_a_delay_is_still_finite_after_a_thousand_repetitions() -> None:
    assert seconds(exponential("2s", cap="1h", jitter=0), range(100_000, 100_001)) == [3600]


def test_nothing_doubled_for_ever_is_still_nothing() -> None:
    assert seconds(exponential("0s", jitter=0), range(100_000, 100_001)) == [0]


@given(
    backoff=st.builds(
        Exponential,
        first_ms=st.integers(0, LONGEST_MS),
        factor=st.floats(1, 1e300),
        cap_ms=st.integers(0, LONGEST_MS),
        jitter=st.floats(0, 1),
    ),
    repetition=st.integers(1, 10**6),
    random=st.floats(0, 1, exclude_max=True),
)
def test_a_delay_is_never_negative_nor_above_its_cap(
    backoff: Exponential, repetition: int, random: float
) -> None:
    delay = backoff_delay(backoff, repetition, lambda: random)
    assert timedelta(0) <= delay <= timedelta(milliseconds=backoff.cap_ms)


# --- policies ----------------------------------------------------------------------------


def test_the_defaults_retry_an_error_five_times_over_about_a_minute_then_keep_it() -> None:
    strategy = Policy().on_error
    outcomes = [after_failure(strategy, a_lease(attempt), random=lowest) for attempt in range(1, 7)]
    delays = [outcome.delay for outcome in outcomes if isinstance(outcome, Retried)]
    assert len(delays) == 5
    assert sum(delays, timedelta(0)) == timedelta(seconds=62)
    assert outcomes[-1] == Dead()


def test_the_defaults_retry_a_timeout_twice_and_forget_what_worked() -> None:
    policy = Policy()
    outcomes = [after_failure(policy.on_timeout, a_lease(n), random=lowest) for n in (1, 2, 3)]
    assert [type(outcome) for outcome in outcomes] == [Retried, Retried, Dead]
    assert after_success(policy.on_success) == Done()


def test_a_job_overrides_the_strategies_that_it_names() -> None:
    policy = Policy(on_success=archive, on_error=repeat(1), on_timeout=repeat(3))
    assert policy.overridden(Envelope(id="a", task="t")) is policy
    assert policy.overridden(Envelope(id="a", task="t", on_error=delete)) == Policy(
        archive, delete, repeat(3)
    )
    assert policy.overridden(Envelope(id="a", task="t", on_success=Archive(1))) == Policy(
        Archive(1), repeat(1), repeat(3)
    )
    less = Policy(archive, repeat(1), repeat(9))
    assert less.overridden(Envelope(id="a", task="t", on_timeout=repeat(8))).on_timeout == repeat(8)


def test_a_job_does_not_repeat_more_often_than_its_task() -> None:
    """W.8: for an error also by the most generous of the rules; the backoff is the job's own."""
    policy = Policy(on_error=repeat(1), on_timeout=dead)
    job = Envelope(id="a", task="t", on_error=repeat(9, "5s"), on_timeout=repeat_forever("1s"))
    assert policy.overridden(job) == Policy(on_error=repeat(1, "5s"), on_timeout=repeat(0, "1s"))
    assert policy.overridden(job, [repeat(3), dead]).on_error == repeat(3, "5s")
    assert policy.overridden(job, [repeat_forever("1s")]).on_error == repeat(9, "5s")

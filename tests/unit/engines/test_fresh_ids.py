"""The ids that a process has just made, which are looked for in no shard."""

from __future__ import annotations

from propolis.engines.redis.shards.putting import MAX_FRESH, FreshIds
from propolis.testing.engines.samples import a_job


def test_what_is_fresh_is_fresh_once() -> None:
    """I1: an id that was put is looked for the next time, also when so many were put that it is forgotten."""
    fresh = FreshIds()
    job, other = a_job(), a_job()
    assert fresh.all_fresh([job, other])
    assert not fresh.all_fresh([job])
    assert not fresh.all_fresh([a_job(), job])
    assert not fresh.all_fresh([a_job(id="given")])
    assert not fresh.all_fresh([a_job(unique="k")])
    twice = a_job()
    assert not fresh.all_fresh([twice, twice])
    late = a_job()
    for _ in range(MAX_FRESH // 1000 + 1):
        fresh.all_fresh([a_job() for _ in range(1000)])
    assert not fresh.all_fresh([job])
    assert not fresh.all_fresh([late])  # nobody put it, but it is as old as others that were forgotten
    assert fresh.all_fresh([a_job()])

"""Why a job is not running: what the engine knows, put into sentences."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from propolis.app.operate.limits import use_of
from propolis.app.operate.rules import named, rules_about, state_of, strongest_first, words_about
from propolis.app.operate.workers import live_workers
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Inspects, Records, RuleKind, Rules


async def explain(engine: Inspects, job_id: str, declared: Collection[str] = ()) -> list[str]:
    """What stands between this job and its run, the strongest reason first; one sentence if nothing does.

    `declared` are the tasks of whoever asks; an app without any does not run jobs, and is no reason.
    """
    info = await engine.get(job_id)
    if info is None:
        return [f"there is no job {job_id}: it never was, or it ended and was not kept"]
    if info.state is not State.READY:
        return [_not_waiting(info, await engine.now())]
    now = await engine.now()
    reasons, beside = await _by_rules(engine, info, now)
    if info.parked:
        reasons.append(f"it is parked: a worker took it that does not know task {info.task!r}")
    nobody = await _nobody_for(engine, info)
    if nobody and declared and info.task not in declared:
        nobody.append(f"this app declares no task {info.task!r}: was it renamed, or its module not imported?")
    if info.expires_at is not None and info.expires_at <= now:
        reasons.append(f"it expired at {info.expires_at:%F %TZ} and will end as dead")
    elif info.due_at > now:
        reasons.append(f"it is not due before {info.due_at:%F %TZ}")
    elif not reasons:
        ahead = await engine.position(job_id)
        return [*nobody, f"it is ready, behind {ahead} others of queue {info.queue!r}", *beside]
    return reasons + beside + nobody


async def _nobody_for(engine: Inspects, info: JobInfo) -> list[str]:
    """That no worker would run it, as far as workers are known."""
    if not isinstance(engine, Records):
        return []
    workers = await live_workers(engine)
    serving = [worker for worker in workers if worker.may_serve(info.queue)]
    if not serving:
        return [f"no live worker serves queue {info.queue!r}"]
    if any(worker.may_know(info.task) for worker in serving):
        return []
    elsewhere = any(worker.may_know(info.task) for worker in workers)
    return [f"no live worker {f'of queue {info.queue!r} ' if elsewhere else ''}knows task {info.task!r}"]


def _not_waiting(info: JobInfo, now: datetime) -> str:
    if info.state is State.RUNNING:
        asked = ", and was asked to stop" if info.cancel_requested else ""
        if info.lease_until is not None and info.lease_until <= now:
            return f"its worker {info.holder} has lost its lease: the next sweep takes it back{asked}"
        return f"it is running: attempt {info.attempts}, held by {info.holder}{asked}"
    return f"it has ended as {info.state.value}" + (f": {info.reason}" if info.reason else "")


async def _by_rules(engine: Inspects, info: JobInfo, now: datetime) -> tuple[list[str], list[str]]:
    """What keeps it back; and the limits that it comes under, and which have room."""
    reasons: list[str] = []
    beside: list[str] = []
    rules = await rules_about(engine, info.queue, info.task, info.key) if isinstance(engine, Rules) else []
    for rule in sorted(rules, key=strongest_first):
        if rule.kind is not RuleKind.LIMIT:
            reasons.append(f"{named(rule)} is {state_of(rule).value} {words_about(rule, now)}")
            continue
        use = await use_of(engine, rule, info.key)
        (beside if use.has_room else reasons).append(f"{use}; limited {words_about(rule, now)}")
    return reasons, beside

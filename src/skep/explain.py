"""Why a job is not running: the facts of the ledger, put into sentences."""

from __future__ import annotations

from datetime import datetime

from skep.broker import Ledger, Rule, RuleKind, Scope
from skep.job import Record, State


async def explain(ledger: Ledger, job_id: str) -> list[str]:
    """What stands between this job and its run, the strongest reason first; one sentence if nothing does."""
    record = await ledger.get(job_id)
    if record is None:
        return [f"there is no job {job_id}: it never was, or it ended and was not kept"]
    if record.state is not State.READY:
        return [_not_waiting(record, await ledger.now())]
    reasons = [_by_rule(rule) for rule in await ledger.rules() if _applies(rule, record)]
    now = await ledger.now()
    if record.expires_at is not None and record.expires_at <= now:
        reasons.append(f"it expired at {record.expires_at:%F %TZ} and will end as dead")
    elif record.due_at > now:
        reasons.append(f"it is not due before {record.due_at:%F %TZ}")
    elif not reasons:
        ahead = await ledger.position(job_id)
        reasons.append(
            f"it is ready, behind {ahead} others of queue {record.queue!r}: is there a worker for it?"
        )
    return reasons


def _not_waiting(record: Record, now: datetime) -> str:
    if record.state is State.RUNNING:
        asked = ", and was asked to stop" if record.cancel_requested else ""
        if record.lease_until is not None and record.lease_until <= now:
            return f"its worker {record.holder} has lost its lease: the next sweep takes it back{asked}"
        return f"it is running: attempt {record.attempts}, held by {record.holder}{asked}"
    return f"it has ended as {record.state.value}" + (f": {record.reason}" if record.reason else "")


def _applies(rule: Rule, record: Record) -> bool:
    facts = {Scope.QUEUE: record.queue, Scope.TASK: record.task, Scope.KEY: record.key}
    return rule.kind is not RuleKind.CAP and facts[rule.scope] == rule.name


def _by_rule(rule: Rule) -> str:
    if rule.kind is RuleKind.LIMIT:
        return f"at most {rule.n} jobs of {rule.scope.value} {rule.name!r} may run at once"
    verb = "paused" if rule.kind is RuleKind.PAUSE else "blocked"
    return f"{rule.scope.value} {rule.name!r} is {verb}"

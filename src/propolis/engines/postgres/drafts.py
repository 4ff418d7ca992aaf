"""What is sent to the functions of the schema: jobs, batches and outcomes as arrays and JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from propolis.core import wire
from propolis.core.batch import Batch
from propolis.core.clock import span_us, to_us
from propolis.core.envelope import Envelope, is_simple
from propolis.core.job import (
    DONE,
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Lease,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Unknown,
    storable,
)
from propolis.core.protocols import Note, Rule
from propolis.core.transitions import NOTE_MAX
from propolis.engines.postgres.hints import soonest

_json = msgspec.json.Encoder()


def extras_of_put(jobs: Sequence[Envelope]) -> str | None:
    """What arrays do not say of these jobs.  The pieces of a batch are put as quickly as plain jobs."""
    if not all(map(is_simple, jobs)):
        return text_of(extras_of_all(jobs))
    batches, numbers = {job.batch for job in jobs}, [job.member for job in jobs]
    if batches <= {None}:
        return None
    if len(batches) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return text_of({"batch": jobs[0].batch, "first": numbers[0]})
    return text_of(extras_of_all(jobs))


def extras_of_all(jobs: Sequence[Envelope]) -> dict[str, object]:
    """What is not plain about some jobs, and whether two of them want the same id or key."""
    keys = [job.unique for job in jobs if job.unique is not None]
    alike = len(set(keys)) < len(keys) or len({job.id for job in jobs}) < len(jobs)
    return {"alike": alike, "each": [_extras(job) for job in jobs]}


def _extras(job: Envelope) -> dict[str, object]:
    """What is not plain about a job."""
    extras: dict[str, object] = {}
    if job.delay_ms:
        extras["delay_us"] = job.delay_ms * 1000
    if job.due_at is not None:
        extras["due_us"] = to_us(job.due_at)
    if job.expires_at is not None:
        extras["expires_us"] = to_us(job.expires_at)
    if job.expires_in_ms is not None:
        extras["expires_in_us"] = job.expires_in_ms * 1000
    if job.chosen:
        extras["chosen"] = True
    if job.unique is not None:
        extras["unique"], extras["unique_until"] = job.unique, job.unique_until
    if job.key is not None:
        extras["key"] = job.key
    if job.batch is not None:
        extras["batch"] = job.batch
    if job.member:
        extras["member"] = job.member
    return extras


def draft_of(job: Envelope) -> dict[str, object]:
    """A job that follows from something else."""
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "body": b64encode(wire.encode(job)).decode(),
        "priority": job.priority,
        "max_crashes": job.max_crashes,
        **_extras(job),
    }


def batch_draft(batch: Batch) -> dict[str, object]:
    calls = {
        "on_failed": batch.on_failed,
        "on_succeeded": batch.on_succeeded,
        "on_finished": batch.on_finished,
    }
    return {
        "id": batch.id,
        "body": text_of(batch),
        "calls": {when: draft_of(job) for when, job in calls.items() if job is not None},
        "keep_for_us": batch.keep_for_ms * 1000,
        "open_us": batch.open_for_ms * 1000,
        "parent": batch.parent,
        "member": batch.member,
    }


def outcome_texts(outcomes: Sequence[tuple[Lease, Outcome]]) -> list[str | None]:
    """The common outcome needs no words, unless a lease is there twice: then their order counts."""
    short = len({lease.place for lease, _ in outcomes}) == len(outcomes)
    return [None if short and outcome == DONE else outcome_text(outcome) for _, outcome in outcomes]


def outcome_text(outcome: Outcome) -> str:
    match outcome:
        case Done(result=result, keep=keep, emit=emit, opens=opens):
            fields: dict[str, object] = {"kind": "done", "keep_us": None if keep is None else span_us(keep)}
            if result is not None:
                fields["result"] = b64encode(result).decode()
            fields |= _following(emit, opens)
        case Retried(delay=delay, error=error, queue=queue):
            fields = {
                "kind": "retry",
                "delay_us": span_us(delay),
                "error": _error_text(error),
                "queue": queue,
                "note": _line(error),
            }
        case Dead(reason=reason, error=error, keep=keep, emit=emit, opens=opens):
            keep_us = None if keep is None else span_us(keep)
            fields = {
                "kind": "dead",
                "reason": storable(reason),
                "error": _error_text(error),
                "keep_us": keep_us,
            }
            fields |= _following(emit, opens)
        case Snoozed(delay=delay, asked=asked):
            fields = {"kind": "snooze", "delay_us": span_us(delay)} | ({"asked": True} if asked else {})
        case Released():
            fields = {"kind": "release"}
        case Cancelled(error=error):
            fields = {"kind": "cancelled", "error": _error_text(error)}
        case Broken(error=error):
            fields = {"kind": "broken", "error": _error_text(error)}
        case Crashed(error=error, blameless=blameless):
            fields = {"kind": "crashed", "error": _error_text(error), "note": _line(error)}
            fields["blameless"] = blameless
        case Unknown():
            fields = {"kind": "unknown"}
    return text_of(fields)


def note_draft(note: Note) -> dict[str, object]:
    fields: dict[str, object] = {
        "number": note.lease.place,
        "id": note.lease.id,
        "fence": note.lease.fence,
        "holder": note.lease.holder,
        "lines": [storable(line) for line in note.lines],
    }
    if note.progress is not None:
        fields["progress"] = storable(text_of(note.progress))
    if note.began:
        fields["began"] = True
    if note.checkpoint is not None:
        fields["checkpoint"] = b64encode(note.checkpoint).decode()
    if note.puts:
        fields["puts"] = _drafts(note.puts)
    return fields


def _following(jobs: Sequence[Envelope], batches: Sequence[Batch]) -> dict[str, object]:
    fields: dict[str, object] = {"emit": _drafts(jobs)} if jobs else {}
    if batches:
        fields["opens"] = [batch_draft(batch) for batch in batches]
    return fields


def _drafts(jobs: Sequence[Envelope]) -> list[object]:
    return [draft_of(job) for job in jobs]


def _line(error: Error | None) -> str:
    return storable(f"{error.type}: {error.message}"[:NOTE_MAX]) if error else ""


def _error_text(error: Error | None) -> str | None:
    return None if error is None else text_of(error)


def news_of(outcomes: Sequence[tuple[Lease, Outcome]]) -> dict[str, float]:
    """The queues to which these outcomes bring something, and in how many seconds."""
    news: list[tuple[str, float]] = []
    for lease, outcome in outcomes:
        match outcome:
            case Done(emit=emit) | Dead(emit=emit):
                news += [(job.queue, job.delay_ms / 1000) for job in emit]
            case Retried(delay=delay, queue=queue):
                news.append((queue or lease.queue, delay.total_seconds()))
            case Snoozed(delay=delay):
                news.append((lease.queue, delay.total_seconds()))
            case Released() | Crashed():
                news.append((lease.queue, 0.0))
    return soonest(news)


def text_of(value: Any) -> str:
    return _json.encode(value).decode()


def rule_args(rule: Rule) -> tuple[str | int | None, ...]:
    """All that a rule says; for how long it holds, or until when."""
    span = None if rule.lasts is None else span_us(rule.lasts)
    until = None if rule.until is None else to_us(rule.until)
    every = None if rule.every is None else span_us(rule.every)
    given = (rule.kind, rule.scope, rule.name, rule.n, rule.by, rule.why, span, until)
    return *given, every, None if every is None else rule.burst

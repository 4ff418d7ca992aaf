"""What an operator does to jobs, queues, rules and batches."""

from __future__ import annotations

import sqlite3

from propolis.core.clock import from_us, span_us, to_us
from propolis.core.job import Event, State
from propolis.core.limits import too_many_prefixes
from propolis.core.protocols import BITE, MAX_PREFIXES, Rule
from propolis.core.transitions import Step
from propolis.engines.sqlite.rows import LiveJob, history_with, text_of
from propolis.engines.sqlite.steps import removals
from propolis.engines.sqlite.steps.batches import batch_row, remove_batch
from propolis.engines.sqlite.steps.lines import place, unplace
from propolis.engines.sqlite.steps.removals import Leftover
from propolis.engines.sqlite.steps.rules.rulebook import prefixes, remove_rule
from propolis.engines.sqlite.steps.settling import end_waiting, job_by_number, live_job, make_ready
from propolis.engines.sqlite.steps.work import Work


def cancel(work: Work, job_id: str) -> bool:
    row = work.run("live_job", id=job_id).fetchone()
    if row is None:
        return False
    job = LiveJob(*row)
    lease = work.run("running_of", seq=job.seq).fetchone()
    if lease is None:
        end_waiting(work, job, State.CANCELLED, work.retention.cancelled_for, "cancelled")
        return True
    fence, attempt, asked = lease
    if not asked:
        work.run("ask_to_stop", seq=job.seq)
        event = Event(from_us(work.now_us), "cancel-requested", attempt, fence)
        work.run("keep_history", seq=job.seq, history=job.history_with(event))
    return True


def reschedule(work: Work, job_id: str, due: int) -> bool:
    row = work.run("live_job", id=job_id).fetchone()
    if row is None or work.answered("running_of", seq=row[0]):
        return False
    job = LiveJob(*row)
    source = unplace(work, job)
    step = Step(
        state=State.READY,
        attempts=job.attempts,
        failures=job.failures,
        losses=job.losses,
        crashes=job.crashes,
        due_us=due,
        event=Event(from_us(work.now_us), "rescheduled", job.attempts, job.fence),
    )
    make_ready(work, job, step, work.back(), source, given=True)
    return True


def replay(work: Work, job_id: str) -> bool:
    cursor = work.run("archived_job", id=job_id)
    cursor.row_factory = sqlite3.Row
    row = cursor.fetchone()
    if row is None or row["state"] != State.DEAD:
        return False
    if row["unique_key"] is not None:
        if work.run("held_keys", keys=text_of([row["unique_key"]])).fetchone():
            return False
        work.run("take_key", key=row["unique_key"], id=job_id)
    event = Event(
        from_us(work.now_us), "replayed", row["attempts"], row["fence"], "", f"was dead: {row['reason']}"
    )
    pos = work.back()
    work.run("revive", id=job_id, pos=pos, now_us=work.now_us, history=history_with(row["history"], event))
    work.run("delete_archived", id=job_id)
    target = place(work, live_job(work, job_id), row["queue"], pos, work.now_us)
    work.move(row["queue"], "dead", target)
    return True


def delete(work: Work, job_id: str) -> bool:
    row = work.run("delete_archived", id=job_id).fetchone()
    if row is None:
        return False
    work.depart(*row)
    return True


def drop(work: Work, queue: str) -> int:
    """A bite of it; the rest is marked, and left to the sweeps."""
    removal = removals.begin(work, f"queue:{queue}", cancels=True)
    return drop_some(work, queue, removal, BITE)


def drop_some(work: Work, queue: str, removal: Leftover, limit: int) -> int:
    waiting = work.run("waiting_of_queue", queue=queue, upto=removal.upto, most=limit).fetchall()
    for (seq,) in sorted(waiting):
        end_waiting(work, job_by_number(work, seq), State.CANCELLED, None, None)
    archived = work.run("drop_archived", queue=queue, upto=removal.upto, most=limit).fetchall()
    for (state,) in archived:
        work.depart(queue, state)
    gone = len(waiting) + len(archived)
    removals.go_on(work, removal, gone, more=limit in (len(waiting), len(archived)))
    left = work.tally(queue)
    if left["put"] == left["deleted"]:
        work.run("drop_tally", queue=queue)
        work.tallies.pop(queue, None)
    return gone


def delete_batch(work: Work, batch: str) -> bool:
    if batch_row(work, batch) is None:
        return False
    removal = removals.begin(work, f"batch:{batch}", cancels=True)
    remove_batch(work, batch, limit=0)
    cast_out(work, batch, removal, BITE)
    return True


def cast_out(work: Work, batch: str, removal: Leftover, limit: int) -> None:
    """A bite of the members that wait, for good; those that run end by themselves."""
    living = work.run("live_members_of", batch=batch, upto=removal.upto, most=limit).fetchall()
    gone = 0
    for (seq,) in living:
        work.run("detach", seq=seq)
        if not work.answered("running_of", seq=seq):
            end_waiting(work, job_by_number(work, seq), State.CANCELLED, None, None)
            gone += 1
    ended = removals.forget_ended(work, batch, removal.upto, limit)
    removals.go_on(work, removal, gone, more=limit in (ended, len(living)))


def remove_on(work: Work, limit: int) -> None:
    """What drops and the ends of batches have left undone, a bite of each."""
    for removal in removals.under_way(work):
        what, _, name = removal.name.partition(":")
        if what == "queue":
            drop_some(work, name, removal, limit)
        elif removal.cancels:
            cast_out(work, name, removal, limit)
        else:
            gone, more = removals.forget_members(work, name, removal.upto, limit)
            removals.go_on(work, removal, gone, more=more)


def add_rule(work: Work, rule: Rule) -> bool:
    was_there = remove_rule(work, rule.kind, rule.scope, rule.name)
    if rule.prefix is not None and len(prefixes(work)) >= MAX_PREFIXES:
        raise too_many_prefixes(rule.name)
    until = rule.set_at(from_us(work.now_us)).until
    work.run(
        "add_rule",
        kind=rule.kind,
        scope=rule.scope,
        name=rule.name,
        n=rule.n,
        set_by=rule.by,
        why=rule.why,
        now_us=work.now_us,
        until_us=None if until is None else to_us(until),
        every_us=None if rule.every is None else span_us(rule.every),
        burst=rule.burst,
    )
    return not was_there

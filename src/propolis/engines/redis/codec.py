"""What the Lua scripts take, and what their answers mean: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from propolis.core import wire
from propolis.core.batch import Batch, BatchStatus, batch_state
from propolis.core.clock import EPOCH, from_us, moment, span_us, to_us
from propolis.core.envelope import MAX_CRASHES, Envelope, UniqueUntil, is_simple
from propolis.core.ids import new_id
from propolis.core.job import (
    DONE,
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Event,
    JobInfo,
    Lease,
    Member,
    Outcome,
    Progress,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
    describe,
    storable,
)
from propolis.core.limits import rate_of
from propolis.core.protocols import Note, Rule, RuleKind, Scope
from propolis.core.transitions import NOTE_MAX
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.damaged import batch_as_opened
from propolis.errors import BrokenPayload, PropolisError

Argument = bytes | str | int
Row = Sequence[Any]

BROKEN_TASK = "(broken)"  # of what was pushed and names none
MAX_NAMES = 10_000  # kept for the next time

_json = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()
_error = msgspec.json.Decoder(Error)
_progress = msgspec.json.Decoder(Progress)
_UNREADABLE = (ValueError, OverflowError, msgspec.MsgspecError)
_ALONE = frozenset(b"PK")  # the flags of jobs that have no batch
_NUMBER = b',"member":'  # comes last in what is written of a member
_NOTHING_ALIKE = b"\n"  # with which no meta begins


def text(value: Any) -> str:
    return _json.encode(value).decode()


def packed(value: Any) -> bytes:
    return _packer.encode(value)


def lua_bytes(data: bytes) -> msgspec.Raw:
    """Bytes for `packed`: Lua knows only one kind of string, and its MessagePack only the older one."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


# --- jobs that are put -------------------------------------------------------------------


class Meta(Struct, omit_defaults=True):
    """What a record holds of a job besides its task and its body; Lua reads it."""

    queue: str
    priority: int = 0
    max_crashes: int = MAX_CRASHES
    chosen: bool = False
    unique: str | None = None
    until_started: bool = False
    key: str | None = None
    batch: str | None = None
    member: int = 0
    born: int = 0  # of the batch, where a member is plain in all other ways
    unique_shard: int | None = None
    batch_shard: int | None = None


_meta = msgspec.json.Decoder(Meta)


def are_plain_members(jobs: Sequence[Envelope], batch: str) -> bool:
    """Whether they are plain but for being members of this batch, and numbered one after the other."""
    numbers = range(jobs[0].member, jobs[0].member + len(jobs))
    return (
        [job.batch for job in jobs].count(batch) == len(jobs)
        and [job.member for job in jobs] == list(numbers)
        and all(map(is_simple, jobs))
    )


class Kinds:
    """Plain jobs of one task, queue and priority share arguments: see put_plain.lua and put_members.lua."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int, int], tuple[Argument, ...]] = {}

    def arguments(self, jobs: Sequence[Envelope], batch: str | None = None) -> list[Argument]:
        """What read_call() in plain.lua takes."""
        numbers: dict[tuple[str, str, int, int], int] = {}
        last: tuple[str, str, int, int] | None = None
        kinds: list[Argument] = []
        runs: list[int] = []
        bodies: list[Argument] = []
        for job, body in zip(jobs, wire.encode_all(jobs), strict=True):
            kind = (job.task, job.queue, job.priority, job.max_crashes)
            if kind != last:
                if kind not in numbers:
                    numbers[kind] = len(numbers) + 1
                    kinds += self._of_plain(kind) if batch is None else _of_members(kind, batch)
                runs += (numbers[kind], 0)
                last = kind
            runs[-1] += 1
            bodies += (job.id, body)
        return [len(numbers), *kinds, len(runs) // 2, *runs, *bodies]

    def _of_plain(self, kind: tuple[str, str, int, int]) -> tuple[Argument, ...]:
        found = self._known.get(kind)
        if found is None:
            task, queue, priority, max_crashes = kind
            meta = _json.encode(Meta(queue, priority, max_crashes))
            found = (queue, priority, f"P{task}", meta)
            if len(self._known) < MAX_NAMES:
                self._known[kind] = found
        return found


def _of_members(kind: tuple[str, str, int, int], batch: str) -> tuple[Argument, ...]:
    task, queue, priority, max_crashes = kind
    return queue, priority, f"M{task}", _json.encode(Meta(queue, priority, max_crashes, batch=batch))


def drafts(
    jobs: Sequence[Envelope],
    shard_map: ShardMap | None = None,
    *,
    claim: bool = False,
    around: Mapping[str, str] | None = None,
) -> list[dict[str, object]]:
    """Jobs that are put in one step.  With shards, a producer must claim the ids that it chooses.

    `around` are the parents of batches that are opened in the same step.
    """
    if shard_map is None:
        return list(map(draft, jobs, wire.encode_all(jobs)))
    ways = shard_map.ways(jobs, claim=claim, around=around)
    bodies = wire.encode_all(jobs)
    found = [draft(job, body, shard_map, ways, around) for job, body in zip(jobs, bodies, strict=True)]
    for job, fields in zip(jobs, found, strict=True):
        if claim and job.chosen:
            fields["id_shard"] = shard_map.of(job.id)
    return found


def draft(
    job: Envelope,
    body: bytes,
    shard_map: ShardMap | None = None,
    ways: Mapping[str, Sequence[int]] | None = None,
    around: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """A job as add() in batches.lua takes it; with shards, as travel() in travelling.lua does."""
    unique_shard = None if shard_map is None or job.unique is None else shard_map.of(job.unique)
    batch_shard = None if shard_map is None or job.batch is None else shard_map.of(job.batch)
    expires = job.expires_at is not None or job.expires_in_ms is not None
    flag = "P" if job.key is None else "K"
    if job.chosen or job.unique is not None or job.batch is not None or expires:
        flag = "X"
    fields: dict[str, object] = {
        "id": job.id,
        "head": f"{flag}{job.task}",
        "meta": lua_bytes(_json.encode(_meta_of(job, unique_shard, batch_shard))),
        "body": lua_bytes(body),
        "queue": job.queue,
        "priority": job.priority,
    }
    if shard_map is not None:
        fields["shard"] = shard_map.of_job(job.queue, job.id)
        fields["via"] = shard_map.way_of(job, ways or shard_map.ways([job]), around)
    if job.unique is not None:
        fields["unique"] = job.unique
        fields["unique_shard"] = unique_shard
    if job.batch is not None:
        fields["batch"] = job.batch
        fields["member"] = job.member
        fields["batch_shard"] = batch_shard
    if expires or job.delay_ms or job.due_at is not None:
        _add_times(fields, job)
    return fields


def _meta_of(job: Envelope, unique_shard: int | None, batch_shard: int | None) -> Meta:
    return Meta(
        job.queue,
        job.priority,
        job.max_crashes,
        job.chosen,
        job.unique,
        job.unique is not None and job.unique_until is UniqueUntil.STARTED,
        job.key,
        job.batch,
        job.member,
        unique_shard=unique_shard,
        batch_shard=batch_shard,
    )


def _add_times(fields: dict[str, object], job: Envelope) -> None:
    """Times are text, because Lua's numbers end in 2255; spans are in microseconds."""
    if job.due_at is not None:
        fields["due"] = str(to_us(job.due_at))
    elif job.delay_ms:
        fields["delay"] = job.delay_ms * 1000
    if job.expires_at is not None:
        fields["expires"] = str(to_us(job.expires_at))
    if job.expires_in_ms is not None:
        fields["expires_in"] = job.expires_in_ms * 1000


def batch_draft(batch: Batch, shard_map: ShardMap | None = None) -> dict[str, object]:
    calls = {
        "on_failed": batch.on_failed,
        "on_succeeded": batch.on_succeeded,
        "on_finished": batch.on_finished,
    }
    fields: dict[str, object] = {
        "id": batch.id,
        "body": text(batch),
        "calls": {
            when: draft(job, wire.encode(job), shard_map) for when, job in calls.items() if job is not None
        },
        "keep_for": batch.keep_for_ms * 1000,
        "open_for": batch.open_for_ms * 1000,
        "member": batch.member,
    }
    if batch.parent is not None:
        fields["parent"] = batch.parent
    if shard_map is not None:
        fields["shard"] = shard_map.of(batch.id)
        if batch.parent is not None:
            fields["parent_shard"] = shard_map.of(batch.parent)
    return fields


def taken_in(queue: str, pushed: bytes, shard_map: ShardMap | None = None) -> tuple[str | None, bytes]:
    """What a stranger pushed at the door of a queue, as take_in.lua takes it; and its id if it is a job.

    It becomes a job of this queue, whatever queue it names, and gets an id if it has none.  What is no job at
    all goes to the broken shelf as it came.
    """
    try:
        job, body = _read(queue, pushed)
    except BrokenPayload as error:
        return None, packed(_shelved(queue, pushed, error))
    return job.id, packed({"job": draft(job, body, shard_map)})


def seen_at_door(queue: str, pushed: bytes, now: datetime) -> JobInfo:
    """The same for whoever looks: what was pushed without an id has none yet."""
    try:
        job, body = _read(queue, pushed)
        has_id = "id" in msgspec.json.decode(pushed, type=dict[str, msgspec.Raw])
    except BrokenPayload:
        job, body, has_id = Envelope(id="", task=BROKEN_TASK, queue=queue), pushed, False
    return JobInfo(
        id=job.id if has_id else "",
        task=job.task,
        queue=queue,
        state=State.READY,
        body=body,
        priority=job.priority,
        put_at=now,
        due_at=now,
        unique=job.unique,
        key=job.key,
        batch=job.batch,
    )


def _read(queue: str, pushed: bytes) -> tuple[Envelope, bytes]:
    wire.check_limits(pushed)
    try:
        fields = msgspec.json.decode(pushed, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return wire.decode(pushed), pushed  # it says better what is wrong
    if "id" in fields and (job := wire.decode(pushed)).queue == queue:
        return job, pushed
    fields["queue"] = msgspec.Raw(_json.encode(queue))
    fields.setdefault("id", msgspec.Raw(_json.encode(new_id())))
    body = _json.encode(fields)
    return wire.decode(body), body


def _shelved(queue: str, pushed: bytes, error: BrokenPayload) -> dict[str, object]:
    kept = Envelope(id=new_id(), task=BROKEN_TASK, queue=queue)
    return {"broken": draft(kept, pushed), "error": text(describe(error))}


# --- leases that end, leases that begin --------------------------------------------------


class _Round:
    """Outcomes that are settled after one another: the plainest by queue, then the others one by one."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str], list[int]] = {}  # by queue and holder
        self.others: list[int] = []
        self.members_of: str | None = None  # the queue whose members are in it


class Settling:
    """A bundle of outcomes as exchange.lua takes it: the plainest ones by queue, the others one by one.

    What ends plainly and is no member of a batch may be moved: nothing follows from it.  But not before what
    another one emits, nor before the end of a member, from which a callback may follow: these may want its id
    or its unique key, and what follows from a call is put in the order of its outcomes.
    """

    def __init__(self, outcomes: Sequence[tuple[Lease, Outcome]], shard_map: ShardMap | None = None) -> None:
        self._leases = [lease for lease, _ in outcomes]
        self._order: list[int] = []
        rounds = self._rounds(outcomes)
        arguments: list[Argument] = [len(rounds)]
        for each in rounds:
            arguments.append(len(each.groups))
            for (queue, holder), numbers in each.groups.items():
                arguments += (queue, holder, len(numbers))
                arguments += [self._leases[n].id for n in numbers]
                arguments += [self._leases[n].fence for n in numbers]
                self._order += numbers
            arguments.append(len(each.others))
            for n in each.others:
                lease, outcome = outcomes[n]
                fields = outcome_fields(outcome, lease.id, shard_map)
                arguments += (lease.id, lease.fence, lease.holder, lease.queue, packed(fields))
            self._order += each.others
        self.arguments = arguments

    def _rounds(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[_Round]:
        # Where a job is there twice their order counts, and nothing may be moved.
        unique = len({lease.id for lease in self._leases}) == len(outcomes)
        rounds = [_Round()]
        earliest = 0  # the first round that is not before anything that may follow from one of them
        for n, (lease, outcome) in enumerate(outcomes):
            if not unique or (outcome is not DONE and outcome != DONE):
                rounds[-1].others.append(n)
                if lease.batch is not None or (isinstance(outcome, Done | Dead) and outcome.emit):
                    earliest = len(rounds)
                continue
            if lease.batch is None:
                if earliest == len(rounds) or rounds[earliest].members_of not in (None, lease.queue):
                    rounds.append(_Round())
                    earliest = len(rounds) - 1
                now = rounds[earliest]
            else:
                if rounds[-1].others or rounds[-1].members_of not in (None, lease.queue):
                    rounds.append(_Round())
                now = rounds[-1]
                now.members_of = lease.queue
                earliest = len(rounds) - 1
            now.groups.setdefault((lease.queue, lease.holder), []).append(n)
        return rounds

    def lost(self, numbers: Sequence[int]) -> list[int]:
        """Where in the bundle the leases stand that the script counted as these."""
        return sorted(self._order[number - 1] for number in numbers)


def outcome_fields(outcome: Outcome, job_id: str, shard_map: ShardMap | None = None) -> dict[str, object]:
    """An outcome as settle_one() in settling.lua takes it: what there is not is left out."""
    match outcome:
        case Done(emit=emit, opens=opens) | Dead(emit=emit, opens=opens):
            around = {batch.id: batch.parent for batch in opens if batch.parent is not None}
            fields = {**_fields(outcome), "emit": drafts(emit, shard_map, around=around) or None}
            fields["opens"] = [batch_draft(batch, shard_map) for batch in opens] or None
        case Retried(queue=str(queue)) if shard_map is not None:
            fields = {**_fields(outcome), "shard": shard_map.of_job(queue, job_id)}
        case _:
            fields = _fields(outcome)
    if isinstance(error := fields.get("error"), Error):
        fields["error"] = text(error)
    return {name: value for name, value in fields.items() if value is not None}


def _fields(outcome: Outcome) -> dict[str, object]:
    match outcome:
        case Done(result=result, keep=keep):
            return {
                "kind": "done",
                "keep": _us(keep),
                "result": None if result is None else lua_bytes(result),
            }
        case Retried(delay=delay, error=error, queue=queue):
            again = {"delay": _us(delay), "queue": queue}
            return {"kind": "retry", "error": error, "note": _noted(error), **again}
        case Dead(reason=reason, error=error, keep=keep):
            return {"kind": "dead", "reason": storable(reason), "error": error, "keep": _us(keep)}
        case Snoozed(delay=delay, asked=asked):
            return {"kind": "snooze", "delay": _us(delay), "asked": asked or None}
        case Released():
            return {"kind": "release"}
        case Cancelled(error=error):
            return {"kind": "cancelled", "error": error}
        case Broken(error=error):
            return {"kind": "broken", "error": error}
        case Crashed(blameless=True):
            return {"kind": "lost"}
        case Crashed(error=error):
            return {"kind": "crash", "error": error, "note": _noted(error)}
        case Unknown():
            return {"kind": "unknown"}


def _noted(error: Error | None) -> str:
    """What an event says of an error."""
    return storable(f"{error.type}: {error.message}"[:NOTE_MAX]) if error else ""


def note_fields(note: Note, shard_map: ShardMap | None = None) -> dict[str, object]:
    """A note as note.lua takes it: what there is not is left out."""
    fields: dict[str, object] = {
        "id": note.lease.id,
        "fence": str(note.lease.fence),
        "holder": note.lease.holder,
        "queue": note.lease.queue,
        "lines": [storable(line) for line in note.lines],
        "puts": drafts(note.puts, shard_map, claim=True),
    }
    if note.progress is not None:
        fields["progress"] = storable(text(note.progress))
    if note.began:
        fields["began"] = True
    if note.checkpoint is not None:
        fields["checkpoint"] = lua_bytes(note.checkpoint)
    return fields


def _us(span: timedelta | None) -> int | None:
    return None if span is None else span_us(span)


_tasks: dict[bytes, str] = {}


def leases_from(answer: Row, queues: Iterable[str], until: datetime, holder: str) -> list[Lease]:
    """The leases in an answer of exchange.lua; those of jobs that never ran have the time as their fence."""
    fence_text, _, per_queue, taken, known = answer
    first_run = (int(fence_text), 1, 0, 0, 0, None)
    counted = {number - 1: _further_run(text) for number, text in zip(known[::2], known[1::2], strict=True)}
    names = (queue for queue, n in zip(queues, per_queue[::3], strict=True) for _ in range(n))
    leases: list[Lease] = []
    put_before, put_at = b"", until
    alike, batch = _NOTHING_ALIKE, None
    for number, (queue, job_id, record) in enumerate(zip(names, taken[::2], taken[1::2], strict=True)):
        fence, attempt, failures, crashes, losses, checkpoint = counted.get(number, first_run)
        try:
            head, put, _, meta, body = record.split(b"\n", 4)
            if put != put_before:  # jobs of one put share it
                put_before, put_at = put, from_us(int(put))
            if head[0] in _ALONE:
                batch_id = None
            elif meta.startswith(alike):
                batch_id = batch
            else:
                batch_id = batch = _meta.decode(meta).batch
                alike = _alike(meta)
            task = _tasks.get(head) or _named(head)
        except _UNREADABLE:  # whatever comes of it, the script shelves such a job
            task, body, batch_id = BROKEN_TASK, record, None
        rest = (until, put_at, holder, losses, batch_id, checkpoint)
        leases.append(Lease(job_id.decode(), fence, task, queue, body, attempt, failures, crashes, *rest))
    return leases


def _further_run(text: bytes) -> tuple[int, int, int, int, int, bytes | None]:
    """Its fence, attempt, failures, crashes, losses and checkpoint."""
    counters, saved, checkpoint = text.partition(b"\n")
    fence, attempt, failures, crashes, losses = map(int, counters.split())
    return fence, attempt, failures, crashes, losses, checkpoint if saved else None


def _alike(meta: bytes) -> bytes:
    """What this and the metas of other members of its batch begin with: all but their numbers."""
    alike, is_member, _ = meta.rpartition(_NUMBER)
    return alike + is_member or _NOTHING_ALIKE


def _named(head: bytes) -> str:
    task = head[1:].decode()
    if len(_tasks) < MAX_NAMES:
        _tasks[head] = task
    return task


# --- what is shown -------------------------------------------------------------------


class Changed(Struct):
    """What has changed about a job since it was put.  Times may be text: Lua's numbers end in 2255."""

    queue: str | None = None
    due: str | None = None
    expires: str | None = None
    attempts: int = 0
    failures: int = 0
    losses: int = 0
    crashes: int = 0
    fence: int = 0
    parked: bool = False
    started: int | None = None
    cancel: bool = False
    state: str | None = None
    ended: int | None = None
    keep: int | None = None
    reason: str | None = None
    error: str | None = None
    progress: str | None = None
    began: int = 0  # the fence of the run that has begun
    log: list[str] = []
    history: list[tuple[int, str, int, int, str, str]] = []


_changed = msgspec.msgpack.Decoder(Changed)
_UNCHANGED = Changed()


def job_info_from(row: Row) -> JobInfo | None:
    """A row of job_infos.lua; None where there is no such job, or it cannot be read: a sweep shelves it."""
    if row[1] is None:
        return None
    try:
        return _job_info(row)
    except _UNREADABLE:
        return None


def _job_info(row: Row) -> JobInfo:
    job_id, record, state, run, ends, result, checkpoint = row
    head, put, _, meta_text, body = record.split(b"\n", 4)
    meta, now = _meta.decode(meta_text), _changed.decode(state) if state else _UNCHANGED
    fence, started, attempts, holder = _last_run(now) if run is None else _run(run)
    return JobInfo(
        id=job_id.decode(),
        task=head[1:].decode(),
        queue=now.queue or meta.queue,
        state=State(now.state) if now.state else State.READY if run is None else State.RUNNING,
        body=body,
        priority=meta.priority,
        put_at=(put_at := from_us(int(put))),
        due_at=_moment(now.due) or put_at,
        expires_at=_moment(now.expires),
        attempts=attempts,
        failures=now.failures,
        losses=now.losses,
        crashes=now.crashes,
        fence=fence,
        parked=now.parked and run is None,
        holder=holder,
        started_at=_moment(started),
        lease_until=_moment(ends),
        cancel_requested=now.cancel,
        ended_at=_moment(now.ended),
        keep_until=_moment(now.keep),
        reason=now.reason,
        error=None if now.error is None else _error.decode(now.error),
        result=result,
        unique=meta.unique,
        key=meta.key,
        batch=meta.batch,
        member=meta.member,
        progress=None if now.progress is None else _progress.decode(now.progress),
        checkpoint=checkpoint,
        began=run is not None and now.began == fence,
        log=tuple(now.log),
        history=_history(now),
    )


def _history(now: Changed) -> tuple[Event, ...]:
    return tuple(Event(from_us(event[0]), *event[1:]) for event in now.history)


def _run(value: bytes) -> tuple[int, int, int, str]:
    """The fence of a running job, when it began, its attempt and its holder."""
    fence, _, started, attempt, holder = value[1:].split(b"\n", 4)
    return int(fence), int(started), int(attempt.partition(b".")[0]), holder.decode()


def _last_run(now: Changed) -> tuple[int, int | None, int, None]:
    """The same of a job that does not run."""
    return now.fence, now.started, now.attempts, None


def _moment(us: int | str | bytes | None) -> datetime | None:
    return None if us is None else from_us(int(us))


def status_from(batch: bytes, fields: Sequence[bytes]) -> BatchStatus:
    """A row of batch_statuses.lua: each field stands after its name."""
    known = dict(zip(fields[::2], fields[1::2], strict=True))

    def number(name: bytes) -> int:
        text = known.get(name, b"")
        return int(text) if text.isdigit() else 0

    def time(name: bytes) -> datetime | None:
        return moment(number(name) or None)

    total, sealed = number(b"total"), b"sealed" in known
    counts = {"done": number(b"done"), "dead": number(b"dead"), "cancelled": number(b"cancelled")}
    opened = batch_as_opened(known.get(b"body"), batch.decode())
    return BatchStatus(
        id=batch.decode(),
        state=batch_state(sealed=sealed, total=total, **counts),
        sealed=sealed,
        total=total,
        enqueued=number(b"waiting"),
        retrying=number(b"retrying"),
        running=number(b"running"),
        **counts,
        created_at=time(b"created") or EPOCH,
        finished_at=time(b"finished"),
        keep_until=time(b"keep"),
        parent=opened.parent,
        note=opened.note,
    )


def readable(names: Iterable[bytes]) -> list[str]:
    """Those that are text: what a foreign hand has written, and is none, names nothing of ours (L7)."""
    texts = []
    for name in names:
        with suppress(UnicodeDecodeError):
            texts.append(name.decode())
    return texts


def member_from(row: Row) -> Member:
    """A row of members.lua; one of which the end cannot be read is dead."""
    number, name, ended, result, running = row
    job_id = name.decode(errors="replace")
    if ended is None:
        return Member(int(number), job_id, State.RUNNING if running else State.READY)
    state, newline, reason = ended.decode(errors="replace").partition("\n")
    try:
        return Member(int(number), job_id, State(state), result, reason if newline else None)
    except ValueError:
        return Member(int(number), job_id, State.DEAD, None, "broken")


def terms_of(rule: Rule) -> tuple[Argument, Argument, Argument]:
    """For how long a rule holds, or until when, and who set it and why, as `keep_terms` takes it."""
    lasts = "" if rule.lasts is None else span_us(rule.lasts)
    until = "" if rule.until is None else to_us(rule.until)
    return lasts, until, _json.encode([rule.by, rule.why])


def rate_text(rule: Rule) -> str:
    """As `keep_rate` takes it."""
    rate = rate_of(rule)
    return "" if rate is None else f"{rate.every_us} {rate.burst}"


def rule_from(field: bytes, n: bytes, terms: bytes, rate: bytes) -> Rule:
    """A row of rules.lua; what cannot be read of the terms, or of the rate, is left out."""
    kind, scope, name = field.decode().split(":", 2)
    rule = Rule(RuleKind(kind), Scope(scope), name, int(n))
    with suppress(ValueError, OverflowError, PropolisError):
        every, burst = map(int, rate.split())
        rule = replace(rule, every=timedelta(microseconds=every), burst=burst)
    with suppress(ValueError, OverflowError, PropolisError):
        at, until, words = terms.split(b"\n", 2)
        by, why = msgspec.json.decode(words, type=tuple[str, str])
        ends = from_us(int(until)) if until else None
        rule = replace(rule, by=by, why=why, at=from_us(int(at)), until=ends)
    return rule

"""What the Lua scripts are told, and what their answers mean: pure functions, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

from skep import wire
from skep.batch import Batch, BatchStatus, Member, batch_state
from skep.brokers.redis_homes import Homes
from skep.brokers.redis_script import Script
from skep.clock import from_us, span_us, to_us
from skep.errors import BrokenPayload
from skep.job import (
    MAX_CRASHES,
    Broken,
    Cancelled,
    Dead,
    Done,
    Error,
    Event,
    Job,
    Lease,
    Outcome,
    Progress,
    Record,
    Release,
    Retry,
    Snooze,
    State,
    UniqueUntil,
    describe,
    new_id,
    storable,
)
from skep.life import NOTE_MAX
from skep.schedule import Schedule, ScheduleRecord

Argument = bytes | str | int
Row = Sequence[Any]

BROKEN_TASK = "(broken)"  # of what was pushed and names none
MOST_NAMES = 10_000  # kept for the next time

_json = msgspec.json.Encoder()
_packer = msgspec.msgpack.Encoder()
_error = msgspec.json.Decoder(Error)
_progress = msgspec.json.Decoder(Progress)
_batch = msgspec.json.Decoder(Batch)
_schedule = msgspec.json.Decoder(Schedule)
_DONE = Done()
_PARTS = "-- with: "
_PLAIN, _MEMBER = ord("P"), ord("M")
_NUMBER = b',"member":'  # comes last in what is written of a member
_NOTHING_ALIKE = b"\n"  # with which no meta begins


def load_scripts() -> dict[str, Script]:
    """Every script in lua/ that says in its first line of which parts it is made."""
    texts = _texts()
    return {
        name: Script(name, "\n".join([*(texts[part] for part in _parts(whole)), whole]).encode())
        for name, whole in texts.items()
        if whole.startswith(_PARTS) and "spread" not in _parts(whole)
    }


def load_spread_scripts() -> dict[str, Script]:
    """The same where an app is spread over homes: each answers with what is to be sent on as well."""
    texts = _texts()
    scripts = {}
    for name, whole in texts.items():
        if whole.startswith(_PARTS):
            parts: list[str] = []
            for part in _parts(whole):
                added = {"base": "spread", "batches": "travelling"}.get(part)
                parts += [part] if added is None or added in _parts(whole) else [part, added]
            wrapped = ["local function verb()", whole, "end", texts["answering"]]
            text = "\n".join([*(texts[part] for part in parts), *wrapped])
            scripts[name] = Script(name, text.encode())
    return scripts


def _texts() -> dict[str, str]:
    folder = files("skep.brokers") / "lua"
    return {entry.name.removesuffix(".lua"): entry.read_text("utf-8") for entry in folder.iterdir()}


def _parts(script: str) -> list[str]:
    return script.partition("\n")[0].removeprefix(_PARTS).split()


def text(value: Any) -> str:
    return _json.encode(value).decode()


def packed(value: Any) -> bytes:
    return _packer.encode(value)


def _bytes(data: bytes) -> msgspec.Raw:
    """Bytes for `packed`: Lua knows only one kind of string, and its MessagePack only the older one."""
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)


# --- jobs that are put -------------------------------------------------------------------


class Meta(Struct, omit_defaults=True):
    """What a record says of a job besides its task and its body; Lua reads it."""

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
    unique_home: int | None = None
    batch_home: int | None = None


_meta = msgspec.json.Decoder(Meta)


def is_plain(job: Job) -> bool:
    """Whether it can be put without a draft: due now, remembered by nobody, alone."""
    return job.batch is None and _is_simple(job)


def are_plain_members(jobs: Sequence[Job], batch: str) -> bool:
    """Whether they are plain but for being members of this batch, and numbered one after the other."""
    numbers = range(jobs[0].member, jobs[0].member + len(jobs))
    return (
        [job.batch for job in jobs].count(batch) == len(jobs)
        and [job.member for job in jobs] == list(numbers)
        and all(map(_is_simple, jobs))
    )


def _is_simple(job: Job) -> bool:
    return not (
        job.delay_ms
        or job.chosen
        or job.due_at is not None
        or job.unique is not None
        or job.key is not None
        or job.expires_at is not None
        or job.expires_in_ms is not None
    )


class Kinds:
    """Plain jobs of one task, queue and priority are told together: see put_plain.lua and put_members.lua."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, int, int], tuple[Argument, ...]] = {}

    def arguments(self, jobs: Sequence[Job], batch: str | None = None) -> list[Argument]:
        """What read_call() in plain.lua takes."""
        numbers: dict[tuple[str, str, int, int], int] = {}
        last: tuple[str, str, int, int] | None = None
        kinds: list[Argument] = []
        runs: list[int] = []
        told: list[Argument] = []
        for job, body in zip(jobs, wire.encode_all(jobs), strict=True):
            kind = (job.task, job.queue, job.priority, job.max_crashes)
            if kind != last:
                if kind not in numbers:
                    numbers[kind] = len(numbers) + 1
                    kinds += self._told(kind) if batch is None else _told_of_members(kind, batch)
                runs += (numbers[kind], 0)
                last = kind
            runs[-1] += 1
            told += (job.id, body)
        return [len(numbers), *kinds, len(runs) // 2, *runs, *told]

    def _told(self, kind: tuple[str, str, int, int]) -> tuple[Argument, ...]:
        found = self._known.get(kind)
        if found is None:
            task, queue, priority, max_crashes = kind
            meta = _json.encode(Meta(queue, priority, max_crashes))
            found = (queue, priority, f"P{task}", meta)
            if len(self._known) < MOST_NAMES:
                self._known[kind] = found
        return found


def _told_of_members(kind: tuple[str, str, int, int], batch: str) -> tuple[Argument, ...]:
    task, queue, priority, max_crashes = kind
    return queue, priority, f"M{task}", _json.encode(Meta(queue, priority, max_crashes, batch=batch))


def drafts(
    jobs: Sequence[Job], homes: Homes | None = None, *, claim: bool = False
) -> list[dict[str, object]]:
    """Jobs that are put in one step.  With homes a producer must claim the ids that it chooses."""
    if homes is None:
        return list(map(draft, jobs, wire.encode_all(jobs)))
    ways = homes.ways(jobs, claim=claim)
    bodies = wire.encode_all(jobs)
    found = [draft(job, body, homes, ways) for job, body in zip(jobs, bodies, strict=True)]
    for job, facts in zip(jobs, found, strict=True):
        if claim and job.chosen:
            facts["id_home"] = homes.of(job.id)
    return found


def draft(
    job: Job, body: bytes, homes: Homes | None = None, ways: Mapping[str, Sequence[int]] | None = None
) -> dict[str, object]:
    """A job as add() in batches.lua takes it; with homes, as travel() in travelling.lua does."""
    unique_home = None if homes is None or job.unique is None else homes.of(job.unique)
    batch_home = None if homes is None or job.batch is None else homes.of(job.batch)
    meta = Meta(
        job.queue,
        job.priority,
        job.max_crashes,
        job.chosen,
        job.unique,
        job.unique is not None and job.unique_until is UniqueUntil.STARTED,
        job.key,
        job.batch,
        job.member,
        unique_home=unique_home,
        batch_home=batch_home,
    )
    expires = job.expires_at is not None or job.expires_in_ms is not None
    flag = "X" if job.chosen or job.unique is not None or job.batch is not None or expires else "P"
    facts: dict[str, object] = {
        "id": job.id,
        "head": f"{flag}{job.task}",
        "meta": _bytes(_json.encode(meta)),
        "body": _bytes(body),
        "queue": job.queue,
        "priority": job.priority,
    }
    if homes is not None:
        facts["home"] = homes.of_job(job.queue, job.id)
        facts["via"] = homes.way_of(job, ways or homes.ways([job]))
    if job.unique is not None:
        facts["unique"] = job.unique
        facts["unique_home"] = unique_home
    if job.batch is not None:
        facts["batch"] = job.batch
        facts["member"] = job.member
        facts["batch_home"] = batch_home
    if job.due_at is not None:
        facts["due"] = str(to_us(job.due_at))
    elif job.delay_ms:
        facts["delay"] = job.delay_ms * 1000
    if job.expires_at is not None:
        facts["expires"] = str(to_us(job.expires_at))
    if job.expires_in_ms is not None:
        facts["expires_in"] = job.expires_in_ms * 1000
    return facts


def batch_draft(batch: Batch, homes: Homes | None = None) -> dict[str, object]:
    calls = {
        "on_failed": batch.on_failed,
        "on_succeeded": batch.on_succeeded,
        "on_finished": batch.on_finished,
    }
    facts: dict[str, object] = {
        "id": batch.id,
        "body": text(batch),
        "calls": {
            when: draft(job, wire.encode(job), homes) for when, job in calls.items() if job is not None
        },
        "linger": batch.linger_ms * 1000,
        "open_for": batch.open_for_ms * 1000,
        "member": batch.member,
    }
    if batch.parent is not None:
        facts["parent"] = batch.parent
    if homes is not None:
        facts["home"] = homes.of(batch.id)
        if batch.parent is not None:
            facts["parent_home"] = homes.of(batch.parent)
    return facts


def taken_in(queue: str, pushed: bytes, homes: Homes | None = None) -> tuple[str | None, bytes]:
    """What a stranger pushed at the door of a queue, as take_in.lua takes it; and its id if it is a job.

    It is a job of this queue whatever it says itself, and gets an id if it has none.  What is no job at all
    goes to the broken shelf as it came.
    """
    try:
        job, body = _read(queue, pushed)
    except BrokenPayload as error:
        return None, packed(_shelved(queue, pushed, error))
    return job.id, packed({"job": draft(job, body, homes)})


def _read(queue: str, pushed: bytes) -> tuple[Job, bytes]:
    wire.check_limits(pushed)
    try:
        facts = msgspec.json.decode(pushed, type=dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return wire.decode(pushed), pushed  # it says better what is wrong
    if "id" in facts and (job := wire.decode(pushed)).queue == queue:
        return job, pushed
    facts["queue"] = msgspec.Raw(_json.encode(queue))
    facts.setdefault("id", msgspec.Raw(_json.encode(new_id())))
    body = _json.encode(facts)
    return wire.decode(body), body


def _shelved(queue: str, pushed: bytes, error: BrokenPayload) -> dict[str, object]:
    kept = Job(id=new_id(), task=BROKEN_TASK, queue=queue)
    return {"broken": draft(kept, pushed), "error": text(describe(error))}


# --- leases that end, leases that begin --------------------------------------------------


class _Round:
    """Outcomes that are settled after one another: the plainest by queue, then the others one by one."""

    def __init__(self) -> None:
        self.groups: dict[str, list[int]] = {}
        self.others: list[int] = []
        self.members_of: str | None = None  # the queue whose members are in it


class Settling:
    """A bundle of outcomes as exchange.lua takes it: the plainest ones by queue, the others one by one.

    What ends plainly and is no member of a batch may be moved: nothing follows from it.  But not before what
    another one emits, which may want its id or its unique key.  With a member a batch may end, and what
    follows from a call is put in the order of its outcomes.
    """

    def __init__(self, outcomes: Sequence[tuple[Lease, Outcome]], homes: Homes | None = None) -> None:
        self._leases = [lease for lease, _ in outcomes]
        self._order: list[int] = []
        rounds = self._rounds(outcomes)
        arguments: list[Argument] = [len(rounds)]
        for each in rounds:
            arguments.append(len(each.groups))
            for queue, numbers in each.groups.items():
                arguments += (queue, len(numbers))
                arguments += [self._leases[n].id for n in numbers]
                arguments += [self._leases[n].fence for n in numbers]
                self._order += numbers
            arguments.append(len(each.others))
            for n in each.others:
                lease, outcome = outcomes[n]
                arguments += (lease.id, lease.fence, packed(told(outcome, lease.id, homes)))
            self._order += each.others
        self.arguments = arguments

    def _rounds(self, outcomes: Sequence[tuple[Lease, Outcome]]) -> list[_Round]:
        # Where a lease is there twice their order counts, and nothing may be moved.
        unique = len({(lease.id, lease.fence) for lease in self._leases}) == len(outcomes)
        rounds = [_Round()]
        earliest = 0  # the first round that is not before anything emitted
        for n, (lease, outcome) in enumerate(outcomes):
            if not unique or outcome != _DONE:
                rounds[-1].others.append(n)
                if isinstance(outcome, Done | Dead) and outcome.emit:
                    earliest = len(rounds)
                continue
            if lease.batch is None:
                if earliest == len(rounds):
                    rounds.append(_Round())
                now = rounds[earliest]
            else:
                if rounds[-1].others or rounds[-1].members_of not in (None, lease.queue):
                    rounds.append(_Round())
                now = rounds[-1]
                now.members_of = lease.queue
            now.groups.setdefault(lease.queue, []).append(n)
        return rounds

    def lost(self, numbers: Sequence[int]) -> list[int]:
        """Where in the bundle the leases stand that the script counted as these."""
        return sorted(self._order[number - 1] for number in numbers)


def told(outcome: Outcome, job_id: str, homes: Homes | None = None) -> dict[str, object]:
    """An outcome as settle_one() in settling.lua takes it: what there is not is left out."""
    facts: dict[str, object]
    match outcome:
        case Done(result=result, keep=keep, emit=emit):
            emitted = drafts(emit, homes)
            result_bytes = None if result is None else _bytes(result)
            facts = {"kind": "done", "keep": _us(keep), "result": result_bytes, "emit": emitted or None}
        case Retry(delay=delay, error=error, queue=queue):
            note = storable(f"{error.type}: {error.message}"[:NOTE_MAX]) if error else ""
            facts = {"kind": "retry", "delay": _us(delay), "error": error, "queue": queue, "note": note}
            if homes is not None and queue is not None:
                facts["home"] = homes.of_job(queue, job_id)
        case Dead(reason=reason, error=error, keep=keep, emit=emit):
            emitted = drafts(emit, homes)
            facts = {"kind": "dead", "error": error, "keep": _us(keep), "emit": emitted or None}
            facts["reason"] = storable(reason)
        case Snooze(delay=delay):
            facts = {"kind": "snooze", "delay": _us(delay)}
        case Release():
            facts = {"kind": "release"}
        case Cancelled(error=error):
            facts = {"kind": "cancelled", "error": error}
        case Broken(error=error):
            facts = {"kind": "broken", "error": error}
    if facts.get("error") is not None:
        facts["error"] = text(facts["error"])
    return {name: fact for name, fact in facts.items() if fact is not None}


def _us(span: timedelta | None) -> int | None:
    return None if span is None else span_us(span)


_tasks: dict[bytes, str] = {}


def leases_from(answer: Row, queues: Iterable[str], until: datetime) -> list[Lease]:
    """The leases in an answer of exchange.lua, whose fences follow one another."""
    _, _, fence_text, per_queue, taken, known = answer
    fence = int(fence_text)
    counted = {
        number - 1: tuple(map(int, text.split()))
        for number, text in zip(known[::2], known[1::2], strict=True)
    }
    names = (queue for queue, n in zip(queues, per_queue[::3], strict=True) for _ in range(n))
    leases: list[Lease] = []
    put_before, put_at = b"", until
    alike, batch = _NOTHING_ALIKE, None
    for number, (queue, job_id, record) in enumerate(zip(names, taken[::2], taken[1::2], strict=True)):
        head, put, _, meta, body = record.split(b"\n", 4)
        if put != put_before:  # jobs of one put share it
            put_before, put_at = put, from_us(int(put))
        if head[0] == _PLAIN:
            batch_id = None
        elif meta.startswith(alike):
            batch_id = batch
        else:
            batch_id = batch = _meta.decode(meta).batch
            alike = _alike(meta)
        attempt, failures, crashes = counted.get(number, (1, 0, 0))
        leases.append(
            Lease(
                job_id.decode(),
                fence + number,
                _tasks.get(head) or _named(head),
                queue,
                body,
                attempt,
                failures,
                crashes,
                until,
                put_at,
                batch_id,
            )
        )
    return leases


def _alike(meta: bytes) -> bytes:
    """What this and the metas of other members of its batch begin with: all but their numbers."""
    alike, is_member, _ = meta.rpartition(_NUMBER)
    return alike + is_member or _NOTHING_ALIKE


def _named(head: bytes) -> str:
    task = head[1:].decode()
    if len(_tasks) < MOST_NAMES:
        _tasks[head] = task
    return task


# --- what is looked at -------------------------------------------------------------------


class Changed(Struct):
    """What has changed about a job since it was put.  Times may be text: Lua's numbers end in 2255."""

    queue: str | None = None
    due: str | None = None
    expires: str | None = None
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    fence: int = 0
    started: int | None = None
    cancel: bool = False
    state: str | None = None
    ended: int | None = None
    keep: int | None = None
    reason: str | None = None
    error: str | None = None
    progress: str | None = None
    log: list[str] = []
    history: list[tuple[int, str, int, int, str, str]] = []


_changed = msgspec.msgpack.Decoder(Changed)
_UNCHANGED = Changed()


def record_from(row: Row) -> Record | None:
    """A row of look.lua."""
    job_id, record, state, run, ends, result = row
    if record is None:
        return None
    head, put, _, meta_text, body = record.split(b"\n", 4)
    meta = _meta.decode(meta_text)
    now = _changed.decode(state) if state else _UNCHANGED
    put_us = int(put)
    attempts, fence, started, holder = now.attempts, now.fence, now.started, None
    if run is not None:
        fence, started, attempts, holder = _run(run)
    stands = State(now.state) if now.state else State.READY if run is None else State.RUNNING
    return Record(
        id=job_id.decode(),
        task=head[1:].decode(),
        queue=now.queue or meta.queue,
        state=stands,
        body=body,
        priority=meta.priority,
        put_at=from_us(put_us),
        due_at=from_us(put_us if now.due is None else int(now.due)),
        expires_at=None if now.expires is None else from_us(int(now.expires)),
        attempts=attempts,
        failures=now.failures,
        crashes=now.crashes,
        fence=fence,
        holder=holder,
        started_at=_moment(started),
        lease_until=None if ends is None else from_us(int(ends)),
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
        log=tuple(now.log),
        history=tuple(Event(from_us(event[0]), *event[1:]) for event in now.history),
    )


def _run(value: bytes) -> tuple[int, int, int, str]:
    fence, _, started, attempt, holder = value[1:].split(b"\n", 4)
    return int(fence), int(started), int(attempt.partition(b".")[0]), holder.decode()


def _moment(us: int | None) -> datetime | None:
    return None if us is None else from_us(us)


def status_from(batch: bytes, facts: Sequence[bytes]) -> BatchStatus:
    """The facts of batches_look.lua, each after its name."""
    known = dict(zip(facts[::2], facts[1::2], strict=True))

    def number(name: bytes) -> int:
        return int(known.get(name, 0))

    def moment(name: bytes) -> datetime | None:
        return from_us(int(known[name])) if name in known else None

    created = moment(b"created")
    assert created is not None
    total, sealed = number(b"total"), b"sealed" in known
    counts = {"done": number(b"done"), "dead": number(b"dead"), "cancelled": number(b"cancelled")}
    opened = _batch.decode(known[b"body"])
    return BatchStatus(
        id=batch.decode(),
        state=batch_state(sealed=sealed, total=total, **counts),
        sealed=sealed,
        total=total,
        enqueued=number(b"waiting"),
        retrying=number(b"retrying"),
        running=number(b"running"),
        **counts,
        created_at=created,
        finished_at=moment(b"finished"),
        keep_until=moment(b"keep"),
        parent=opened.parent,
        note=opened.note,
    )


def member_from(row: Row) -> Member:
    """A row of members.lua."""
    number, job_id, ended, result, running = row
    if ended is None:
        return Member(int(number), job_id.decode(), State.RUNNING if running else State.READY)
    state, newline, reason = ended.decode().partition("\n")
    return Member(int(number), job_id.decode(), State(state), result, reason if newline else None)


class Timer(Struct):
    """A schedule as it is kept."""

    body: str
    timing: str
    next: str
    last: str | None = None
    paused: bool = False


_timer = msgspec.msgpack.Decoder(Timer)


def schedule_from(kept: bytes) -> ScheduleRecord:
    timer = _timer.decode(kept)
    return ScheduleRecord(
        schedule=_schedule.decode(timer.body),
        next_at=from_us(int(timer.next)),
        last_at=None if timer.last is None else from_us(int(timer.last)),
        paused=timer.paused,
    )

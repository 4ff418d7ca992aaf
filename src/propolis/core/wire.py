"""The JSON envelope: a job as bytes that any language can write.

`encode` and `decode` are the only two doors.  Both check limits, and decoding checks them before a
parser sees the bytes, because a parser may crash on what is deep enough.  See docs/wire-format.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import MAXYEAR, MINYEAR, datetime
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import FieldInfo, fields, replace

from propolis.core.duration import LONGEST_MS
from propolis.core.envelope import MAX_CRASHES, Envelope
from propolis.core.strategy import MAX_TIMES, Repeat, RepeatBy
from propolis.errors import BadName, BadSetting, BrokenPayload, NewerVersion, PayloadTooLarge

VERSION = 1
HARD_LIMIT = 16 * 2**20


class PayloadLimits(Struct, frozen=True):
    """How much a payload may ask of a worker; `depth` is at least that of a job and its arguments, 2."""

    size: int = 256 * 2**10
    depth: int = 64
    keys: int = 10_000
    digits: int = 4_300


LIMITS = PayloadLimits()
_SHORT = min(LIMITS.size, LIMITS.keys, LIMITS.digits)  # in so many bytes there is nothing too large

PRIORITIES = range(-100, 101)
CRASHES_CEILING = 2**15 - 1  # two bytes, where an engine has a column for them
QUEUE_NAME = re.compile(r"[A-Za-z0-9_:-]{1,128}")
TASK_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]{1,200}")
JOB_ID = re.compile(r"[\x21-\x7e]{1,128}")
HEADER_NAME = re.compile(r"[\x21-\x7e]{0,128}")
MAX_HEADERS = 64
HEADER_MAX = 8192  # characters of a value, as many as a W3C baggage has
OWN_HEADERS = "propolis-"  # their values may be as long as a job
_FREE_TEXT_MAX = 512
_REASON_MAX = 500

_FIELDS = frozenset(field.encode_name for field in fields(Envelope)) - {"unknown"} | {"v"}
# Possessive, and content with a string that never ends: so each byte is looked at once.  With
# backtracking, 120 KB of escaped quotes took 48 s (test_a_scan_never_goes_back).
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}:]|\d++', re.DOTALL)
_DIGITS = b"0123456789"
_BRACKET, _BRACE = ord("["), ord("{")
_BACKSLASH = ord("\\")  # a number is found in half of the time that a string of one byte takes
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# What `check` asks of the fields beyond their types, in the words of JSON Schema.
_BOUNDS: dict[str, dict[str, str | int | dict[str, str]]] = {
    "id": {"pattern": f"^{JOB_ID.pattern}$"},
    "task": {"pattern": f"^{TASK_NAME.pattern}$"},
    "queue": {"pattern": f"^{QUEUE_NAME.pattern}$"},
    "priority": {"minimum": PRIORITIES[0], "maximum": PRIORITIES[-1]},
    "member": {"minimum": 0, "maximum": MAX_TIMES},
    "max_crashes": {"minimum": 1, "maximum": CRASHES_CEILING},
    "headers": {"maxProperties": MAX_HEADERS, "propertyNames": {"pattern": f"^{HEADER_NAME.pattern}$"}},
    **{name: {"minLength": 1, "maxLength": _FREE_TEXT_MAX} for name in ("unique", "key", "batch")},
}

_NO_KWARGS = Envelope(id="x", task="x").kwargs  # one for all jobs that have none

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Envelope)
_loose_decoder = msgspec.json.Decoder(dict[str, Raw])
_any_decoder = msgspec.json.Decoder()
_good_names: set[tuple[str, str, str | None]] = set()
MAX_NAMES = 10_000  # that are remembered as good


class Piece(list[Envelope]):
    """Jobs that were encoded when they were gathered, and need not be once more when they are put."""

    def __init__(self, jobs: Iterable[Envelope], bodies: list[bytes]) -> None:
        super().__init__(jobs)
        self.bodies = bodies


def encode_all(jobs: Sequence[Envelope]) -> list[bytes]:
    """As `encode` does each of them."""
    if isinstance(jobs, Piece):
        return jobs.bodies
    together = _encode_together(jobs) if len(jobs) > 1 else None
    return [encode(job) for job in jobs] if together is None else together


def _encode_together(jobs: Sequence[Envelope]) -> list[bytes] | None:
    """Ordinary jobs, in less time: what is asked of each is asked of all at once.  None for others."""
    try:
        if not _are_ordinary(jobs):
            return None
        bodies = list(map(_encoder.encode, jobs))
    except (IndexError, UnicodeEncodeError, TypeError):  # no arguments, or no text
        return None
    every = b"".join(bodies)
    within_limits = (
        max(map(len, bodies)) <= _SHORT
        and max([body.count(b"[") + body.count(b"{") for body in bodies]) <= LIMITS.depth
        and every.isascii()
        and _BACKSLASH not in every
    )
    return bodies if within_limits else None


def _are_ordinary(jobs: Sequence[Envelope]) -> bool:
    """Whether none of them needs `check`, as far as one sees at once."""
    ids, numbers = [job.id for job in jobs], [job.member for job in jobs]
    written = "".join(ids)
    return (
        all(map(_is_plain, jobs))
        and _good_names.issuperset([(job.queue, job.task, job.batch) for job in jobs])
        and (written.isascii() and written.isprintable() and " " not in written)
        and (all(ids) and max(map(len, ids)) <= 128)
        and (min(numbers) >= 0 and max(numbers) <= MAX_TIMES)
        and [job.kwargs for job in jobs].count(_NO_KWARGS) == len(jobs)
        and [memoryview(job.args)[0] for job in jobs].count(_BRACKET) == len(jobs)
    )


def encode(job: Envelope, limits: PayloadLimits = LIMITS) -> bytes:
    """The job as JSON, within the limits of `decode`.  Raises `BadSetting` or `BrokenPayload`."""
    check(job)
    try:
        body = _encoder.encode(job) if not job.unknown else _encode_with_unknown(job)
    except UnicodeEncodeError as error:
        raise BadSetting(f"job {job.id}: a lone surrogate cannot be stored: {error}") from error
    except TypeError as error:
        raise BadSetting(f"job {job.id}: {error}") from error
    check_limits(body, limits)
    return body


def decode(body: bytes, limits: PayloadLimits = LIMITS) -> Envelope:
    """The job in `body`.  Whatever is wrong with the bytes, the error is a `BrokenPayload`.

    Fields that this version does not know are kept in `unknown` and written back by `encode`.
    """
    check_limits(body, limits)
    try:
        job = _decoder.decode(body)
    except msgspec.ValidationError as error:
        job = _decode_with_unknown(body, error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken("not JSON", error) from error
    if job.unknown:  # a field of that name on the wire is not ours either
        job = _decode_with_unknown(body, msgspec.ValidationError("unknown"))
    try:
        check(job)
    except BadSetting as error:
        raise _broken("not a job", error) from error
    return job


def decode_args(value: Raw | bytes) -> Any:
    """The arguments of a job as plain JSON values, for whoever reads them without knowing the task."""
    try:
        return _any_decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _broken("the arguments are not JSON", error) from error


def check_limits(body: bytes, limits: PayloadLimits = LIMITS) -> None:
    """Refuse what is too much, by a scan that costs less than a microsecond for ordinary payloads.

    A body with fewer brackets than the allowed depth cannot be too deep, and so on: only
    the unusual ones are looked at token by token.
    """
    size = len(body)
    if size > limits.size or size > HARD_LIMIT:
        raise PayloadTooLarge("the size of the job in bytes", size, min(limits.size, HARD_LIMIT))
    if (
        (_is_nested(body) and body.count(b"[") + body.count(b"{") > limits.depth)
        or (size > limits.keys and body.count(b":") > limits.keys)
        or (size > limits.digits and has_long_number(body, limits.digits))
    ):
        _scan(body, limits)
    if not body.isascii():
        _check_text(body)
    if _BACKSLASH in body and _SURROGATE.search(body):
        decode_args(body)  # when encoding, nobody else reads the arguments


def _is_nested(body: bytes) -> bool:
    """Is there more than an object with an array in it?  Most jobs have no more, and to see that takes half
    the time of a count."""
    return body.find(b"{", 1) > 0 or body.find(b"[", body.find(b"[") + 1) > 0


def _check_text(body: bytes) -> None:
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise _broken("not UTF-8", error) from error


def has_long_number(body: bytes, most: int) -> bool:
    """Are there more than `most` digits in a row anywhere?

    They would cover a place that is divisible by one more than that: so only those places are looked at, and
    100 kB cost a few microseconds where a pattern over all of it took two milliseconds.
    """
    for at in range(most, len(body), most + 1):
        if body[at : at + 1].isdigit():
            before, after = body[at - most : at], body[at : at + most + 1]
            run = len(before) - len(before.rstrip(_DIGITS)) + len(after) - len(after.lstrip(_DIGITS))
            if run > most:
                return True
    return False


def check(job: Envelope) -> None:
    """Refuse a job that no engine should hold.

    Names go into keys, subjects and shells of many kinds, so their letters are limited.
    """
    names = (job.queue, job.task, job.batch)
    if names not in _good_names:
        _check_names(job)
        if len(_good_names) >= MAX_NAMES:
            _good_names.clear()
        _good_names.add(names)
    # As JOB_ID, in half of its time: of ASCII, what is printable and no space is \x21 to \x7e.
    job_id, kwargs = job.id, job.kwargs
    if not (0 < len(job_id) <= 128 and job_id.isascii() and job_id.isprintable() and " " not in job_id):
        raise BadName("job id", job_id, "1 to 128 visible ASCII characters, without spaces")
    if not _begins(job.args, _BRACKET) or not (kwargs is _NO_KWARGS or _begins(kwargs, _BRACE)):
        raise BadSetting(f"job {job.id}: args must be a JSON array, and kwargs a JSON object")
    if job.member and not 0 <= job.member <= MAX_TIMES:
        raise BadSetting(f"job {job.id}: member cannot be negative, nor above {MAX_TIMES:,}")
    if not _is_plain(job):
        _check_texts(job)
        _check_numbers(job)
        _check_moments(job)
        _check_strategies(job)
        _check_headers(job)


def _is_plain(job: Envelope) -> bool:
    """Most jobs have nothing special: one test of each field shows that, and only the others pay for more."""
    return (
        (job.unique is None and job.key is None and job.due_at is None and job.expires_at is None)
        and (job.on_success is None and job.on_error is None and job.on_timeout is None)
        and not (job.priority or job.delay_ms or job.expires_in_ms)
        and not (job.timeout_ms or job.result_ttl_ms or job.unknown or job.headers)
        and job.max_crashes == MAX_CRASHES
    )


def _begins(raw: Raw, bracket: int) -> bool:
    view = memoryview(raw)  # and not bytes(raw): those would be a copy
    return len(view) > 0 and view[0] == bracket


def _check_names(job: Envelope) -> None:
    check_queue(job.queue)
    check_task(job.task)
    if job.batch is not None:
        check_text("batch id", job.batch)


def _check_texts(job: Envelope) -> None:
    for what, text in (("unique key", job.unique), ("key", job.key)):
        if text is not None:
            check_text(what, text)


def check_text(what: str, text: str) -> None:
    if not text or len(text) > _FREE_TEXT_MAX or "\0" in text:
        raise BadName(what, text, f"1 to {_FREE_TEXT_MAX} characters, none of them NUL")


def _check_numbers(job: Envelope) -> None:
    if job.priority not in PRIORITIES:
        raise BadName("priority", job.priority, "from -100 to 100, the higher first")
    if not 1 <= job.max_crashes <= CRASHES_CEILING:
        raise BadSetting(
            f"job {job.id}: max_crashes={job.max_crashes}: give a number from 1 to {CRASHES_CEILING:,}"
        )
    if not (
        0 <= job.delay_ms <= LONGEST_MS
        and 0 <= (job.expires_in_ms or 0) <= LONGEST_MS
        and 0 <= (job.timeout_ms or 0) <= LONGEST_MS
        and 0 <= (job.result_ttl_ms or 0) <= LONGEST_MS
    ):
        raise BadSetting(
            f"job {job.id}: delay_ms, expires_in_ms, timeout_ms and result_ttl_ms are milliseconds, "
            f"from 0 to 100 years"
        )


def _check_moments(job: Envelope) -> None:
    for moment in (job.due_at, job.expires_at):
        if moment is not None:
            check_moment(f"job {job.id}", moment)


def check_moment(what: str, moment: datetime) -> None:
    """`BadSetting` for a time that could be stored, and not be read back."""
    if moment.tzinfo is None:
        raise BadSetting(f"{what}: {moment} has no time zone: give an aware datetime")
    if not MINYEAR < moment.year < MAXYEAR:  # so that it exists in every time zone
        raise BadSetting(f"{what}: {moment} is too far away")


def _check_strategies(job: Envelope) -> None:
    for strategy in (job.on_success, job.on_error, job.on_timeout):
        if isinstance(strategy, RepeatBy):
            raise BadSetting(f"job {job.id}: a delay that is a function belongs to a task, not to a job")
        if isinstance(strategy, Repeat) and strategy.queue is not None:
            check_queue(strategy.queue)


def _check_headers(job: Envelope) -> None:
    if len(job.headers) > MAX_HEADERS:
        raise BadSetting(f"job {job.id}: {len(job.headers):,} headers: {MAX_HEADERS} are the most")
    for name, value in job.headers.items():
        _match(HEADER_NAME, "header", name, "at most 128 visible ASCII characters, without spaces")
        if len(value) > HEADER_MAX and not name.startswith(OWN_HEADERS):
            raise BadSetting(
                f"job {job.id}: the header {name} has {len(value):,} characters: {HEADER_MAX:,} are the most"
            )


def schema() -> dict[str, Any]:
    """The JSON Schema of the envelope, generated from the types and from what `check` adds to them."""
    listed = [field for field in fields(Envelope) if field.name not in ("args", "kwargs", "unknown")]
    shape = msgspec.defstruct(
        "Job",
        [
            (f.name, f.type) if f.required else (f.name, f.type, msgspec.field(default=_default(f)))
            for f in listed
        ],
        kw_only=True,
        tag=VERSION,
        tag_field="v",
    )
    described = msgspec.json.schema(shape)
    definition = described["$defs"]["Job"]
    definition["required"] = ["id", "task"]
    definition["additionalProperties"] = True
    definition["properties"] |= {
        "args": {"type": "array", "default": []},
        "kwargs": {"type": "object", "default": {}},
    }
    for name, bounds in _BOUNDS.items():
        definition["properties"][name] |= bounds
    for part in described["$defs"].values():
        if "description" in part:  # a docstring: without its line breaks and indentation
            part["description"] = " ".join(part["description"].split())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A propolis job", **described}


def _default(field: FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def check_utf8(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSetting(f"{what} has a lone surrogate, which cannot be stored: {error}") from error


def check_queue(name: str) -> None:
    _match(QUEUE_NAME, "queue", name, "letters, digits, '_', '-' and ':', at most 128 of them")


def check_task(name: str) -> None:
    _match(TASK_NAME, "task", name, "1 to 200 characters, no white space, no control characters")


def _match(pattern: re.Pattern[str], what: str, name: str, rule: str) -> None:
    if not pattern.fullmatch(name):
        raise BadName(what, name, rule)


def _broken(what: str, error: Exception) -> BrokenPayload:
    """The reason, cut: a parser's message may quote the payload, and a payload is a stranger's."""
    return BrokenPayload(f"{what}: {error}"[:_REASON_MAX])


def _scan(body: bytes, limits: PayloadLimits) -> None:
    depth = keys = 0
    for mark in _MARK.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            if depth > limits.depth:
                raise PayloadTooLarge("the depth of the job", depth, limits.depth)
        elif first in b"]}":
            depth -= 1
        elif first == ord(":"):
            keys += 1
            if keys > limits.keys:
                raise PayloadTooLarge("the number of keys in the job", keys, limits.keys)
        elif first != ord('"') and mark.end() - mark.start() > limits.digits:
            raise PayloadTooLarge(
                "the number of digits of an integer", mark.end() - mark.start(), limits.digits
            )


def _encode_with_unknown(job: Envelope) -> bytes:
    clash = job.unknown.keys() & _FIELDS
    if clash:
        raise BadSetting(f"job {job.id}: {', '.join(sorted(clash))} cannot be among the unknown fields")
    known: dict[str, Any] = _loose_decoder.decode(_encoder.encode(replace(job, unknown={})))
    return _encoder.encode({**job.unknown, **known})


def _decode_with_unknown(body: bytes, error: msgspec.ValidationError) -> Envelope:
    """The slow path: set the fields that we do not know aside, and decode the rest again."""
    try:
        every = _loose_decoder.decode(body)
    except msgspec.MsgspecError as not_an_object:
        raise _broken("not a job", not_an_object) from not_an_object
    unknown = {name: value for name, value in every.items() if name not in _FIELDS}
    if "v" in every:
        _check_version(every["v"])
    if not unknown:
        raise _broken("not a job", error) from error
    try:
        job = _decoder.decode(
            _encoder.encode({name: raw for name, raw in every.items() if name not in unknown})
        )
    except msgspec.MsgspecError as still_wrong:
        raise _broken("not a job", still_wrong) from still_wrong
    return replace(job, unknown={name: raw.copy() for name, raw in unknown.items()})


def _check_version(raw: Raw) -> None:
    """A newer format may have changed any field, so its version is the first thing to check."""
    version = decode_args(raw)
    if not isinstance(version, int) or version < 1:
        raise BrokenPayload("not a job: its version must be a whole number, from 1")
    if version > VERSION:
        raise NewerVersion(version, VERSION)

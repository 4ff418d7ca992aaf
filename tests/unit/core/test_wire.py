"""The envelope: what `encode` writes, `decode` reads; what is no job is a `BrokenPayload`."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from propolis.core import wire
from propolis.core.duration import LONGEST_MS
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.strategy import (
    Archive,
    Bury,
    Delete,
    Exponential,
    Fixed,
    Repeat,
    dead,
    exponential,
    repeat,
)
from propolis.core.wire import PayloadLimits, decode, decode_args, encode
from propolis.errors import BadName, BadSetting, BrokenPayload, NewerVersion, PayloadTooLarge, PropolisError

ROOT = Path(__file__).resolve().parents[3]
LEAST: dict[str, Any] = {"id": "a", "task": "mail.send"}
SCHEMA = wire.schema()


def body(**fields: Any) -> bytes:
    return json.dumps(LEAST | fields).encode()


def raw(value: object) -> Raw:
    return Raw(msgspec.json.encode(value))


def a_job(**fields: Any) -> Envelope:
    return Envelope(**(LEAST | fields))


# --- what travels ------------------------------------------------------------------------


def test_the_least_job_is_an_id_and_a_task() -> None:
    assert decode(b'{"id":"a","task":"mail.send"}') == a_job()


def test_what_is_written_names_its_version_and_leaves_out_defaults() -> None:
    assert encode(a_job()) == b'{"v":1,"id":"a","task":"mail.send"}'


def test_a_field_reads_as_documented() -> None:
    job = decode(
        body(
            v=1,
            queue="mail",
            args=[1, "two"],
            kwargs={"three": 3},
            priority=-5,
            delay_ms=1500,
            due_at="2026-01-01T01:00:00+01:00",
            expires_in_ms=60_000,
            expires_at="2026-01-02T00:00:00Z",
            timeout_ms=30_000,
            chosen=True,
            unique="report-7",
            unique_until="started",
            key="customer-7",
            batch="b",
            member=2,
            max_crashes=5,
            result_ttl_ms=1000,
            on_success={"do": "archive", "keep_ms": 1000},
            on_error={"do": "repeat", "times": 2, "backoff": {"kind": "exponential", "first_ms": 2000}},
            on_timeout={"do": "dead"},
            headers={"trace": "1"},
        )
    )
    assert job == a_job(
        queue="mail",
        args=job.args,
        kwargs=job.kwargs,
        priority=-5,
        delay_ms=1500,
        due_at=datetime(2026, 1, 1, tzinfo=UTC),
        expires_in_ms=60_000,
        expires_at=datetime(2026, 1, 2, tzinfo=UTC),
        timeout_ms=30_000,
        chosen=True,
        unique="report-7",
        unique_until=UniqueUntil.STARTED,
        key="customer-7",
        batch="b",
        member=2,
        max_crashes=5,
        result_ttl_ms=1000,
        on_success=Archive(keep_ms=1000),
        on_error=repeat(2, exponential("2s")),
        on_timeout=dead,
        headers={"trace": "1"},
    )
    assert (decode_args(job.args), decode_args(job.kwargs)) == ([1, "two"], {"three": 3})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.from_regex(wire.QUEUE_NAME, fullmatch=True)
SPANS = st.integers(0, LONGEST_MS)
FREE_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=50)
MOMENTS = st.datetimes(
    datetime(2, 1, 2),  # noqa: DTZ001 - hypothesis adds the zone
    datetime(9998, 12, 30),  # noqa: DTZ001
    timezones=st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
ENDINGS = st.sampled_from([Delete(), Bury()]) | st.builds(Archive, keep_ms=SPANS)
BACKOFFS = st.builds(Fixed, delay_ms=SPANS) | st.builds(
    Exponential, first_ms=SPANS, factor=st.floats(1, 100), cap_ms=SPANS, jitter=st.floats(0, 1)
)
STRATEGIES = ENDINGS | st.builds(
    Repeat,
    times=st.none() | st.integers(0, 2**31 - 1),
    backoff=BACKOFFS,
    ending=ENDINGS,
    queue=st.none() | NAMES,
)
STRANGERS = st.dictionaries(
    st.text().filter(lambda name: name not in wire._FIELDS), JSON.map(raw), max_size=3
)
HEADER_NAMES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=128)
JOBS = st.builds(
    Envelope,
    id=st.from_regex(wire.JOB_ID, fullmatch=True),
    task=st.from_regex(wire.TASK_NAME, fullmatch=True),
    queue=NAMES,
    args=st.lists(JSON, max_size=4).map(raw),
    kwargs=st.dictionaries(st.text(), JSON, max_size=4).map(raw),
    priority=st.sampled_from(wire.PRIORITIES),
    delay_ms=SPANS,
    due_at=st.none() | MOMENTS,
    expires_in_ms=st.none() | SPANS,
    expires_at=st.none() | MOMENTS,
    timeout_ms=st.none() | SPANS,
    chosen=st.booleans(),
    unique=st.none() | FREE_TEXT,
    unique_until=st.sampled_from(UniqueUntil),
    key=st.none() | FREE_TEXT,
    batch=st.none() | FREE_TEXT,
    member=st.integers(0, 2**31 - 1),
    max_crashes=st.integers(1, 2**15 - 1),
    result_ttl_ms=st.none() | SPANS,
    on_success=st.none() | STRATEGIES,
    on_error=st.none() | STRATEGIES,
    on_timeout=st.none() | STRATEGIES,
    headers=st.dictionaries(HEADER_NAMES, st.text(), max_size=3),
    unknown=STRANGERS,
)


@given(JOBS)
def test_every_job_survives_the_way_there_and_back(job: Envelope) -> None:
    again = decode(encode(job))
    assert again == job
    assert encode(again) == encode(job)


@given(st.lists(JSON), st.dictionaries(st.text(), JSON))
def test_arguments_of_every_shape_survive(args: list[Any], kwargs: dict[str, Any]) -> None:
    again = decode(encode(a_job(args=raw(args), kwargs=raw(kwargs))))
    assert (decode_args(again.args), decode_args(again.kwargs)) == (args, kwargs)


# --- what this version does not know -----------------------------------------------------


@pytest.mark.parametrize(
    "strangers",
    [
        {"colour": "red"},
        {"colour": {"deep": [1, None, {"er": "é"}]}, "size": 1.5},
        {"unknown": {"a": 1}},
        {"unknown": {}},
        {"unknown": 5, "also": True},
        {"unknown": None},
        {"": ""},
        {"Queue": "mail", "queue ": 1},
    ],
    ids=repr,
)
def test_unknown_fields_are_kept_through_decode_and_encode(strangers: dict[str, Any]) -> None:
    given = body(queue="mail", **strangers)
    job = decode(given)
    assert {name: decode_args(value) for name, value in job.unknown.items()} == strangers
    assert json.loads(encode(job)) == {"v": 1, **json.loads(given)}
    assert decode(encode(job)) == job


def test_unknown_fields_stay_when_a_known_one_is_changed() -> None:
    job = decode(body(colour="red"))
    assert json.loads(encode(replace(job, queue="mail")))["colour"] == "red"


def test_an_unknown_field_does_not_hide_what_is_wrong_with_the_rest() -> None:
    with pytest.raises(BrokenPayload, match="priority"):
        decode(body(colour="red", priority="high"))
    with pytest.raises(BrokenPayload, match="task"):
        decode(b'{"id":"a","colour":"red"}')


def test_a_known_field_cannot_be_smuggled_in_among_the_unknown() -> None:
    with pytest.raises(BadSetting, match="queue"):
        encode(a_job(unknown={"queue": Raw(b'"else"')}))


# --- versions ----------------------------------------------------------------------------


def test_a_missing_version_is_the_first() -> None:
    assert decode(body()) == decode(body(v=1))


@pytest.mark.parametrize("fields", [{}, {"colour": "red"}, {"args": 5}, {"id": 7}])
def test_a_newer_version_is_told_before_anything_else(fields: dict[str, Any]) -> None:
    with pytest.raises(NewerVersion, match="upgrade the worker") as caught:
        decode(body(v=2, **fields))
    assert (caught.value.version, caught.value.known) == (2, 1)


@pytest.mark.parametrize("version", [0, -1, 1.0, 1.5, "1", None, True, False, [], {}, "x" * 100_000])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    for fields in ({}, {"colour": "red"}):
        with pytest.raises(BrokenPayload) as caught:
            decode(body(v=version, **fields))
        assert not isinstance(caught.value, NewerVersion)
        assert len(str(caught.value)) < 600


# --- what is no job ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b" ",
        b"\0",
        b"job",
        b"null",
        b"1",
        b'"a"',
        b"[]",
        b"{}",
        b"{",
        b'{"id":"a","task":"t"',
        b'{"id":"a","task":"t"}}',
        b'{"id":"a","task":"t"} {}',
        b"{'id':'a','task':'t'}",
        b'{"id":"a","task":"t",}',
        b'{"id":"a"}',
        b'{"task":"t"}',
        b"\xef\xbb\xbf" + body(),
        body().decode().encode("utf-16"),
        b'{"id":"a","task":"\xff"}',
        b'{"id":"a","task":"t","args":["\xed\xa0\x80"]}',
        b'{"id":"a","task":"t","colour":"\xc3"}',
    ],
)
def test_what_is_no_json_object_with_id_and_task_is_broken(payload: bytes) -> None:
    with pytest.raises(BrokenPayload):
        decode(payload)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": 7},
        {"id": None},
        {"task": []},
        {"queue": None},
        {"args": {}},
        {"args": 5},
        {"args": None},
        {"args": "[]"},
        {"kwargs": []},
        {"kwargs": None},
        {"priority": "high"},
        {"priority": 1.5},
        {"priority": True},
        {"delay_ms": "5m"},
        {"delay_ms": 1.5},
        {"due_at": 5},
        {"due_at": "tomorrow"},
        {"due_at": "2026-01-01T00:00:00"},
        {"due_at": "2026-13-01T00:00:00Z"},
        {"unique_until": "whenever"},
        {"chosen": 1},
        {"headers": []},
        {"headers": {"a": 1}},
        {"on_error": "repeat"},
        {"on_error": {"do": "import", "what": "os"}},
        {"on_error": {"times": 3}},
    ],
    ids=repr,
)
def test_a_field_of_the_wrong_shape_is_broken(fields: dict[str, Any]) -> None:
    with pytest.raises(BrokenPayload, match="not a job"):
        decode(body(**fields))


# Both ways in, decoding and encoding, refuse the same values.
WRONG: list[dict[str, Any]] = [
    {"id": ""},
    {"id": "a b"},
    {"id": "é"},
    {"id": "a\n"},
    {"id": "x" * 129},
    {"task": ""},
    {"task": "a b"},
    {"task": "a\n"},
    {"task": "a\0"},
    {"task": "a\u00a0b"},
    {"task": "a\u2028b"},
    {"task": "a\x85b"},
    {"task": "x" * 201},
    {"queue": ""},
    {"queue": "a b"},
    {"queue": "a.b"},
    {"queue": "*"},
    {"queue": ">"},
    {"queue": "{a}"},
    {"queue": "a/b"},
    {"queue": "a\n"},
    {"queue": "é"},
    {"queue": "'; drop table job"},
    {"queue": "x" * 129},
    {"unique": ""},
    {"unique": "a\0"},
    {"unique": "x" * 513},
    {"key": ""},
    {"key": "\0"},
    {"batch": ""},
    {"batch": "x" * 513},
    {"priority": 101},
    {"priority": -101},
    {"priority": 10**100},
    {"delay_ms": -1},
    {"delay_ms": LONGEST_MS + 1},
    {"delay_ms": 10**100},
    {"expires_in_ms": -1},
    {"expires_in_ms": 2**63},
    {"timeout_ms": -1},
    {"timeout_ms": 2**64},
    {"result_ttl_ms": -1},
    {"result_ttl_ms": LONGEST_MS + 1},
    {"member": -1},
    {"member": 2**31},
    {"max_crashes": 0},
    {"max_crashes": 2**15},
]


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: repr(fields)[:40])
def test_a_value_that_no_engine_should_hold_is_refused_on_both_sides(fields: dict[str, Any]) -> None:
    with pytest.raises(BrokenPayload):
        decode(body(**fields))
    with pytest.raises(BadSetting):
        encode(a_job(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "x" * 128},
        {"id": "!~"},
        {"task": "x" * 200},
        {"task": "os.system"},
        {"task": "mail:send/é🐝"},
        {"queue": "x" * 128},
        {"queue": "Mail_2:high-"},
        {"unique": "x" * 512},
        {"key": "any text, with 'quotes' & \n lines"},
        {"priority": 100},
        {"priority": -100},
        {"delay_ms": LONGEST_MS},
        {"member": 2**31 - 1},
        {"max_crashes": 1},
        {"headers": {"": ""}},
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_a_value_at_its_limit_is_accepted_on_both_sides(fields: dict[str, Any]) -> None:
    assert decode(body(**fields)) == decode(encode(a_job(**fields))) == a_job(**fields)


def test_a_moment_without_a_zone_or_too_far_away_is_refused() -> None:
    for field in ("due_at", "expires_at"):
        with pytest.raises(BadSetting, match="no time zone"):
            encode(a_job(**{field: datetime(2026, 1, 1)}))  # noqa: DTZ001 - what is being refused
        for far in ("9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00"):
            with pytest.raises(BrokenPayload, match="too far away"):
                decode(body(**{field: far}))
            with pytest.raises(BadSetting, match="too far away"):
                encode(a_job(**{field: datetime.fromisoformat(far)}))


@pytest.mark.parametrize("field", ["on_success", "on_error", "on_timeout"])
def test_a_strategy_cannot_name_a_queue_that_a_job_could_not(field: str) -> None:
    with pytest.raises(BrokenPayload, match="queue"):
        decode(body(**{field: {"do": "repeat", "queue": "*"}}))
    with pytest.raises(BadName):
        encode(a_job(**{field: repeat(1).on("*")}))


def test_a_function_cannot_be_stored_in_a_job() -> None:
    with pytest.raises(BadSetting, match="belongs to a task"):
        encode(a_job(on_error=repeat(3, lambda number: number)))


@pytest.mark.parametrize("fields", [{"unique": "\ud800"}, {"task": "\udfff"}, {"headers": {"a": "\ud800"}}])
def test_a_lone_surrogate_cannot_be_encoded(fields: dict[str, Any]) -> None:
    with pytest.raises(BadSetting, match="lone surrogate"):
        encode(a_job(**fields))


def test_a_lone_surrogate_that_is_escaped_in_the_arguments_cannot_be_encoded_either() -> None:
    with pytest.raises(BrokenPayload):
        encode(a_job(args=Raw(b'["\\ud800"]')))
    assert decode_args(decode(encode(a_job(args=Raw(b'["\\ud83d\\udc1d"]')))).args) == ["🐝"]
    assert decode_args(decode(encode(a_job(args=Raw(b'["\\\\ud800"]')))).args) == ["\\ud800"]


@pytest.mark.parametrize("args", [b"", b"5", b"null", b"{}", b"]"])
def test_arguments_that_are_no_array_cannot_be_encoded(args: bytes) -> None:
    with pytest.raises(BadSetting, match="args must be a JSON array"):
        encode(a_job(args=Raw(args)))


# --- limits ------------------------------------------------------------------------------


def test_both_sides_keep_the_same_limits() -> None:
    limits = PayloadLimits(size=100, depth=4, keys=5, digits=10)
    good = body(args=[[1]])
    assert encode(decode(good, limits), limits)
    for job, what in [
        (a_job(args=raw(["x" * 100])), "size"),
        (a_job(args=raw([[[[]]]])), "depth"),
        (a_job(args=raw([{"a": 1, "b": 1, "c": 1}])), "keys"),
        (a_job(args=Raw(b"[12345678901]")), "digits"),
    ]:
        with pytest.raises(PayloadTooLarge, match=what):
            encode(job, limits)
        with pytest.raises(PayloadTooLarge, match=what):
            decode(encode(job), limits)


def test_a_limit_is_what_is_still_allowed() -> None:
    fill = wire.LIMITS.size - len(encode(a_job(args=raw([""]))))
    decode(encode(a_job(args=raw(["x" * fill]))))
    with pytest.raises(PayloadTooLarge) as caught:
        encode(a_job(args=raw(["x" * (fill + 1)])))
    assert (caught.value.size, caught.value.limit) == (wire.LIMITS.size + 1, wire.LIMITS.size)

    decode(body(args=json.loads("[" * 63 + "]" * 63)))
    with pytest.raises(PayloadTooLarge, match="depth"):
        decode(body(args=json.loads("[" * 64 + "]" * 64)))

    decode(body(kwargs={str(n): n for n in range(9_997)}))
    with pytest.raises(PayloadTooLarge, match="keys"):
        decode(body(kwargs={str(n): n for n in range(9_998)}))

    decode(b'{"id":"a","task":"t","args":[' + b"9" * 4300 + b"]}")
    with pytest.raises(PayloadTooLarge, match="digits"):
        decode(b'{"id":"a","task":"t","args":[' + b"9" * 4301 + b"]}")


def test_a_larger_limit_never_passes_the_hard_one() -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        decode(bytes(wire.HARD_LIMIT + 1), PayloadLimits(size=2**40))
    assert caught.value.limit == wire.HARD_LIMIT


@given(st.lists(st.sampled_from([b"x", b"7", b"12", b"345678"])).map(b"".join), st.integers(1, 8))
def test_a_long_number_is_found_wherever_it_stands(text: bytes, most: int) -> None:
    longest = max(map(len, re.findall(rb"\d+", text)), default=0)
    assert wire.has_long_number(text, most) == (longest > most)


def test_brackets_colons_and_digits_inside_strings_are_only_text() -> None:
    text = '[{"' * 5000 + ":" * 20_000 + "7" * 5000 + "\\"
    assert decode_args(decode(body(args=[text])).args) == [text]


ODD: dict[str, dict[str, Any]] = {
    "a queue with a space": {"queue": "a b"},
    "an unknown queue": {"queue": "never-seen-before"},
    "an id with a space": {"id": "a b"},
    "no id": {"id": ""},
    "a long id": {"id": "x" * 129},
    "an id with an accent": {"id": "\u00e9"},
    "a negative number": {"member": -1},
    "a large number": {"member": 2**31},
    "arguments that are no list": {"args": Raw(b'{"a":1}')},
    "no arguments at all": {"args": Raw(b"")},
    "keywords": {"kwargs": Raw(b'{"a":1}')},
    "keywords that are no object": {"kwargs": Raw(b"[1]")},
    "a backslash": {"args": Raw(b'["\\u00e9"]')},
    "a lone surrogate": {"args": Raw(b'["\\ud800"]')},
    "an accent": {"args": Raw('["\u00e9"]'.encode())},
    "no UTF-8": {"args": Raw(b'["\xff"]')},
    "much depth": {"args": Raw(b"[" * 100 + b"]" * 100)},
    "much text": {"args": Raw(b'["' + b"x" * 5000 + b'"]')},
    "too much text": {"args": Raw(b'["' + b"x" * 300_000 + b'"]')},
    "a long number": {"args": Raw(b"[" + b"7" * 4400 + b"]")},
    "a priority": {"priority": 5},
    "too high a priority": {"priority": 101},
    "a delay": {"delay_ms": 5},
    "a unique key": {"unique": "k"},
    "an unknown field": {"unknown": {"colour": Raw(b'"red"')}},
    "a batch": {"batch": "b", "member": 7},
    "an empty batch": {"batch": ""},
}


def encoded(encode: Callable[[], list[bytes]]) -> tuple[str, list[bytes]]:
    try:
        return "", encode()
    except PropolisError as error:
        return f"{type(error).__name__}: {error}", []


@pytest.mark.parametrize("odd", ODD)
def test_many_are_encoded_as_each_of_them_would_be(odd: str) -> None:
    plain = [a_job(id=f"job-{n}", args=raw([n])) for n in range(5)]
    jobs = [*plain[:3], replace(plain[3], **ODD[odd]), plain[4]]
    one_by_one = encoded(lambda: [encode(job) for job in jobs])
    assert encoded(lambda: wire.encode_all(jobs)) == one_by_one
    assert encoded(lambda: wire.encode_all(jobs)) == one_by_one  # also where the names are known by now


def test_the_memory_of_good_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_good_names", {("q", "t", str(n)) for n in range(10_000)})
    assert decode(encode(a_job(queue="one-more"))).queue == "one-more"
    assert len(wire._good_names) <= 10_000
    with pytest.raises(BadName):  # also where the other names are known
        encode(a_job(queue="one-more", batch=""))


# --- arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args", [b"", b"[", b"[NaN]", b"[Infinity]", b"[1e999]", b'["\\ud800"]', b"[" * 10**6]
)
def test_arguments_that_cannot_be_read_are_broken(args: bytes) -> None:
    with pytest.raises(BrokenPayload, match="the arguments are not JSON"):
        decode_args(args)


def test_a_duplicate_key_counts_as_its_last() -> None:
    job = decode(b'{"id":"a","id":"b","task":"t","kwargs":{"x":1,"x":2},"kwargs":{"x":3,"x":4}}')
    assert job.id == "b"
    assert decode_args(job.kwargs) == {"x": 4}
    assert decode(b'{"id":"a","task":"t","c":1,"c":2}').unknown == {"c": Raw(b"2")}


# --- headers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {f"h{n}": "" for n in range(65)},
        {"two words": ""},
        {"two\nlines": ""},
        {"n" * 129: ""},
        {"long": "x" * 8193},
    ],
    ids=["many", "space", "newline", "long name", "long value"],
)
def test_headers_are_bounded_where_jobs_are_put_and_where_they_are_read(headers: dict[str, str]) -> None:
    """S03."""
    with pytest.raises(BadSetting, match="header"):
        encode(Envelope(id="a", task="t", headers=headers))
    with pytest.raises(BadSetting, match="header"):  # as many at once
        wire.encode_all([Envelope(id=f"{n}", task="t", headers=headers) for n in range(3)])
    with pytest.raises(BrokenPayload, match="header"):
        decode(json.dumps(LEAST | {"headers": headers}).encode())


def test_headers_may_be_as_large_as_that() -> None:
    """S03: those of our own as large as a job."""
    most = {f"{n:0128}": "é" * 200 for n in range(62)} | {"long": "x" * 8192, "propolis-flow": "x" * 99_999}
    assert decode(encode(Envelope(id="a", task="t", headers=most))).headers == most


# --- the schema --------------------------------------------------------------------------


def test_the_committed_schema_is_the_generated_one() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "write_schema.py"))
    assert (ROOT / "docs" / "job.schema.json").read_text(encoding="utf-8") == tool["text"](), (
        "run `python tools/write_schema.py`"
    )


def test_the_schema_describes_every_field_and_no_other() -> None:
    described = SCHEMA["$defs"]["Job"]
    assert described["properties"].keys() == wire._FIELDS
    assert described["required"] == ["id", "task"]
    assert described["additionalProperties"] is True


def conforms(value: Any, shape: dict[str, Any]) -> bool:
    """As much of JSON Schema as ours uses."""
    if "$ref" in shape:
        return conforms(value, SCHEMA["$defs"][shape["$ref"].rpartition("/")[2]])
    if "anyOf" in shape and not any(conforms(value, each) for each in shape["anyOf"]):
        return False
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
        "null": type(None),
    }
    if "type" in shape and not isinstance(value, kinds[shape["type"]]):
        return False
    if "enum" in shape and value not in shape["enum"]:
        return False
    if isinstance(value, str):
        return bool(shape.get("minLength", 0) <= len(value) <= shape.get("maxLength", len(value)))
    if isinstance(value, int | float):
        return bool(shape.get("minimum", value) <= value <= shape.get("maximum", value))
    if isinstance(value, dict):
        known = shape.get("properties", {})
        pattern = shape.get("propertyNames", {}).get("pattern", "")
        if len(value) > shape.get("maxProperties", len(value)) or not all(
            re.match(pattern, n) for n in value
        ):
            return False
        return set(shape.get("required", [])) <= value.keys() and all(
            conforms(each, known[name]) for name, each in value.items() if name in known
        )
    return True


@given(JOBS)
def test_every_job_conforms_to_the_schema(job: Envelope) -> None:
    assert conforms(json.loads(encode(job)), SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {"id": 7},
        {"priority": 101},
        {"args": {}},
        {"on_error": {"do": "x"}},
        {"unique": ""},
        {"delay_ms": -1},
        {"headers": {f"h{n}": "" for n in range(65)}},
        {"headers": {"two words": ""}},
    ],
)
def test_a_wrong_job_does_not_conform_to_the_schema(fields: dict[str, Any]) -> None:
    assert not conforms(LEAST | fields, SCHEMA)
    assert not conforms({"id": "a"}, SCHEMA)


def test_the_examples_of_the_documentation_are_jobs() -> None:
    page = (ROOT / "docs" / "wire-format.md").read_text(encoding="utf-8")
    examples = [block.split("```")[0] for block in page.split("```json\n")[1:]]
    assert len(examples) >= 3
    for example in examples:
        decode(example.encode())
        assert conforms(json.loads(example), SCHEMA)

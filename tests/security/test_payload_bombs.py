"""Payloads made to do harm: each is refused with `BrokenPayload`, at little cost, and nothing else happens.

Costs are measured as memory, which does not depend on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import pickle
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from propolis.app.flow.continuation import continuation_of
from propolis.core import wire
from propolis.core.envelope import Envelope
from propolis.core.wire import decode, decode_args, encode
from propolis.errors import BrokenPayload, FlowBroken, NewerVersion, PayloadTooLarge

MiB = 2**20


def envelope(args: bytes = b"[]", rest: bytes = b"") -> bytes:
    return b'{"id":"a","task":"mail.send","args":%b%b}' % (args, rest)


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


# Too much of something.
BOMBS: dict[str, Callable[[], bytes]] = {
    "100 MB of nothing": lambda: bytes(100 * 10**6),
    "20 MB in one string": lambda: envelope(b'["' + b"x" * (20 * 10**6) + b'"]'),
    "one byte too many": lambda: envelope().ljust(wire.LIMITS.size + 1),
    "100,000 arrays": lambda: b"[" * 100_000,
    "100,000 arrays in the arguments": lambda: envelope(b"[" * 100_000 + b"]" * 100_000),
    "40,000 objects": lambda: b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "65 levels": lambda: envelope(b"[" * 64 + b"]" * 64),
    "65 levels in an unknown field": lambda: envelope(rest=b',"x":' + b"[" * 64 + b"]" * 64),
    "levels behind an escaped quote": lambda: envelope(b'["\\""' + b",[" * 100),
    "levels behind an escaped backslash": lambda: envelope(b'["\\\\"' + b",[" * 100),
    "20,000 keys": lambda: envelope(rest=b',"kwargs":' + json.dumps(dict.fromkeys(range(20_000))).encode()),
    "20,000 unknown fields": lambda: envelope(rest=b"".join(b',"%d":1' % n for n in range(20_000))),
    "5,000 digits": lambda: envelope(b"[" + b"9" * 5000 + b"]"),
    "5,000 digits, negative": lambda: envelope(b"[-" + b"9" * 5000 + b"]"),
    "5,000 digits after the point": lambda: envelope(b"[0." + b"9" * 5000 + b"]"),
    "5,000 digits in the exponent": lambda: envelope(b"[1e" + b"9" * 5000 + b"]"),
    "a version of 5,000 digits": lambda: envelope(rest=b',"v":' + b"9" * 5000),
}

# Not JSON, or not ours.
POISONS: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"hello",
    "pickle": lambda: pickle.dumps({"id": "a", "task": "t"}),
    "pickle in ASCII": lambda: pickle.dumps({"id": "a", "task": "t"}, protocol=0),
    "marshal": lambda: marshal.dumps({"id": "a", "task": "t"}),
    "gzip": lambda: b"\x1f\x8b\x08\x00" + bytes(100),
    "msgpack": lambda: b"\x82\xa2id\xa1a\xa4task\xa1t",
    "yaml": lambda: b"!!python/object/apply:os.system ['true']",
    "invalid UTF-8": lambda: envelope(b'["\xff"]'),
    "overlong UTF-8": lambda: envelope(b'["\xc0\xaf"]'),
    "a surrogate in UTF-8": lambda: envelope(b'["\xed\xa0\x80"]'),
    "a lone high surrogate, escaped": lambda: envelope(b'["\\ud800"]'),
    "a lone low surrogate, escaped": lambda: envelope(b'["\\uDC00"]'),
    "surrogates in the wrong order": lambda: envelope(b'["\\ude00\\ud83d"]'),
    "a lone surrogate in a key": lambda: envelope(b'[{"\\ud800":1}]'),
    "a lone surrogate in kwargs": lambda: envelope(rest=b',"kwargs":{"x":"\\udfff"}'),
    "a lone surrogate in an unknown field": lambda: envelope(rest=b',"x":"\\ud800"'),
    "NaN": lambda: envelope(b"[NaN]"),
    "Infinity": lambda: envelope(b"[Infinity]"),
    "-Infinity": lambda: envelope(b"[-Infinity]"),
    "NaN in an unknown field": lambda: envelope(rest=b',"x":NaN'),
    "a number too large for its field": lambda: envelope(rest=b',"delay_ms":1e999'),
    "a factor that is infinite": lambda: envelope(
        rest=b',"on_error":{"do":"repeat","backoff":{"kind":"exponential","first_ms":1,"factor":1e999}}'
    ),
    "a newer version": lambda: envelope(rest=b',"v":2'),
    "a much newer version": lambda: envelope(rest=b',"v":' + b"9" * 4000),
    "a control character": lambda: envelope(b'["\x01"]'),
    "a comment": lambda: envelope(b"[/* */]"),
    "single quotes": lambda: envelope(b"['x']"),
    "a long bad name": lambda: envelope(rest=b',"queue":"%b"' % (b"*" * 200_000)),
    "a long bad choice": lambda: envelope(rest=b',"unique_until":"%b"' % (b"*" * 200_000)),
    "a string without end": lambda: b'{"id":"' + b'\\"' * 100_000 + b"[" * 100,
    "a number without end": lambda: b"1" * 4300,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_before_it_is_parsed(bomb: Callable[[], bytes]) -> None:
    reason = refusal(bomb(), within=MiB, kind=PayloadTooLarge)
    assert "is the limit" in str(reason)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
def test_a_poison_is_refused_with_a_short_reason(poison: Callable[[], bytes]) -> None:
    reason = refusal(poison(), within=2 * MiB, kind=BrokenPayload)
    assert 0 < len(str(reason)) < 5000 if isinstance(reason, NewerVersion) else 0 < len(str(reason)) <= 500


def refusal(payload: bytes, *, within: int, kind: type[BrokenPayload]) -> BrokenPayload:
    """The error that refuses this payload, if it allocates no more than that."""
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            decode(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < within
    return caught.value


def test_a_float_too_large_is_refused_where_the_arguments_are_read() -> None:
    job = decode(envelope(b"[1e999]"))
    with pytest.raises(BrokenPayload, match="out of range"):
        decode_args(job.args)


@pytest.mark.parametrize(
    "payload",
    [
        b'"' + b'\\"' * 30_000 + b"[" * 100,
        b'["' + b'\\"' * 30_000 + b'",' + b"[" * 100,
        (b"1" * 4300 + b",") * 300,
        b'"' * 60_000 + b"[" * 100,
        b"\\" * 60_000 + b"[" * 100,
    ],
    ids=["no end", "an end", "digits", "quotes", "backslashes"],
)
def test_a_scan_never_goes_back(payload: bytes) -> None:
    """Memory does not show this: it takes milliseconds of the processor, or seconds if it goes back."""
    begin = time.process_time()
    with pytest.raises(BrokenPayload):
        decode(payload, wire.PayloadLimits(size=wire.HARD_LIMIT))
    assert time.process_time() - begin < 0.5


SMALL_STACK = """
import sys, threading
from propolis.errors import BrokenPayload
from propolis.core.wire import decode, decode_args

refused = []

def run():
    for payload in (b"[" * 100_000, b'{"a":' * 40_000, b'{"id":"a","task":"t","args":' + b"[" * 100_000):
        try:
            decode(payload)
        except BrokenPayload:
            refused.append(payload)
    deepest = decode(b'{"id":"a","task":"t","args":' + b"[" * 63 + b"]" * 63 + b"}")
    refused.append(decode_args(deepest.args))

sys.setrecursionlimit(10**6)  # so that nothing but our own scan stands before the end of the stack
threading.stack_size(256 * 1024)
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert len(refused) == 4, len(refused)
"""


def test_a_thread_with_a_small_stack_survives_what_is_deep() -> None:
    """In a process of its own: where this fails, it is by a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", SMALL_STACK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- nothing else happens ----------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_opened(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary), protocol=protocol)
    with pytest.raises(BrokenPayload):
        decode(payload)
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists()  # so the trap was a real one


@pytest.mark.parametrize(
    "task",
    [
        "os.system",
        "subprocess:run",
        "__main__.x",
        "antigravity",
        "this",
        "propolis.testing.engines.model",
        "..errors",
        "builtins.eval",
        "оs.system",  # noqa: RUF001 - a Cyrillic letter that looks like ours
        "__import__('os')",
        "{0.__class__}",
        "%(x)s",
        "a" * 200,
    ],
)
def test_a_task_is_only_a_name_and_nothing_is_imported_by_it(task: str) -> None:
    before = set(sys.modules)
    job = decode(json.dumps({"id": "a", "task": task, "headers": {"class": task}, "type": task}).encode())
    assert job.task == task
    assert set(sys.modules) == before


def test_names_that_could_leave_their_place_are_refused() -> None:
    for queue in ("*", ">", "a.>", "{a}", "a\r\nDEL b", "../a", "a b", "'", '"', ";", "a\0", "%", "ａ"):  # noqa: RUF001
        with pytest.raises(BrokenPayload, match="queue"):
            decode(json.dumps({"id": "a", "task": "t", "queue": queue}).encode())


# --- fuzzing -----------------------------------------------------------------------------

VALID = [
    json.dumps(job).encode()
    for job in (
        {"id": "a", "task": "t"},
        {"v": 1, "id": "a", "task": "t", "args": [1, -2.5, 'x"\\', None, True, {"k": []}], "colour": "red"},
        {"id": "a", "task": "t", "due_at": "2026-01-01T00:00:00Z", "kwargs": {"é": "🐝"}, "unknown": {}},
        {
            "id": "a",
            "task": "t",
            "on_error": {
                "do": "repeat",
                "times": 3,
                "backoff": {"kind": "exponential", "first_ms": 5, "factor": 2.5},
                "ending": {"do": "archive", "keep_ms": 1},
                "queue": "q",
            },
        },
    )
]
SPLICES = [
    b'"',
    b"\\",
    b"[",
    b"]",
    b"{",
    b"}",
    b":",
    b",",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"1e999",
    b"-",
    b"NaN",
    b"9" * 30,
]


def decodes_or_breaks(payload: bytes) -> None:
    """Anything but a job or a `BrokenPayload` is raised, and fails the test."""
    with contextlib.suppress(BrokenPayload):
        job = decode(payload)
        assert decode(wire.encode(job)) == job
        with contextlib.suppress(BrokenPayload):
            decode_args(job.args)


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@example(b"\xef\xbb\xbf{}")
def test_random_bytes_break_nothing_but_themselves(payload: bytes) -> None:
    decodes_or_breaks(payload)


@pytest.mark.parametrize("seed", range(4))
def test_mutations_of_good_jobs_break_nothing_but_themselves(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2500):
        payload = bytearray(VALID[seed])
        for _ in range(rng.randint(1, 4)):
            begin = rng.randrange(len(payload) + 1)
            end = min(len(payload), begin + rng.choice([0, 0, 1, 1, 5]))
            payload[begin:end] = rng.choice([*SPLICES, bytes([rng.randrange(256)]), b""])
        decodes_or_breaks(bytes(payload))


@pytest.mark.parametrize("valid", VALID)
def test_a_job_cut_short_is_always_broken(valid: bytes) -> None:
    for end in range(len(valid)):
        with pytest.raises(BrokenPayload):
            decode(valid[:end])


def test_a_bomb_in_a_header_of_a_flow_is_refused_before_it_is_parsed() -> None:
    """S03: for the envelope it is a string, whatever is in it."""
    deep = '{"flow":"f","then":[{"v":1,"id":"a","task":"t","args":' + "[" * 30_000 + "]" * 30_000 + "}]}"
    job = decode(encode(Envelope(id="a", task="t", headers={"propolis-flow": deep})))
    with pytest.raises(FlowBroken, match="depth of the job"):
        continuation_of(job)

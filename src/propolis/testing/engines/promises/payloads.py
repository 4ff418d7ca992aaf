"""Payloads: what is delivered is what was put, byte for byte."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from propolis.core import wire
from propolis.core.batch import Batch
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.ids import new_id
from propolis.core.job import Dead, Done, Error, Retried
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.core.strategy import archive, delete, exponential, repeat
from propolis.errors import PayloadTooLarge
from propolis.testing.clock import START, FakeClock
from propolis.testing.engines.promises.endings import MORTAL, Way, every_ending, every_return
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import (
    HOUR,
    a_dead_job,
    counts,
    found,
    info_of,
    put_one,
    settle_one,
    status,
    take,
    take_one,
)

LETTERS = st.text(st.characters(exclude_categories=["Cs"]))  # a lone surrogate is not text
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | LETTERS
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(LETTERS, inner), max_leaves=20)

any_json = settings(
    max_examples=40,
    deadline=None,
    database=None,
    # The storage is shared by the examples, on purpose, and the method by all engines.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)

EVERYTHING: Final = Envelope(
    id="everything-1",
    task="задачи.é.任务",
    queue="a:b-c_D9",
    args=Raw(b'[1, "two", null]'),
    kwargs=Raw(b'{"\\u00e9" : [ ]}'),
    priority=-100,
    due_at=START,
    expires_at=START + timedelta(days=400),
    expires_in_ms=10**10,
    timeout_ms=1500,
    chosen=True,
    unique="u\n'\"\\;--🐝",
    unique_until=UniqueUntil.STARTED,
    key="k e y",
    max_crashes=7,
    result_ttl_ms=5,
    on_success=archive,
    on_error=repeat(5, exponential("2s")).then(archive).on("slow"),
    on_timeout=delete,
    headers={"traceparent": "00-1-2-01", "": "🐝"},
    unknown={"from_the_future": Raw(b'{"x":1}')},
)

TEXTS: Final = {
    "nothing": "",
    "quotes": "'\"\\`%_$1:name?;--",
    "control characters": "".join(map(chr, range(32))) + "\x7f\u2028\ufeff",
    "many scripts": "καλημέρα κόσμε 你好 שלום नमस्ते",
    "beyond the first plane": "🐝" * 10,
    "combined": "e\u0301\u200d",
}


class PayloadsPromise:
    @given(args=st.lists(JSON, max_size=4), kwargs=st.dictionaries(LETTERS, JSON, max_size=4))
    @any_json
    async def test_any_json_value_comes_back_as_it_went(
        self, engine: Engine, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """T1, T2, I14, S0.3, S0.31."""
        job = Envelope(
            id=new_id(),
            task="tests.echo",
            args=Raw(msgspec.json.encode(args)),
            kwargs=Raw(msgspec.json.encode(kwargs)),
        )
        await engine.put([job])

        lease = await take_one(engine)

        assert lease.body == wire.encode(job)
        assert wire.decode(lease.body) == job
        assert wire.decode_args(wire.decode(lease.body).args) == args
        assert wire.decode_args(wire.decode(lease.body).kwargs) == kwargs
        await settle_one(engine, lease, Done())

    @pytest.mark.parametrize("size", [0, 1, 255, 256, 4096, 65_535, 65_536, 200_000])
    async def test_a_payload_of_any_size_comes_back_as_it_went(self, engine: Engine, size: int) -> None:
        """T1, T2, I14, S0.3."""
        job = await put_one(engine, "x" * size)

        lease = await take_one(engine)

        assert lease.body == wire.encode(job)
        assert wire.decode_args(wire.decode(lease.body).args) == ["x" * size]
        assert (await info_of(engine, job.id)).body == lease.body

    @pytest.mark.parametrize("name", list(TEXTS))
    async def test_any_text_comes_back_as_it_went(self, engine: Engine, name: str) -> None:
        """I14, S0.3."""
        text = TEXTS[name]
        job = await put_one(
            engine, text, {text: text}, headers={"text": text}, unique="u" + text.replace("\0", "")
        )

        lease = await take_one(engine)

        assert wire.decode(lease.body) == job
        assert wire.decode_args(wire.decode(lease.body).args) == [text, {text: text}]
        assert (await info_of(engine, job.id)).unique == job.unique

    async def test_every_field_of_a_job_comes_back_as_it_went(self, engine: Engine) -> None:
        """I14, S0.31: also those that only a later version will know."""
        await engine.put([EVERYTHING])

        lease = await take_one(engine, EVERYTHING.queue)

        assert lease.body == wire.encode(EVERYTHING)
        assert wire.decode(lease.body) == EVERYTHING
        assert lease.task == EVERYTHING.task

    async def test_twenty_payloads_in_a_row_come_back_in_their_order(self, engine: Engine) -> None:
        """I14, I15, S0.3."""
        jobs = [a_job(number, "x" * number) for number in range(20)]
        for job in jobs:
            await engine.put([job])

        leases = await take(engine)

        assert [(lease.id, lease.body) for lease in leases] == [(job.id, wire.encode(job)) for job in jobs]

    @every_return
    async def test_a_payload_does_not_change_from_run_to_run(
        self, engine: Engine, clock: FakeClock, back: Way
    ) -> None:
        """T5, T7, T8, I14, S0.30."""
        job = await put_one(engine, "hello", headers={"a": "b"})

        await back.go(engine, clock, job.id)

        assert (await take_one(engine)).body == wire.encode(job)

    async def test_a_payload_does_not_change_with_its_queue(self, engine: Engine) -> None:
        """T5, I14: the job is where it was sent, and its payload is what was put."""
        job = await put_one(engine)
        await settle_one(engine, await take_one(engine), Retried(queue="slow"))

        assert (await take_one(engine, "slow")).body == wire.encode(job)

    @every_ending
    async def test_a_payload_is_kept_as_it_was_with_its_ended_job(
        self, engine: Engine, clock: FakeClock, ending: Way
    ) -> None:
        """T4, T6, T8, T9, T10, T11, T12, I14, S0.4."""
        job = await put_one(engine, "hello", **MORTAL)

        await ending.go(engine, clock, job.id)

        assert (await info_of(engine, job.id)).body == wire.encode(job)

    @pytest.mark.parametrize(
        "result", [None, b"null", b'"\xf0\x9f\x90\x9d"', b"", b"[" + b"1," * 5000 + b"1]"]
    )
    async def test_a_result_is_kept_as_it_was(self, engine: Engine, result: bytes | None) -> None:
        """T4, I14."""
        job = await put_one(engine)

        await settle_one(engine, await take_one(engine), Done(result=result, keep=HOUR))

        assert (await info_of(engine, job.id)).result == result

    async def test_an_error_is_kept_as_it_was(self, engine: Engine) -> None:
        """T6, I14."""
        error = Error("ValueError", TEXTS["many scripts"], 'File "x.py", line 1\n  oops\n')

        job = await a_dead_job(engine, Dead(error=error))

        assert (await info_of(engine, job.id)).error == error

    async def test_a_payload_that_is_too_large_is_refused_before_it_is_stored(self, engine: Engine) -> None:
        """T1: and the rest of its bundle with it."""
        with pytest.raises(PayloadTooLarge):
            await engine.put([a_job(), a_job("x" * wire.LIMITS.size)])

        assert await found(engine) == []
        assert (await counts(engine)).put == 0

    async def test_names_of_any_letters_name_what_they_name(self, engine: Engine) -> None:
        """I14: keys, batches and schedules are called whatever their users call them."""
        name = "a b'\"\\;%_*?[x]{y}\n🐝"
        batch = Batch(id=name)
        await engine.put_batch(batch, [a_job(batch=name, key=name)])
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.KEY, name))
        assert await take(engine) == []
        await engine.remove_rule(RuleKind.PAUSE, Scope.KEY, name)

        await settle_one(engine, await take_one(engine), Done())

        assert (await status(engine, name)).done == 1
        assert [one.id for one in await engine.batches()] == [name]

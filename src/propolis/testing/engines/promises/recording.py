"""Records: small named values with versions, changed together with puts, wholly or not at all (R1)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from propolis.core.batch import Batch
from propolis.core.protocols import Engine, Records, Rule, RuleKind, Scope
from propolis.core.records import KEEP, MAX_CHANGES, MAX_VALUE, Change, Read, Record, Refusal, Swap
from propolis.errors import BadSetting, RecordTooLarge
from propolis.testing.clock import START, FakeClock
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import HOUR, Another, counts

SECOND = timedelta(seconds=1)


def setting(name: str, value: bytes | None = b"1", *, kind: str = "k", **fields: object) -> Change:
    return Change(kind=kind, name=name, value=value, **fields)  # type: ignore[arg-type]  # fields of a Change


def only(*changes: Change) -> Swap:
    return Swap(changes=changes)


async def swapped(engine: Records, *changes: Change) -> int:
    """The version of what surely happens."""
    [answer] = await engine.swap([only(*changes)])
    assert answer.version is not None, answer
    return answer.version


async def found(engine: Records, name: str, kind: str = "k") -> Record | None:
    read = await engine.records(kind, names=[name])
    return read.records[0] if read.records else None


def names(read: Read) -> list[str]:
    return [record.name for record in read.records]


class RecordingPromise:
    async def test_a_record_is_what_was_last_stored_under_its_name(self, records: Records) -> None:
        version = await swapped(records, setting("a", b"one"))
        assert await found(records, "a") == Record(kind="k", name="a", value=b"one", version=version)

        later = await swapped(records, setting("a", b"two"))
        assert later > version
        assert await found(records, "a") == Record(kind="k", name="a", value=b"two", version=later)
        assert await found(records, "a", kind="other") is None

    async def test_a_record_outlives_the_handle_that_stored_it(
        self, records: Records, another: Another
    ) -> None:
        await swapped(records, setting("a", b"\0\xff"))
        second = await another()
        assert isinstance(second, Records)
        record = await found(second, "a")
        assert record is not None
        assert record.value == b"\0\xff"

    async def test_a_change_happens_only_at_the_version_that_it_expects(self, records: Records) -> None:
        first = await swapped(records, setting("a", b"1", expected=0))
        [again, wrong, right] = await records.swap(
            [
                only(setting("a", b"2", expected=0)),
                only(setting("a", b"3", expected=first - 1)),
                only(setting("a", b"4", expected=first)),
            ]
        )
        assert (again.refusal, again.name) == (Refusal.VERSION, "a")
        assert (wrong.refusal, wrong.version) == (Refusal.VERSION, None)
        record = await found(records, "a")
        assert record is not None
        assert (record.value, record.version) == (b"4", right.version)

    async def test_a_swap_happens_wholly_or_not_at_all(self, records: Records, engine: Engine) -> None:
        await swapped(records, setting("there"))
        [answer] = await records.swap(
            [Swap(changes=(setting("new"), setting("there", b"2", expected=0)), puts=(a_job(),))]
        )
        assert answer.refusal is Refusal.VERSION
        assert await found(records, "new") is None
        assert (await counts(engine)).total == 0

    async def test_a_refused_swap_hinders_no_other_of_its_call(
        self, records: Records, engine: Engine
    ) -> None:
        answers = await records.swap(
            [
                Swap(changes=(setting("a"),), puts=(a_job(),)),
                Swap(changes=(setting("a", expected=0),), puts=(a_job(),)),
                Swap(changes=(setting("b"),), puts=(a_job(),)),
            ]
        )
        assert [answer.refusal for answer in answers] == [None, Refusal.VERSION, None]
        assert names(await records.records("k")) == ["a", "b"]
        assert (await counts(engine)).ready == 2

    async def test_a_put_that_is_there_already_adds_nothing_and_does_not_hinder(
        self, records: Records, engine: Engine
    ) -> None:
        first = a_job(unique="key")
        await engine.put([first])
        [answer] = await records.swap(
            [Swap(changes=(setting("a"),), puts=(first, a_job(unique="key"), a_job()))]
        )
        assert answer.refusal is None
        assert (await counts(engine)).ready == 2

    async def test_a_full_queue_refuses_the_swap_unless_it_is_unbounded(
        self, records: Records, engine: Engine
    ) -> None:
        await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
        two = (a_job(), a_job())
        [full] = await records.swap([Swap(changes=(setting("a"),), puts=two)])
        assert (full.refusal, full.name) == (Refusal.QUEUE_FULL, "default")
        assert await found(records, "a") is None

        [unbounded] = await records.swap([Swap(changes=(setting("a"),), puts=two, bounded=False)])
        assert unbounded.refusal is None
        assert (await counts(engine)).ready == 2

    async def test_a_swap_may_open_a_batch_and_needs_the_batches_of_its_jobs(
        self, records: Records, engine: Engine
    ) -> None:
        [lonely] = await records.swap([Swap(puts=(a_job(batch="b"),), changes=(setting("a"),))])
        assert (lonely.refusal, lonely.name) == (Refusal.NO_BATCH, "b")

        [opened] = await records.swap([Swap(opens=(Batch(id="b"),), puts=(a_job(batch="b"),))])
        assert opened.refusal is None
        status = await engine.batch("b")
        assert status is not None
        assert (status.total, status.sealed) == (1, False)

    async def test_a_swap_opens_all_of_its_batches_or_none(self, records: Records, engine: Engine) -> None:
        """R1: also where only the parent of one is missing, and nothing is put."""
        batches = (Batch(id="b"), Batch(id="c", parent="d"))
        [lonely] = await records.swap([Swap(opens=batches, changes=(setting("a"),))])
        assert (lonely.refusal, lonely.name) == (Refusal.NO_BATCH, "d")
        assert await engine.batches() == []
        assert await found(records, "a") is None

        [opened] = await records.swap([Swap(opens=(Batch(id="d"), *batches))])
        assert opened.refusal is None
        assert {batch.id: batch.total for batch in await engine.batches()} == {"b": 0, "c": 0, "d": 1}

    async def test_a_swap_does_not_open_a_sealed_batch_again(self, records: Records, engine: Engine) -> None:
        """R1: its jobs are not put, as if it had not asked for it."""
        await engine.put_batch(Batch(id="b"), [a_job(batch="b")])
        [sealed] = await records.swap([Swap(opens=(Batch(id="b"),), puts=(a_job(batch="b"),))])
        assert (sealed.refusal, sealed.name) == (Refusal.NO_BATCH, "b")
        [again] = await records.swap([Swap(opens=(Batch(id="b", parent="gone"),))])
        assert again.refusal is None
        status = await engine.batch("b")
        assert status is not None
        assert (status.total, status.sealed) == (1, True)

    @pytest.mark.parametrize(
        "opens",
        [
            (Batch(id="first"), Batch(id="inner", parent="nowhere")),
            (Batch(id="first"), Batch(id="inner", parent="sealed")),
            (Batch(id="inner", parent="first"), Batch(id="first")),
        ],
        ids=["unknown", "sealed", "opened after it"],
    )
    async def test_a_batch_in_none_that_is_open_refuses_the_swap_wholly(
        self, records: Records, engine: Engine, opens: tuple[Batch, ...]
    ) -> None:
        await engine.put_batch(Batch(id="sealed"), [a_job(batch="sealed")])
        [refused] = await records.swap([Swap(opens=opens, changes=(setting("a"),), bounded=False)])
        assert refused.refusal is Refusal.NO_BATCH
        assert refused.name in {batch.parent for batch in opens}
        assert [status.id for status in await engine.batches()] == ["sealed"]
        assert await found(records, "a") is None

        [opened] = await records.swap([Swap(opens=(Batch(id="first"), Batch(id="inner", parent="first")))])
        assert opened.refusal is None
        outer = await engine.batch("first")
        assert outer is not None
        assert outer.total == 1

    async def test_no_version_comes_back_also_not_after_a_removal(
        self, records: Records, clock: FakeClock
    ) -> None:
        seen = [await swapped(records, setting("a"))]
        for _ in range(3):
            clock.set_back(SECOND)
            seen.append(await swapped(records, setting("a", None)))
            assert await found(records, "a") is None
            seen.append(await swapped(records, setting("a", expected=0)))
        assert seen == sorted(set(seen))

    async def test_a_removed_record_is_not_there(self, records: Records) -> None:
        version = await swapped(records, setting("a"), setting("b"))
        await swapped(records, setting("a", None, expected=version))
        assert names(await records.records("k")) == ["b"]
        [twice] = await records.swap([only(setting("a", None, expected=version))])
        assert twice.refusal is Refusal.VERSION
        assert await swapped(records, setting("a", None)) > version

    async def test_what_is_kept_is_the_value_and_not_the_reminder(
        self, records: Records, clock: FakeClock
    ) -> None:
        await swapped(records, setting("a", b"kept", at=SECOND))
        version = await swapped(records, Change(kind="k", name="a", value=KEEP))
        assert await found(records, "a") == Record(kind="k", name="a", value=b"kept", version=version)
        [nothing] = await records.swap([only(Change(kind="k", name="b", value=KEEP))])
        assert nothing.refusal is Refusal.VERSION
        clock.advance(HOUR)
        assert names(await records.records("k", due=True)) == []

    async def test_names_are_read_in_the_order_of_their_bytes_and_page_by_page(
        self, records: Records
    ) -> None:
        stored = ["Z", "a", "a b", "aa", "z", "é", "\N{HONEYBEE}"]
        await swapped(records, *map(setting, reversed(stored)))
        await swapped(records, setting("other", kind="l"))

        first = await records.records("k", limit=4)
        rest = await records.records("k", after=first.after, limit=4)
        assert (names(first), names(rest), rest.after) == (stored[:4], stored[4:], None)

        newest = await records.records("k", newest=True, limit=3)
        assert names(newest) == stored[:-4:-1]
        assert names(await records.records("k", newest=True, after=newest.after)) == stored[-4::-1]
        assert names(await records.records("k", names=["z", "none", "a"])) == ["a", "z"]

    async def test_due_records_come_in_the_order_of_their_times(
        self, records: Records, clock: FakeClock
    ) -> None:
        now = (await records.records("k")).now
        await swapped(
            records,
            setting("late", at=2 * SECOND),
            setting("b", at=now + SECOND),
            setting("a", at=SECOND),
            setting("never"),
        )
        assert names(await records.records("k", due=True)) == []
        clock.advance(SECOND)
        assert names(await records.records("k", due=True)) == ["a", "b"]
        clock.advance(SECOND)
        read = await records.records("k", due=True, limit=2)
        assert (names(read), read.now) == (["a", "b"], now + 2 * SECOND)
        await swapped(records, setting("a"), setting("b", None))
        assert names(await records.records("k", due=True)) == ["late"]

    async def test_a_sweep_names_the_kinds_that_have_something_due(
        self, records: Records, engine: Engine, clock: FakeClock
    ) -> None:
        await swapped(records, setting("a", at=SECOND), setting("b", kind="l", at=HOUR))
        swept = await engine.sweep()
        assert swept.records_due == ()
        assert swept.next_in is not None
        assert swept.next_in <= SECOND
        clock.advance(SECOND)
        assert (await engine.sweep()).records_due == ("k",)
        clock.advance(HOUR)
        assert (await engine.sweep()).records_due == ("k", "l")

    async def test_an_expired_record_is_not_there_and_is_swept(
        self, records: Records, engine: Engine, clock: FakeClock
    ) -> None:
        version = await swapped(records, setting("a", at=SECOND, expires_in=SECOND), setting("b"))
        clock.advance(SECOND)
        assert await found(records, "a") is None
        assert names(await records.records("k")) == ["b"]
        assert names(await records.records("k", due=True)) == []
        [answer] = await records.swap([only(setting("a", expected=version))])
        assert answer.refusal is Refusal.VERSION
        await engine.sweep()
        assert await swapped(records, setting("a", expected=0)) > version

    async def test_a_call_with_the_same_token_happens_once_and_answers_the_same(
        self, records: Records, engine: Engine
    ) -> None:
        swaps = [
            Swap(changes=(setting("a"),), puts=(a_job(),)),
            Swap(changes=(setting("a", expected=0),)),
        ]
        first = await records.swap(swaps, token="t")
        second = await records.swap([Swap(changes=(setting("a"),), puts=(a_job(),))] * 2, token="t")
        assert second == first
        assert (await counts(engine)).ready == 1
        assert await records.swap(swaps, token="u") != first

    async def test_many_who_count_with_one_record_lose_no_step(
        self, records: Records, another: Another
    ) -> None:
        handles = [await another() for _ in range(4)]

        async def count_up(engine: Engine) -> None:
            assert isinstance(engine, Records)
            for _ in range(10):
                while True:
                    record = await found(engine, "n")
                    value, version = (int(record.value), record.version) if record else (0, 0)
                    change = setting("n", str(value + 1).encode(), expected=version)
                    [answer] = await engine.swap([only(change)])
                    if answer.refusal is None:
                        break

        await asyncio.gather(*map(count_up, handles))
        record = await found(records, "n")
        assert record is not None
        assert record.value == b"40"

    @pytest.mark.parametrize(
        ("swaps", "error"),
        [
            ([only(setting("a", b"x" * (MAX_VALUE + 1)))], RecordTooLarge),
            ([only(setting("a", b"x" * MAX_VALUE))] * 65, RecordTooLarge),
            ([only(setting(str(n))) for n in range(MAX_CHANGES + 1)], BadSetting),
            ([Swap(changes=(setting("a"),), opens=(Batch(id="b"),) * (MAX_CHANGES + 1))], BadSetting),
            ([only(setting("a"), setting("a"))], BadSetting),
            ([only(setting(""))], BadSetting),
            ([only(setting("a\0"))], BadSetting),
            ([only(setting("a", kind="x" * 500))], BadSetting),
            ([only(setting("a", at=START.replace(tzinfo=None)))], BadSetting),
            ([only(setting("a", at=START.replace(year=9999)))], BadSetting),
            ([only(setting("a", at=timedelta.max))], BadSetting),
            ([only(setting("a", expires_in=timedelta(days=3_650_000)))], BadSetting),
            ([only(setting("a", expected=1 << 63))], BadSetting),
        ],
    )
    async def test_what_is_too_large_or_has_no_name_is_refused(
        self, records: Records, swaps: list[Swap], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            await records.swap(swaps)
        assert (await records.records("k")).records == []

    @pytest.mark.parametrize("asked", [{"limit": 0}, {"after": "a\0"}, {"names": ["a", ""]}], ids=str)
    async def test_what_cannot_be_read_is_refused(self, records: Records, asked: dict[str, Any]) -> None:
        with pytest.raises(BadSetting):
            await records.records("k", **asked)

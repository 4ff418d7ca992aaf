"""Batches as users write them, on the real worker."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest

from skep import (
    App,
    BatchReport,
    BatchState,
    BatchStatus,
    Filter,
    Job,
    State,
    cron,
    current_job,
    dead,
    fixed,
    repeat,
)
from skep.batch import callback_id
from skep.batches import BatchHandle, NewBatch
from skep.broker import Receipt
from skep.brokers.memory import MemoryBroker
from skep.errors import (
    BadName,
    BadSetting,
    BatchSealed,
    EngineUnavailable,
    OutcomeUnknown,
    SkepError,
    UnknownBatch,
)
from skep.job import Job as Envelope
from skep.job import derive_id
from skep.loading import load_app
from skep.worker import Mode, Settings, Worker


class Shop:
    """An app with members that do as they are told, and callbacks that remember."""

    def __init__(self) -> None:
        self.app = app = App("memory://")
        self.runs: Counter[str] = Counter()
        self.reports: list[tuple[str, BatchStatus]] = []

        @app.task(on_error=repeat(2, fixed("1m")).then(dead), result_ttl="1h")
        async def square(n: int) -> int:
            self.runs["square"] += 1
            return n * n

        @app.task(on_error=repeat(2, fixed("1m")).then(dead))
        async def fail(_: int = 0) -> None:
            self.runs["fail"] += 1
            raise ValueError("no")

        @app.task
        async def finished(report: BatchReport) -> None:
            self.reports.append(("finished", report.status))

        @app.task
        async def succeeded(report: BatchReport) -> None:
            self.reports.append(("succeeded", report.status))

        @app.task
        async def failed(report: BatchReport) -> None:
            self.reports.append(("failed", report.status))

        self.square, self.fail = square, fail
        self.finished, self.succeeded, self.failed = finished, succeeded, failed
        self.callbacks: Any = {"callback": finished, "on_succeeded": succeeded, "on_failed": failed}

    def told(self) -> list[tuple[str, str]]:
        return [(what, status.state.value) for what, status in self.reports]


@pytest.fixture
def shop() -> Shop:
    return Shop()


class Broken(Exception):
    """What happens to somebody who fills a batch."""


async def fill_and_break(batch: NewBatch, calls: Iterable[Envelope]) -> None:
    async with batch as b:
        await b.add_many(calls)
        raise Broken


async def status_of(batch: BatchHandle) -> BatchStatus:
    status = await batch.astatus()
    assert status is not None
    return status


# --- one call ----------------------------------------------------------------------------


async def test_a_batch_calls_back_once_when_all_is_done(shop: Shop) -> None:
    """S3.1, S3.5, S3.10: one job per element, then one callback, in the step that ended the last."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2, 3]), **shop.callbacks, note="squares")
        assert (await status_of(batch)).state is BatchState.IN_PROGRESS
        await t.drain()
        status = await status_of(batch)
        assert (status.state, status.total, status.done, status.note) == ("success", 3, 3, "squares")
        assert shop.told() == [("succeeded", "success"), ("finished", "success")]
        assert t.job(callback_id(batch.id, "finished")).state is State.DONE


@pytest.mark.parametrize(
    ("good", "bad", "state", "runs"),
    [(19, 0, "success", 19), (0, 2, "dead", 6), (2, 1, "partial-success", 5)],
)
async def test_the_state_sums_up_how_its_members_ended(
    shop: Shop, good: int, bad: int, state: str, runs: int
) -> None:
    """S3.5: with the exact number of runs; on_failed comes with the first that is dead, not the last."""
    async with shop.app.test() as t:
        members = chain(shop.square.many(range(good)), shop.fail.many(range(bad)))
        await shop.app.batch(members, **shop.callbacks)
        await t.advance("1h")
    assert shop.runs.total() == runs
    assert shop.told()[-1] == ("finished", state)
    assert [what for what, _ in shop.told()] == (["failed", "finished"] if bad else ["succeeded", "finished"])


async def test_status_tells_ids_and_counts_in_every_state(shop: Shop) -> None:
    """S3.4, S3.12: also of those that wait for another attempt."""
    app = shop.app
    reached = asyncio.Event()

    @app.task
    async def hang() -> None:
        reached.set()
        await asyncio.Event().wait()

    async with app.test() as t:
        calls = [shop.square.job(1), shop.fail.job(), shop.fail.job(), hang.job()]
        calls += [shop.square.using(delay="1h").job(2), shop.square.using(delay="1h").job(3)]
        batch = await app.batch(calls)
        ids = [member.id async for member in batch.amembers()]
        await t.advance("30s")
        await app.jobs.acancel(ids[5])
        assert await batch.aids() == {
            "enqueued": [ids[4]],
            "retrying": [ids[1], ids[2]],
            "running": [ids[3]],
            "done": [ids[0]],
            "dead": [],
            "cancelled": [ids[5]],
        }
        status = await status_of(batch)
        assert (status.enqueued, status.retrying, status.running) == (1, 2, 1)
        assert (status.done, status.dead, status.cancelled, status.ended, status.pending) == (1, 0, 1, 2, 4)


async def test_a_callback_gets_the_results_in_the_order_of_the_members(shop: Shop) -> None:
    """S3.19: of those that are done and keep them; in plain functions and in coroutines."""
    app, seen = shop.app, list[Any]()

    @app.task
    async def total(report: BatchReport, job: Job) -> None:
        assert job.id == callback_id(report.id, "finished")
        seen.append((report.total, report.done, report.dead, report.cancelled, await report.aresults(int)))

    @app.task
    def total_too(report: BatchReport) -> None:
        seen.append(report.results(int))

    async with app.test() as t:
        for callback in (total, total_too):
            members = chain(shop.square.many([3, 1]), shop.fail.many([0]), shop.square.many([2]))
            await app.batch(members, callback=callback)
            await t.advance("1h")
    assert seen == [(4, 3, 1, 0, [9, 1, 4]), [9, 1, 4]]


async def test_a_callback_may_have_arguments_and_circumstances_of_its_own(shop: Shop) -> None:
    app, seen = shop.app, list[str]()

    @app.task
    async def tell(job: Job, report: BatchReport, whom: str) -> None:
        assert job is current_job()
        seen.append(f"{whom} {report.state} {job.queue}")

    async with app.test() as t:
        await app.batch(shop.square.many([1]), callback=tell.using(queue="slow").job("ann"))
        await t.drain()
    assert seen == ["ann success slow"]


async def test_a_callback_that_fails_is_retried_and_then_dead(shop: Shop) -> None:
    """S3.9: an ordinary job, which the batch does not wait for."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), callback=shop.fail)
        await t.advance("1h")
        assert shop.runs["fail"] == 3
        assert t.job(callback_id(batch.id, "finished")).state is State.DEAD
        assert (await status_of(batch)).state is BatchState.SUCCESS


async def test_an_empty_batch_calls_back_at_once(shop: Shop) -> None:
    """S3.16."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(**shop.callbacks)
        assert (await status_of(batch)).state is BatchState.SUCCESS
        await t.drain()
    assert shop.told() == [("succeeded", "success"), ("finished", "success")]


async def test_what_is_wrong_with_a_batch_is_wrong_before_anything_is_stored(shop: Shop) -> None:
    """S3.3."""

    @shop.app.task
    async def wants(n: int) -> None: ...

    wrongs: list[dict[str, Any]] = [
        {"callback": wants},
        {"linger": "soon"},
        {"delay": "1s", "at": shop.app},
        {"batch_id": "a\0b"},
        {"linger": 0, "callback": shop.finished},
        {"linger": 0, "on_failed": shop.finished},
    ]
    for wrong in wrongs:
        with pytest.raises((BadSetting, TypeError)):
            await shop.app.batch(shop.square.many([1]), **wrong)
    with pytest.raises(TypeError):
        await shop.app.batch(shop.square.many([1, "two"]))
    assert await shop.app.batches.afind() == []
    assert await shop.app.jobs.afind() == []
    assert issubclass(BadName, BadSetting)


async def test_a_task_that_is_no_callback_gets_no_report(shop: Shop) -> None:
    async with shop.app.test() as t:
        await shop.finished.using(on_error=dead).aenqueue()
        await t.drain()
        [error] = t.errors
    assert "is no callback of a batch" in str(error)


# --- how long ----------------------------------------------------------------------------


def test_what_is_no_job_is_no_member_and_no_callback(shop: Shop) -> None:
    square: Any = shop.square
    members: list[Any] = [5, square, square.step(1)]
    for member in members:
        with pytest.raises(TypeError, match=r"a batch has jobs, and .* is none: write task\.job"):
            shop.app.batch([member]).enqueue()
    for callback in (print, "finished"):
        with pytest.raises(TypeError, match="cannot be called back: give a task"):
            shop.app.batch(callback=cast(Any, callback))
    with pytest.raises(BadSetting, match="batch id"):
        shop.app.batch(batch_id="")
    shop.app.close()


async def test_a_batch_that_was_put_is_not_put_again(shop: Shop) -> None:
    """Its calls may be used up: the second one would be an empty batch with the name of the first."""
    async with shop.app.test():
        new = shop.app.batch(shop.square.many([1]))
        await new
        with pytest.raises(BadSetting, match="was put already"):
            await new
        filled = shop.app.batch()
        async with filled as writer:
            await writer.add(shop.square, 2)
        with pytest.raises(BadSetting, match="was put already"):
            await filled.aenqueue()


def test_a_transaction_is_not_forgotten_on_the_way_to_a_batch(shop: Shop) -> None:
    """What is not put by enqueue() would be there although the transaction was rolled back."""
    call = shop.square.using(tx=object())
    wrong: list[Callable[[], object]] = [
        lambda: call.job(1),
        lambda: shop.app.batch(call.many([1])).enqueue(),
        lambda: shop.app.batch(callback=shop.finished.using(tx=object())),
        lambda: shop.app.schedules.put("daily", cron("@daily"), call, 1),
    ]
    for put in wrong:
        with pytest.raises(BadSetting, match=r"tx= goes with enqueue\(\) and aenqueue\(\) only"):
            put()
    shop.app.close()


async def test_a_batch_lingers_and_is_forgotten(shop: Shop) -> None:
    """S3.11."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), linger="1h")
        await t.drain()
        await t.advance("59m")
        assert await batch.astatus() is not None
        await t.advance("2m")
        assert await batch.astatus() is None
        with pytest.raises(UnknownBatch):
            await batch.afinished()


async def test_linger_zero_forgets_at_once_and_still_calls_back(shop: Shop) -> None:
    """S3.11."""

    @shop.app.task
    async def plain() -> None:
        shop.runs["plain"] += 1

    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2]), callback=plain, linger=0)
        await t.drain()
        assert await batch.astatus() is None
    assert shop.runs["plain"] == 1


async def test_a_report_that_is_gone_is_an_error_of_its_callback(shop: Shop) -> None:
    async with shop.app.test() as t:
        callback = shop.finished.using(delay="2h", on_error=dead)
        await shop.app.batch(shop.square.many([1]), callback=callback, linger="1h")
        await t.advance("3h")
        [error] = t.errors
    assert isinstance(error, UnknownBatch)


async def test_a_scheduled_batch_waits(shop: Shop) -> None:
    """S3.18: all of it, or some of its members for themselves."""
    async with shop.app.test() as t:
        calls = [shop.square.job(1), shop.square.using(delay="2h").job(2)]
        batch = await shop.app.batch(calls, delay="1h", **shop.callbacks)
        at = t.now + timedelta(hours=3)
        other = await shop.app.batch(shop.square.many([5]), at=at)
        assert await t.advance("59m") == 0
        assert await t.advance("2m") == 1
        assert (await status_of(batch)).pending == 1
        await t.advance("1h")
        assert shop.told()[-1] == ("finished", "success")
        assert (await status_of(other)).pending == 1
        await t.advance("1h")
        assert (await status_of(other)).state is BatchState.SUCCESS


# --- streaming ---------------------------------------------------------------------------


class Counting(MemoryBroker):
    """Remembers how much was put at once, and loses answers if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []
        self.lose = 0

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        self.pieces.append(len(jobs))
        return self._answer(await super().put(jobs, token=token))

    async def put_batch(self, batch: Any, jobs: Sequence[Envelope] = (), **said: Any) -> list[Receipt]:
        self.pieces.append(len(jobs))
        return self._answer(await super().put_batch(batch, jobs, **said))

    def _answer(self, receipts: list[Receipt]) -> list[Receipt]:
        if self.lose:
            self.lose -= 1
            raise OutcomeUnknown("the answer was lost")
        return receipts


@pytest.fixture
def engine(shop: Shop) -> Counting:
    engine = Counting()
    shop.app._engine = engine
    return engine


async def test_a_stream_is_put_in_pieces_and_sealed_at_the_end(shop: Shop, engine: Counting) -> None:
    """S3.17, S3.21."""
    async with shop.app.batch(callback=shop.finished) as b:
        for n in range(2500):
            await b.add(shop.square, n)
        status = await status_of(b.handle)
        assert (status.state, status.total) == (BatchState.OPEN, 2000)
        await b.add_many(shop.square.many(range(100)))
    assert engine.pieces == [1000, 1000, 600]
    status = await status_of(b.handle)
    assert (status.state, status.total) == (BatchState.IN_PROGRESS, 2600)
    numbers = [member.member async for member in b.handle.amembers()]
    assert numbers == list(range(2600))


async def test_adding_without_await_only_gathers(shop: Shop, engine: Counting) -> None:
    async with shop.app.batch() as b:
        for n in range(2100):
            b.add(shop.square, n)
        assert engine.pieces == []
    assert engine.pieces == [1000, 1000, 100]
    assert (await status_of(b.handle)).sealed


def test_a_stream_from_plain_code(shop: Shop, engine: Counting) -> None:
    with shop.app.batch(callback=shop.finished) as b:
        for n in range(1500):
            b.add(shop.square, n)
        b.add_many(shop.square.many([1, 2]))
        b.open()
    status = b.handle.status()
    assert status is not None
    assert (status.sealed, status.total, engine.pieces) == (True, 1502, [1000, 502])
    shop.app.close()


async def test_a_small_stream_is_put_in_one_step(shop: Shop, engine: Counting) -> None:
    """S3.2: and so is a batch that is given whole, up to ten thousand."""
    async with shop.app.batch() as b:
        b.add(shop.square, 1)
    assert (engine.pieces, (await status_of(b.handle)).sealed) == ([1], True)
    await shop.app.batch(shop.square.many(range(10_000)))
    assert engine.pieces == [1, 10_000]


async def test_a_batch_that_is_too_large_for_one_step_goes_in_pieces(shop: Shop, engine: Counting) -> None:
    """S3.21: and its calls are made as they are needed."""
    made: list[int] = []

    def numbers() -> Any:
        for n in range(12_345):
            made.append(n)
            yield n

    batch = await shop.app.batch(shop.square.many(numbers()))
    assert engine.pieces == [*[1000] * 12, 345]
    status = await status_of(batch)
    assert (status.sealed, status.total) == (True, 12_345)


async def test_a_stream_that_raises_leaves_an_open_batch_that_expires(shop: Shop) -> None:
    """S3.2, S3.17: what was put runs, nobody is called, and it is forgotten after a day."""
    async with shop.app.test() as t:
        batch = shop.app.batch(**shop.callbacks)
        with pytest.raises(Broken):
            await fill_and_break(batch, shop.square.many(range(1500)))
        handle = BatchHandle(shop.app, batch.id)
        await t.drain()
        status = await status_of(handle)
        assert (status.state, status.sealed, status.total, status.done) == ("open", False, 1000, 1000)
        await t.advance("23h")
        assert await handle.astatus() is not None
        await t.advance("61m")
        assert await handle.astatus() is None
    assert shop.told() == []


def test_a_plain_stream_that_raises_before_its_first_piece_leaves_nothing(shop: Shop) -> None:
    """S3.2."""

    def fill(batch: NewBatch) -> None:
        with batch as b:
            b.add(shop.square, 1)
            raise Broken

    batch = shop.app.batch(**shop.callbacks)
    with pytest.raises(Broken):
        fill(batch)
    assert shop.app.batches.get(batch.id) is None
    assert shop.app.jobs.find() == []
    shop.app.close()


async def test_lost_answers_make_no_second_members(shop: Shop, engine: Counting) -> None:
    """I1: each piece has its token."""
    engine.lose = 2
    async with shop.app.batch() as b:
        await b.add_many(shop.square.many(range(1200)))
        engine.lose = 2
    assert (await status_of(b.handle)).total == 1200
    assert engine.pieces == [1000, 1000, 1000, 200, 200, 200]


async def test_a_batch_with_a_chosen_id_is_made_once(shop: Shop, engine: Counting) -> None:
    """I1: and a stream that broke off goes on where it was, if it is begun again."""
    for _ in range(2):
        await shop.app.batch(shop.square.many([1, 2]), batch_id="import:1")
    status = await shop.app.batches.aget("import:1")
    assert status is not None
    assert status.total == 2
    with pytest.raises(Broken):
        await fill_and_break(shop.app.batch(batch_id="import:2"), shop.square.many(range(2000)))
    async with shop.app.batch(batch_id="import:2") as b:
        await b.add_many(shop.square.many(range(2500)))
    status = await status_of(b.handle)
    assert (status.sealed, status.total) == (True, 2500)


async def test_a_piece_that_could_not_be_put_goes_with_the_next(shop: Shop, engine: Counting) -> None:
    engine.lose = 4
    async with shop.app.batch() as b:
        for n in range(999):
            b.add(shop.square, n)
        with pytest.raises(OutcomeUnknown):
            await b.add(shop.square, 999)
    assert (await status_of(b.handle)).total == 1000


@pytest.mark.parametrize(("wrong", "total"), [("cannot be made", 15), ("cannot be stored", 25)])
async def test_what_was_added_with_one_that_fails_is_in(
    shop: Shop, engine: Counting, wrong: str, total: int
) -> None:
    """An iterator gives nothing twice, so what it gave before and after that one would be lost."""

    def calls() -> Iterator[Envelope]:
        yield from shop.square.many(range(10))
        if wrong == "cannot be made":
            raise BadSetting("it is not to be")
        yield Envelope(id="two words", task="x")
        yield from shop.square.many(range(10, 20))

    async with shop.app.batch() as b:
        with pytest.raises(SkepError):
            await b.add_many(calls())
        await b.add_many(shop.square.many(range(20, 25)))
    assert (await status_of(b.handle)).total == total


async def test_members_that_are_added_side_by_side_have_numbers_of_their_own(
    shop: Shop, overlapping: Overlapping
) -> None:
    async with shop.app.batch() as b:
        await asyncio.gather(*(b.add_many(shop.square.many(range(1500))) for _ in range(3)))
    numbers = [member.member async for member in b.handle.amembers()]
    assert numbers == list(range(4500))


class Overlapping(Counting):
    """Keeps the order of what is on its way together; of the pieces in `refuse` and `hang` it takes none."""

    remote = in_order = True

    async def forget_tokens(self, tokens: Sequence[str]) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.at_once = self.most_at_once = 0
        self.refuse: set[int] = set()
        self.hang: set[int] = set()

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await asyncio.sleep(0)
            if jobs[0].member // 1000 in self.hang:
                await asyncio.Event().wait()
            if jobs[0].member // 1000 in self.refuse:
                raise EngineUnavailable("memory://")
            return await super().put(jobs, token=token)
        finally:
            self.at_once -= 1


@pytest.fixture
def overlapping(shop: Shop) -> Overlapping:
    engine = Overlapping()
    shop.app._engine = engine
    return engine


async def test_two_pieces_are_on_their_way_where_the_engine_keeps_their_order(
    shop: Shop, overlapping: Overlapping
) -> None:
    """S3.17: and no more, whatever their number."""
    async with shop.app.batch() as b:
        await b.add_many(shop.square.many(range(6500)))
    status = await status_of(b.handle)
    assert (status.sealed, status.total, overlapping.most_at_once) == (True, 6500, 2)
    assert overlapping.pieces == [1000] * 6 + [500]


@pytest.mark.parametrize("refused", [{1}, {2}, {3}, {1, 2}, {2, 3}, {1, 2, 3, 4}])
async def test_of_pieces_on_their_way_together_those_that_failed_are_put_again(
    shop: Shop, overlapping: Overlapping, refused: set[int]
) -> None:
    overlapping.refuse = refused
    failures = 0
    async with shop.app.batch() as b:
        for n in range(5500):
            try:
                await b.add(shop.square, n)
            except EngineUnavailable:
                failures += 1
        overlapping.refuse = set()
    status = await status_of(b.handle)
    assert failures > 0
    assert (status.sealed, status.total) == (True, 5500)
    numbers = [member.member async for member in b.handle.amembers()]
    assert numbers == list(range(5500))


async def test_who_stops_filling_leaves_nothing_on_its_way(shop: Shop, overlapping: Overlapping) -> None:
    overlapping.hang = {2}
    with pytest.raises(Broken):
        await fill_and_break(shop.app.batch(), shop.square.many(range(3500)))
    assert overlapping.at_once == 0

    def broken() -> Iterator[Envelope]:
        yield from shop.square.many(range(12_500))
        raise Broken

    overlapping.hang = {10}
    with pytest.raises(Broken):
        await shop.app.batch(broken())
    assert overlapping.at_once == 0


async def test_a_second_cancellation_leaves_the_batch_to_be_filled(
    shop: Shop, overlapping: Overlapping
) -> None:
    """While the first one is still waiting for the puts that it ends."""
    slow = asyncio.Event()

    async def put(jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await slow.wait()  # as a driver that closes a connection
            raise
        return []

    async with shop.app.batch() as b:
        await b.add_many(shop.square.many(range(1000)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlapping, "put", put)
            adding = asyncio.create_task(b.add_many(shop.square.many(range(1000, 4000))))
            for _ in range(3):  # one for each put, and one for who waits for their ends
                await asyncio.sleep(0.01)
                adding.cancel()
            with pytest.raises(asyncio.CancelledError):
                await adding
            slow.set()
        await b.add_many(shop.square.many(range(10)))
    status = await status_of(b.handle)
    assert status.sealed
    assert status.total >= 1010


async def test_calls_that_fail_on_the_way_in_leave_nothing_on_its_way(
    shop: Shop, overlapping: Overlapping
) -> None:
    def broken() -> Iterator[Envelope]:
        yield from shop.square.many(range(3500))
        raise Broken

    overlapping.hang = {2}
    with pytest.raises(Broken):
        async with shop.app.batch(broken()):
            pytest.fail("the block must not begin")
    assert overlapping.at_once == 0


async def test_an_app_that_is_closed_in_the_middle_is_opened_again(valkey_url: str, prefix: str) -> None:
    """A piece was on its way then, in a loop that is gone."""
    app = App(f"{valkey_url}?prefix={prefix}:")

    @app.task(name="square")
    async def square(n: int) -> None: ...

    def fill() -> str:
        with app.batch() as b:
            b.add_many(square.many(range(2000)))
            app.close()
            b.add_many(square.many(range(10)))
        return b.id

    status = await app.batches.aget(await asyncio.to_thread(fill))
    assert status is not None
    assert (status.sealed, status.total) == (True, 2010)
    await app.aclose()


async def test_a_second_try_to_open_makes_no_second_piece(shop: Shop, engine: Counting) -> None:
    """Else the tokens of what follows would be others than those of an earlier run, and members put twice."""
    for lose in (4, 0):
        engine.lose = lose
        async with shop.app.batch(batch_id="import:3") as b:
            b.add(shop.square, 0)
            if lose:
                with pytest.raises(OutcomeUnknown):
                    await b.open()
            await b.open()
            await b.add_many(shop.square.many(range(2000)))
    assert (await status_of(b.handle)).total == 2001


async def test_a_batch_that_could_not_be_opened_is_opened_with_the_piece_it_had(
    shop: Shop, engine: Counting
) -> None:
    """Later members are not taken for those of the piece whose answer was lost."""
    async with shop.app.batch() as b:
        b.add(shop.square, 1)
        engine.lose = 4
        with pytest.raises(OutcomeUnknown):
            await b.open()
        b.add(shop.square, 2)
    status = await status_of(b.handle)
    assert (status.sealed, status.total) == (True, 2)


async def test_a_stream_into_a_batch_that_was_deleted_is_refused(shop: Shop) -> None:
    batch = shop.app.batch()
    b = await batch.__aenter__()
    await b.open()
    await b.handle.adelete()
    b.add(shop.square, 1)
    with pytest.raises(UnknownBatch):
        await batch.__aexit__(None)
    assert await shop.app.batches.afind() == []


# --- later additions ---------------------------------------------------------------------


async def test_members_are_added_until_the_batch_is_sealed(shop: Shop) -> None:
    """S3.17: a callback only after that."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1]), seal=False, **shop.callbacks)
        await t.drain()
        await batch.aadd(shop.square.many([2, 3]))
        await shop.square.using(batch=batch.id).aenqueue(4)
        await t.drain()
        assert (shop.told(), (await status_of(batch)).state) == ([], BatchState.OPEN)
        assert await batch.aseal()
        assert not await batch.aseal()
        await t.drain()
        assert shop.told() == [("succeeded", "success"), ("finished", "success")]
        with pytest.raises(BatchSealed):
            await batch.aadd(shop.square.many([5]))
    with pytest.raises(UnknownBatch):
        await BatchHandle(shop.app, "nobody").aadd([])


async def test_an_open_stream_may_be_left_open(shop: Shop) -> None:
    async with shop.app.batch(seal=False) as b:
        b.add(shop.square, 1)
    status = await status_of(b.handle)
    assert (status.sealed, status.total) == (False, 1)


async def test_a_member_adds_members_to_its_own_batch(shop: Shop) -> None:
    """S3.17: also if that is sealed, by emitting; they are there before it can end."""
    app = shop.app

    @app.task
    async def spread(job: Job, n: int) -> None:
        for _ in range(n):
            job.emit(spread.using(batch=job.batch), n - 1)

    async with app.test() as t:
        batch = await app.batch(spread.many([3]), callback=shop.finished)
        await t.drain()
        [(what, status)] = shop.reports
        assert (what, status.total, status.done) == ("finished", 16, 16)
        members = [member.id async for member in batch.amembers()]
        assert len(set(members)) == len(members) == 16


async def test_members_that_share_a_number_are_all_listed(shop: Shop) -> None:
    """Added by many at once, they may: also more of them than a page holds."""
    batch = await shop.app.batch(seal=False)
    for _ in range(2):
        await shop.app.aput_many([shop.square.using(batch=batch.id).job(n) for n in range(600)])
    await batch.aadd(shop.square.many(range(700)))
    found = [member.id async for member in batch.amembers()]
    assert len(set(found)) == len(found) == 1900
    assert len(await asyncio.to_thread(batch.members)) == 1900


# --- nested ------------------------------------------------------------------------------


async def test_a_batch_ends_after_the_batches_inside_of_it(shop: Shop) -> None:
    """S3.20."""
    app, seen = shop.app, list[str]()

    @app.task
    async def told(what: str) -> None:
        seen.append(what)

    async with app.test() as t:
        async with app.batch(callback=told.job("outer")) as outer:
            outer.add(shop.square, 1)
            async with outer.batch(callback=told.job("inner")) as inner:
                inner.add(shop.square.using(delay="1h"), 2)
            await app.batch(shop.square.many([3]), parent=outer.handle)
        await t.drain()
        assert seen == []
        await t.advance("1h")
        assert seen == ["inner", "outer"]
        status = await status_of(outer.handle)
        assert (status.total, status.done) == (3, 3)
        assert (await status_of(inner.handle)).parent == outer.id


async def test_a_nested_batch_that_fails_makes_its_parent_a_partial_success(shop: Shop) -> None:
    """S3.20."""
    async with shop.app.test() as t:
        async with shop.app.batch(**shop.callbacks) as outer:
            outer.add(shop.square, 1)
            await outer.batch(shop.fail.many([0]))
        await t.advance("1h")
    assert [what for what, _ in shop.told()] == ["failed", "finished"]
    assert shop.told()[-1] == ("finished", "partial-success")


def test_nested_batches_from_plain_code(shop: Shop) -> None:
    with shop.app.batch() as outer, outer.batch() as inner:
        inner.add(shop.square, 1)
    status = inner.handle.status()
    assert status is not None
    assert (status.parent, status.sealed) == (outer.id, True)
    shop.app.close()


# --- operating ---------------------------------------------------------------------------


async def test_deleting_a_batch_removes_what_waits_and_calls_nobody(shop: Shop) -> None:
    """S3.13: ready, scheduled and retrying members go; running ones finish."""
    app = shop.app
    go_on = asyncio.Event()

    @app.task
    async def slow() -> None:
        await go_on.wait()
        shop.runs["slow"] += 1

    async with app.test() as t:
        calls = [slow.job(), shop.fail.job(), shop.square.using(delay="1h").job(1)]
        batch = await app.batch(calls, **shop.callbacks)
        await t.advance("1s")
        await app.batch(shop.square.many([7]))  # a stranger's
        shop.runs.clear()
        assert await batch.adelete()
        assert not await batch.adelete()
        go_on.set()
        await t.advance("2h")
        assert shop.runs == {"slow": 1, "square": 1}
    assert shop.told() == []


async def test_cancelling_a_batch_ends_it_and_calls_back(shop: Shop) -> None:
    """F42: cancelled members count as ended, also those of nested batches."""
    async with shop.app.test() as t:
        async with shop.app.batch(callback=shop.finished) as outer:
            outer.add(shop.square, 1)
            await outer.batch(shop.square.many(range(3)))
        assert await outer.handle.acancel() == 4
        await t.drain()
        assert await outer.handle.acancel() == 0
    assert shop.told() == [("finished", "dead")]
    assert shop.runs["square"] == 0


async def test_replaying_dead_members_reopens_nothing_and_is_recorded(shop: Shop) -> None:
    """S3.5, T13."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.fail.many([1, 2]), **shop.callbacks)
        await t.advance("1h")
        before = await status_of(batch)
        assert await batch.areplay() == 2
        await t.advance("1h")
        assert await status_of(batch) == before
        for member in await t.engine.members(batch.id):
            assert "replayed" in [event.kind for event in t.history(member.id)]
    assert [what for what, _ in shop.told()] == ["failed", "finished"]
    assert shop.runs["fail"] == 12


async def test_a_crash_at_any_member_delays_the_callback_and_does_not_double_it(shop: Shop) -> None:
    """S3.7, S3.8, S3.15: killed in the middle of a member, at its very end, and in the callback."""
    async with shop.app.test() as t:
        batch = await shop.app.batch(shop.square.many([1, 2]), callback=shop.finished)
        await t.kill_worker(during=shop.square)
        await t.drain()
        assert shop.told() == []
        await t.advance("15s")
        [first] = shop.reports
        assert first[1].done == 2
        other = await shop.app.batch(shop.square.many([3]), callback=shop.finished)
        member = (await other.aids())["enqueued"][0]
        await t.lose_lease(member)
        await t.drain()
        await t.advance("15s")
        assert len(t.jobs(task=shop.finished)) == 2
        third = await shop.app.batch(shop.square.many([4]), callback=shop.finished)
        await t.kill_worker(during=shop.finished)
        await t.advance("15s")
        assert t.job(callback_id(third.id, "finished")).crashes == 1
        assert len(t.jobs(task=shop.finished)) == 3
    assert batch.id != third.id


def test_every_verb_for_plain_code(shop: Shop) -> None:
    app = shop.app
    with app.test() as t:
        batch = app.batch(shop.square.many([1, 2]), seal=False).enqueue()
        batch.add(shop.square.many([3]))
        assert batch.seal()
        assert len(batch.ids()["enqueued"]) == 3
        t.drain()
        assert batch.finished(timeout="1s").done == 3
        assert [member.result for member in batch.members()] == [b"1", b"4", b"9"]
        assert (batch.cancel(), batch.replay()) == (0, 0)
        assert app.batches.get(batch.id) == app.batches.find()[0] == batch.status()
        assert app.batches.members(batch.id) == batch.members()
        assert app.batches.ids(batch.id) == batch.ids()
        assert not app.batches.seal(batch.id)
        assert (app.batches.cancel(batch.id), app.batches.replay(batch.id)) == (0, 0)
        assert app.batches.delete(batch.id)
        assert not batch.delete()
        other = app.batch(shop.square.many([4])).enqueue()
        with pytest.raises(TimeoutError, match="has not ended"):
            other.finished(timeout="20ms")
    assert repr(batch) == f"<BatchHandle {batch.id}>"


async def test_batches_are_listed(shop: Shop) -> None:
    made = [await shop.app.batch(shop.square.many([n])) for n in range(3)]
    listed = await shop.app.batches.afind(limit=2)
    assert [status.id for status in listed] == sorted(batch.id for batch in made)[:2]
    [last] = await shop.app.batches.afind(after=listed[-1].id)
    assert last.id == max(batch.id for batch in made)
    assert len(await shop.app.jobs.afind(Filter(batch=last.id))) == 1


async def test_being_a_member_takes_no_call_more(shop: Shop) -> None:
    """S3.14: nothing is asked before a member runs, and its batch steps in the call that settles it."""
    calls: dict[str, Counter[str]] = {}
    for kind in ("plain", "member"):
        async with shop.app.test() as t:
            counted = calls[kind] = Counter()
            if kind == "plain":
                await shop.square.many(range(100)).aenqueue()
            else:
                await shop.app.batch(shop.square.many(range(100)))
            count_calls(t.engine, counted)
            await t.drain()
    assert calls["member"] == calls["plain"]
    assert calls["plain"]["exchange"]


def count_calls(engine: Any, counted: Counter[str]) -> None:
    def counting(name: str, real: Any) -> Any:
        def call(*args: Any, **said: Any) -> Any:
            counted[name] += 1
            return real(*args, **said)

        return call

    for name in ("lease", "settle", "exchange", "get", "batch", "members", "put", "note"):
        setattr(engine, name, counting(name, getattr(engine, name)))


def isolated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """An app that child processes can make again, with an engine that they can reach."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("ISOLATED_FLOW_URL", f"sqlite:///{folder}/jobs.db")
    monkeypatch.delitem(sys.modules, "isolated_flow", raising=False)  # and back again after this test
    app = load_app("isolated_flow:app")
    assert isinstance(app, App)
    return app


@pytest.mark.parametrize("how", ["async", "thread", "process"])
async def test_what_a_task_emits_is_put_when_it_is_done_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """S0.39, T4: wherever it runs; with ids that follow from its own, so a second run makes no second job."""
    app = isolated(tmp_path, monkeypatch)
    handle = await app.tasks[f"emit_{how}"].aenqueue()
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    record = await handle.astatus()
    assert record is not None
    assert (record.state, record.attempts) == (State.DONE, 2)
    found = await app.jobs.afind(Filter(task="emitted"))
    assert [each.id for each in found] == [derive_id(handle.id, "emit", n) for n in range(2)]
    assert [each.state for each in found] == [State.DONE] * 2
    await app.aclose()


async def test_a_callback_in_a_child_process_gets_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = isolated(tmp_path, monkeypatch)
    batch = await app.batch(app.tasks["double_apart"].many([1, 2]), callback=app.tasks["report_apart"].job())
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()
    record = await app.jobs.aget(callback_id(batch.id, "finished"))
    assert record is not None
    assert record.result == b'"success: 2 of 2"'
    await app.aclose()


async def test_a_hundred_batches_of_two_call_back_a_hundred_times(shop: Shop) -> None:
    """F42, S3.6: members that end in the same moment."""
    async with shop.app.test() as t:
        for _ in range(100):
            await shop.app.batch(shop.square.many([1, 2]), callback=shop.finished)
        await t.drain()
        assert len(t.jobs(task=shop.finished)) == 100
    assert [status.done for _, status in shop.reports] == [2] * 100

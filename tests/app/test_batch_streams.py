"""Batches that are filled piece by piece, whatever becomes of a piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.app.shop import Broken, Shop, fill_and_break, status_of

from propolis import App
from propolis.app.batch.new_batch import BatchHandle, NewBatch
from propolis.core.envelope import Envelope
from propolis.core.protocols import Receipt
from propolis.engines.memory import MemoryEngine
from propolis.errors import (
    BadSetting,
    EngineUnavailable,
    OutcomeUnknown,
    PropolisError,
    UnknownBatch,
)
from propolis.values import BatchState


class Counting(MemoryEngine):
    """Remembers how much was put at once, and how much was made until then; loses the next `lose` answers."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[int] = []
        self.made: list[int] = []  # by whoever puts
        self.made_before: list[int] = []  # of that, before each piece
        self.lose = 0

    async def put(self, jobs: Sequence[Envelope], *, token: str | None = None) -> list[Receipt]:
        self._remember(jobs)
        return self._answer(await super().put(jobs, token=token))

    async def put_batch(self, batch: Any, jobs: Sequence[Envelope] = (), **options: Any) -> list[Receipt]:
        self._remember(jobs)
        return self._answer(await super().put_batch(batch, jobs, **options))

    def _remember(self, jobs: Sequence[Envelope]) -> None:
        self.pieces.append(len(jobs))
        self.made_before.append(len(self.made))

    def _answer(self, receipts: list[Receipt]) -> list[Receipt]:
        if self.lose:
            self.lose -= 1
            raise OutcomeUnknown("the answer was lost")
        return receipts


@pytest.fixture
def engine(shop: Shop) -> Counting:
    engine = Counting()
    shop.app.client._engine = engine
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
    """S3.21: and its calls are made as they are needed: a piece ahead of what is put, and no more."""

    def numbers() -> Any:
        for n in range(22_345):
            engine.made.append(n)
            yield n

    batch = await shop.app.batch(shop.square.many(numbers()))
    assert engine.pieces == [*[1000] * 22, 345]
    looked_at = 10_001  # to see whether all of it goes into one step
    ahead = [min(1000 * (n + 2), 22_345) for n in range(23)]
    assert engine.made_before == [max(looked_at, made) for made in ahead]
    status = await status_of(batch)
    assert (status.sealed, status.total) == (True, 22_345)


async def test_what_a_stream_adds_is_made_as_it_is_needed(shop: Shop, engine: Counting) -> None:
    """S3.21: of what an iterator makes, only one piece is in memory."""

    def numbers() -> Any:
        for n in range(3500):
            engine.made.append(n)
            yield n

    async with shop.app.batch() as b:
        await b.add_many(shop.square.many(numbers()))
    assert engine.pieces == [1000, 1000, 1000, 500]
    assert engine.made_before == [1000, 2000, 3000, 3500]


async def test_a_stream_that_raises_leaves_an_open_batch_that_expires(shop: Shop) -> None:
    """S3.2, S3.17: what was put runs, nobody is called, and it is forgotten after a day."""
    async with shop.app.test() as t:
        batch = shop.app.batch(**shop.callbacks)
        with pytest.raises(Broken):
            await fill_and_break(batch, shop.square.many(range(1500)))
        handle = BatchHandle(shop.app.client, batch.id)
        await t.drain()
        status = await status_of(handle)
        assert (status.state, status.sealed, status.total, status.done) == ("open", False, 1000, 1000)
        await t.advance("23h")
        assert await handle.astatus() is not None
        await t.advance("61m")
        assert await handle.astatus() is None
    assert shop.called_back() == []


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
        with pytest.raises(PropolisError):
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
    shop.app.client._engine = engine
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


async def test_whoever_stops_filling_leaves_nothing_on_its_way(shop: Shop, overlapping: Overlapping) -> None:
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

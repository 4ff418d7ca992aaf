"""Feeds: bounded logs whose readers miss nothing, or hear that they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from propolis.core.protocols import Feeds
from propolis.core.records import MAX_ENTRY, MAX_PUBLISH, FeedPage
from propolis.errors import BadSetting, RecordTooLarge
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import A_MOMENT, HOUR

AnotherFeeds = Callable[[], Awaitable[Feeds]]

LONG = 600.0  # seconds: a test that has to wait for so long fails by its time


async def published(feeds: Feeds, *entries: bytes, feed: str = "f", **bounds: object) -> int:
    """The last number of what is surely stored."""
    number = await feeds.publish(feed, entries, **bounds)  # type: ignore[arg-type]  # keep, keep_bytes, keep_for
    assert number is not None
    return number


async def page_of(feeds: Feeds, after: int | None = 0, *, feed: str = "f", limit: int = 1000) -> FeedPage:
    return (await feeds.follow({feed: after}, limit=limit))[feed]


def values(page: FeedPage) -> list[bytes]:
    return [entry.value for entry in page.entries]


class Follower:
    """Reads a feed to its end, page by page, and checks what each page promises."""

    def __init__(self, feeds: Feeds, *, limit: int) -> None:
        self._feeds = feeds
        self._limit = limit
        self.seen: dict[int, bytes] = {}
        self.gaps: list[tuple[int, int]] = []  # between these numbers something may be missing

    async def read_until(self, over: asyncio.Event) -> None:
        after = 0
        while True:
            last_round = over.is_set()
            page = (await self._feeds.follow({"f": after}, limit=self._limit, wait=0.01))["f"]
            numbers = [entry.number for entry in page.entries]
            assert numbers == sorted(set(numbers))
            assert all(number > after for number in numbers)
            if page.gap:
                self.gaps.append((after, page.after))
            self.seen |= {entry.number: entry.value for entry in page.entries}
            if last_round and not numbers:
                return
            after = page.after

    def excuses(self, number: int) -> bool:
        return any(first < number <= last for first, last in self.gaps)


async def publish_many(feeds: Feeds, name: str, count: int, keep: int) -> dict[int, bytes]:
    stored = {}
    for n in range(count):
        value = f"{name} {n}".encode()
        number = await feeds.publish("f", [value], keep=keep)
        if number is not None:
            stored[number] = value
    return stored


async def read_while_many_publish(
    feeds: Feeds, another_feeds: AnotherFeeds, *, keep: int, limit: int
) -> tuple[Follower, dict[int, bytes]]:
    handles = [await another_feeds() for _ in range(3)]
    follower, over = Follower(feeds, limit=limit), asyncio.Event()
    reading = asyncio.create_task(follower.read_until(over))
    stored = await asyncio.gather(
        *(publish_many(handle, f"handle {n}", 20, keep) for n, handle in enumerate(handles))
    )
    over.set()
    await reading
    return follower, {number: value for each in stored for number, value in each.items()}


class PublishingPromise:
    async def test_entries_are_followed_in_their_order(self, feeds: Feeds) -> None:
        second = await published(feeds, b"1", b"2")
        third = await published(feeds, b"3")
        page = await page_of(feeds)
        assert (values(page), page.last, page.gap) == ([b"1", b"2", b"3"], third, False)
        assert [entry.number for entry in page.entries][1:] == [second, third]
        assert page.entries[0].number < second < third
        later = await page_of(feeds, second)
        assert (values(later), later.gap) == ([b"3"], False)
        assert await page_of(feeds, third) == FeedPage([], third)

    async def test_entries_outlive_the_handle_that_published_them(
        self, feeds: Feeds, another_feeds: AnotherFeeds
    ) -> None:
        await published(feeds, b"\0\xff", b"")
        assert values(await page_of(await another_feeds())) == [b"\0\xff", b""]

    async def test_no_number_asks_only_for_the_last_one(self, feeds: Feeds) -> None:
        assert await page_of(feeds, None) == FeedPage([], 0)
        last = await published(feeds, b"1", b"2")
        assert await page_of(feeds, None) == FeedPage([], last)

    async def test_nothing_published_is_nothing(self, feeds: Feeds) -> None:
        assert await feeds.publish("f", []) is None
        assert await page_of(feeds) == FeedPage([], 0)
        assert feeds.dropped == 0

    async def test_a_feed_that_is_not_there_keeps_the_place_of_its_reader(self, feeds: Feeds) -> None:
        assert await page_of(feeds, 17) == FeedPage([], 17)

    async def test_a_limit_gives_the_first_and_one_goes_on_after_them(self, feeds: Feeds) -> None:
        await published(feeds, b"1", b"2", b"3")
        last = await published(feeds, b"4", b"5")
        first = await page_of(feeds, limit=2)
        assert (values(first), first.last) == ([b"1", b"2"], last)
        second = await page_of(feeds, first.after, limit=2)
        third = await page_of(feeds, second.after, limit=2)
        assert (values(second), values(third)) == ([b"3", b"4"], [b"5"])
        assert [page.gap for page in (first, second, third)] == [False] * 3

    async def test_several_feeds_are_followed_at_once(self, feeds: Feeds) -> None:
        names = ["a", "a:", "a:0000000000000001", "b"]
        numbers = {name: await published(feeds, name.encode(), feed=name) for name in names}
        pages = await feeds.follow({**dict.fromkeys(names, 0), "a": numbers["a"], "b": None, "none": 0})
        assert {name: values(page) for name, page in pages.items()} == {
            "a": [],
            "a:": [b"a:"],
            "a:0000000000000001": [b"a:0000000000000001"],
            "b": [],
            "none": [],
        }
        assert (pages["a"].last, pages["b"].last, pages["none"].last) == (numbers["a"], numbers["b"], 0)

    async def test_no_number_comes_back_when_the_clock_does(self, feeds: Feeds, clock: FakeClock) -> None:
        numbers = []
        for _ in range(3):
            numbers.append(await published(feeds, b"1", b"2"))
            clock.set_back(HOUR)
        assert numbers == sorted(set(numbers))
        assert len((await page_of(feeds)).entries) == 6

    async def test_beyond_its_number_of_entries_the_oldest_are_forgotten(self, feeds: Feeds) -> None:
        numbers = [await published(feeds, str(n).encode(), keep=3) for n in range(5)]
        for after, gap in [(0, True), (numbers[0], True), (numbers[1], False)]:
            page = await page_of(feeds, after)
            assert (values(page), page.gap) == ([b"2", b"3", b"4"], gap)
        page = await page_of(feeds, numbers[2])
        assert (values(page), page.gap) == ([b"3", b"4"], False)

    async def test_a_gap_is_told_once(self, feeds: Feeds) -> None:
        first = await published(feeds, b"1", keep=2)
        for n in range(3):
            await published(feeds, str(n).encode(), keep=2)
        page = await page_of(feeds, first, limit=1)
        assert page.gap
        assert not (await page_of(feeds, page.after)).gap

    async def test_of_more_than_is_kept_the_last_are_stored(self, feeds: Feeds) -> None:
        await published(feeds, b"0", keep=2)
        page = await page_of(feeds)
        await published(feeds, b"1", b"2", b"3", b"4", keep=2)
        later = await page_of(feeds, page.after)
        assert (values(later), later.gap) == ([b"3", b"4"], True)

    async def test_beyond_its_bytes_the_oldest_are_forgotten(self, feeds: Feeds) -> None:
        numbers = [await published(feeds, b"x" * 40, keep_bytes=100) for _ in range(4)]
        page = await page_of(feeds)
        assert ([entry.number for entry in page.entries], page.gap) == (numbers[2:], True)
        last = await published(feeds, b"y" * 200, keep_bytes=100)
        page = await page_of(feeds, numbers[3])
        assert ([entry.number for entry in page.entries], page.gap) == ([last], False)

    async def test_a_ring_that_is_made_smaller_shrinks_with_each_publish(self, feeds: Feeds) -> None:
        for n in range(6):
            await published(feeds, str(n).encode())
        for n in range(6, 12):
            await published(feeds, str(n).encode(), keep=2)
        assert values(await page_of(feeds)) == [b"10", b"11"]

    async def test_a_feed_that_nobody_writes_to_is_forgotten(self, feeds: Feeds, clock: FakeClock) -> None:
        before = await published(feeds, b"1", keep_for=HOUR)
        clock.advance(HOUR - A_MOMENT)
        assert values(await page_of(feeds)) == [b"1"]
        clock.advance(A_MOMENT)
        assert await page_of(feeds, before) == FeedPage([], before)
        assert await page_of(feeds) == FeedPage([], 0)

        last = await published(feeds, b"2", keep_for=HOUR)
        assert last > before
        old, new = await page_of(feeds, before), await page_of(feeds)
        assert (values(old), old.gap) == ([b"2"], True)
        assert (values(new), new.gap) == ([b"2"], False)

    async def test_whoever_writes_keeps_a_feed(self, feeds: Feeds, clock: FakeClock) -> None:
        number = await published(feeds, b"1", keep_for=HOUR)
        for n in range(3):
            clock.advance(HOUR / 2)
            number = await published(feeds, str(n).encode(), keep_for=HOUR)
        clock.advance(HOUR / 2)
        page = await page_of(feeds, number - 1)
        assert (values(page), page.last) == ([b"2"], number)

    async def test_a_wait_ends_with_the_first_entry(self, feeds: Feeds, another_feeds: AnotherFeeds) -> None:
        other = await another_feeds()
        ball = 0

        async def answer() -> None:
            after = 0
            for n in range(3):
                page = (await other.follow({"ping": after, "silent": 0}, wait=LONG))["ping"]
                assert values(page) == [str(n).encode()]
                after = page.after
                await published(other, values(page)[0], feed="pong")

        answering = asyncio.create_task(answer())
        for n in range(3):
            await published(feeds, str(n).encode(), feed="ping")
            page = (await feeds.follow({"pong": ball}, wait=LONG))["pong"]
            assert values(page) == [str(n).encode()]
            ball = page.after
        await answering

    async def test_a_wait_for_nothing_ends_when_its_time_is_over(self, feeds: Feeds) -> None:
        last = await published(feeds, b"1")
        assert await feeds.follow({"f": last, "g": 0}, wait=0.05) == {
            "f": FeedPage([], last),
            "g": FeedPage([], 0),
        }

    async def test_nobody_waits_for_what_is_there(self, feeds: Feeds) -> None:
        last = await published(feeds, b"1")
        assert values((await feeds.follow({"f": 0}, wait=LONG))["f"]) == [b"1"]
        assert (await feeds.follow({"f": None}, wait=LONG))["f"].last == last

    async def test_a_feed_has_any_name(self, feeds: Feeds) -> None:
        for name in ["a b", "{x}:y", "é\N{HONEYBEE}", "'; --", "%s$1", "*", "x" * 390]:
            last = await published(feeds, name.encode(), feed=name)
            assert await page_of(feeds, last, feed=name) == FeedPage([], last)
            assert values(await page_of(feeds, feed=name)) == [name.encode()]

    async def test_large_entries_come_as_they_went(self, feeds: Feeds) -> None:
        sent = [bytes([n]) * MAX_ENTRY for n in range(5)] + [b"small"] * 100
        await published(feeds, *sent)
        assert values(await page_of(feeds)) == sent

    async def test_a_reader_misses_nothing_while_many_publish(
        self, feeds: Feeds, another_feeds: AnotherFeeds
    ) -> None:
        follower, stored = await read_while_many_publish(feeds, another_feeds, keep=1000, limit=7)
        assert stored
        assert follower.seen.items() >= stored.items()
        assert follower.gaps == []

    async def test_a_reader_hears_of_all_that_it_misses(
        self, feeds: Feeds, another_feeds: AnotherFeeds
    ) -> None:
        follower, stored = await read_while_many_publish(feeds, another_feeds, keep=2, limit=1)
        missed = [number for number in stored if number not in follower.seen]
        assert [number for number in missed if not follower.excuses(number)] == []

    async def test_what_is_too_large_or_has_no_name_is_refused(self, feeds: Feeds) -> None:
        for entries in ([b"x" * (MAX_ENTRY + 1)], [b"x" * MAX_ENTRY] * (MAX_PUBLISH // MAX_ENTRY + 1)):
            with pytest.raises(RecordTooLarge):
                await feeds.publish("f", entries)
        for name in ("", "a\0", "x" * 391):
            with pytest.raises(BadSetting):
                await feeds.publish(name, [b""])
        for bounds in (
            {"keep": 0},
            {"keep_bytes": 0},
            {"keep_for": timedelta(0)},
            {"keep_for": timedelta.max},
        ):
            with pytest.raises(BadSetting):
                await published(feeds, b"", **bounds)
        with pytest.raises(BadSetting):
            await feeds.publish("f", [b""] * 1001)
        with pytest.raises(BadSetting):
            await feeds.follow({"f": 0}, limit=0)
        for number in (-1, 1 << 63):
            with pytest.raises(BadSetting):
                await feeds.follow({"f": number})
        assert await page_of(feeds) == FeedPage([], 0)

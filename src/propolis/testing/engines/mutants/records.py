"""Engines whose records or feeds are wrong in one way each; `check_records` must catch every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from msgspec.structs import replace

from propolis.core.protocols import Engine, Feeds, Records, Swept
from propolis.core.records import Change, FeedPage, Read, Swap, Swapped
from propolis.testing.clock import FakeClock
from propolis.testing.engines.mutants.wrapped import Wrapped

FOR_EVER = timedelta(days=3650)


class WithRecords(Wrapped):
    """Passes the verbs of records and feeds on as well."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.inner_records = cast(Records, engine)
        self.inner_feeds = cast(Feeds, engine)

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await self.inner_records.swap(swaps, token=token)

    async def records(self, kind: str, **asked: Any) -> Read:
        return await self.inner_records.records(kind, **asked)

    async def publish(self, feed: str, entries: Sequence[bytes], **bounds: Any) -> int | None:
        return await self.inner_feeds.publish(feed, entries, **bounds)

    async def follow(self, after: dict[str, int | None], **asked: Any) -> dict[str, FeedPage]:
        return await self.inner_feeds.follow(after, **asked)


class VersionComesBack(WithRecords):
    """A record that was removed and is stored anew has the version that it had before."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.shown: dict[tuple[str, str], tuple[int, int]] = {}  # the real version, and the one that is shown
        self.removed: dict[tuple[str, str], int] = {}
        self.answered: dict[str, list[Swapped]] = {}

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        if token in self.answered:
            return self.answered[token]
        answers = [await self._swap(swap) for swap in swaps]
        if token is not None:
            self.answered[token] = answers
        return answers

    async def _swap(self, swap: Swap) -> Swapped:
        meant = tuple(replace(change, expected=self._real(change)) for change in swap.changes)
        [answer] = await self.inner_records.swap([replace(swap, changes=meant)])
        if answer.version is None:
            return answer
        shown = answer.version
        if len(meant) == 1 and meant[0].value is not None:  # they all have one version
            shown = self.removed.pop((meant[0].kind, meant[0].name), shown)
        for change in meant:
            place = (change.kind, change.name)
            before = self.shown.pop(place, None)
            if change.value is not None:
                self.shown[place] = (answer.version, shown)
            elif before is not None:
                self.removed[place] = before[1]
        return replace(answer, version=shown)

    def _real(self, change: Change) -> int | None:
        real, shown = self.shown.get((change.kind, change.name), (0, 0))
        return real if change.expected == shown else change.expected

    async def records(self, kind: str, **asked: Any) -> Read:
        read = await self.inner_records.records(kind, **asked)
        shown = [replace(each, version=self.shown[kind, each.name][1]) for each in read.records]
        return replace(read, records=shown)


class SwapHalfDone(WithRecords):
    """Of a swap that is refused, the changes that could be made are made."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        answers = await self.inner_records.swap(swaps, token=token)
        for swap, answer in zip(swaps, answers, strict=True):
            if answer.version is None:
                await self.inner_records.swap([Swap(changes=(change,)) for change in swap.changes])
        return answers


class RefusalHinders(WithRecords):
    """After one that is refused nothing else of its call happens."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        answers: list[Swapped] = []
        for n, swap in enumerate(swaps):
            named = None if token is None else f"{token} {n}"
            [answer] = await self.inner_records.swap([swap], token=named)
            answers.append(answer)
            if answer.version is None:
                return [*answers, *[answer] * (len(swaps) - len(answers))]
        return answers


class SwapTokenForgotten(WithRecords):
    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:  # noqa: ARG002
        return await self.inner_records.swap(swaps)


class VersionIgnored(WithRecords):
    """What must not be there is replaced all the same."""

    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        blind = [
            replace(
                swap,
                changes=tuple(
                    replace(change, expected=None) if change.expected == 0 else change
                    for change in swap.changes
                ),
            )
            for swap in swaps
        ]
        return await self.inner_records.swap(blind, token=token)


class SwapWithoutPuts(WithRecords):
    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        return await self.inner_records.swap([replace(swap, puts=()) for swap in swaps], token=token)


class RecordNeverExpires(WithRecords):
    async def swap(self, swaps: Sequence[Swap], *, token: str | None = None) -> list[Swapped]:
        lasting = [
            replace(swap, changes=tuple(replace(change, expires_in=None) for change in swap.changes))
            for swap in swaps
        ]
        return await self.inner_records.swap(lasting, token=token)


class DueRecordsUntold(WithRecords):
    async def sweep(self, **asked: Any) -> Swept:
        return replace(await self.engine.sweep(**asked), records_due=())


class EntryOvertaken(WithRecords):
    """Each third entry is seen only after somebody has seen a later one, as where commits overtake others."""

    def __init__(self, engine: Engine, clock: FakeClock) -> None:
        super().__init__(engine, clock)
        self.published = 0
        self.late: set[tuple[str, int]] = set()

    async def publish(self, feed: str, entries: Sequence[bytes], **bounds: Any) -> int | None:
        number = await self.inner_feeds.publish(feed, entries, **bounds)
        self.published += 1
        if self.published % 3 == 0 and number is not None:
            self.late.add((feed, number))
        return number

    async def follow(self, after: dict[str, int | None], **asked: Any) -> dict[str, FeedPage]:
        pages = await self.inner_feeds.follow(after, **asked)
        return {feed: self._page(feed, page) for feed, page in pages.items()}

    def _page(self, feed: str, page: FeedPage) -> FeedPage:
        late = {number for name, number in self.late if name == feed and number < page.last}
        given = [entry for entry in page.entries if entry.number not in late]
        if given and given[-1].number == page.last:
            self.late -= {(feed, number) for number in late}
        return FeedPage(given, page.last, page.gap)


class GapUntold(WithRecords):
    async def follow(self, after: dict[str, int | None], **asked: Any) -> dict[str, FeedPage]:
        pages = await self.inner_feeds.follow(after, **asked)
        return {feed: replace(page, gap=False) for feed, page in pages.items()}


class RingWithoutEnd(WithRecords):
    async def publish(self, feed: str, entries: Sequence[bytes], **bounds: Any) -> int | None:
        return await self.inner_feeds.publish(feed, entries, **{**bounds, "keep": 1000})


class FeedNeverForgotten(WithRecords):
    async def publish(self, feed: str, entries: Sequence[bytes], **bounds: Any) -> int | None:
        return await self.inner_feeds.publish(feed, entries, **{**bounds, "keep_for": FOR_EVER})


RECORD_MUTANTS: dict[str, type[WithRecords]] = {
    "a version that comes back": VersionComesBack,
    "a swap half done": SwapHalfDone,
    "a refused swap that hinders another": RefusalHinders,
    "a token of a swap forgotten": SwapTokenForgotten,
    "a version ignored": VersionIgnored,
    "a swap without its puts": SwapWithoutPuts,
    "a record that never expires": RecordNeverExpires,
    "due records untold": DueRecordsUntold,
    "an entry overtaken": EntryOvertaken,
    "a gap untold": GapUntold,
    "a ring without an end": RingWithoutEnd,
    "a feed that is never forgotten": FeedNeverForgotten,
}

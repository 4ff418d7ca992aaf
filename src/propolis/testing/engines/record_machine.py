"""Records and feeds beside a plain model of them: random calls to both, compared after every step.

`check_records` is the entry, as `check_engine` is for jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from propolis.core.protocols import Engine, Feeds, Records
from propolis.core.records import KEEP, Change, FeedPage, Keep, Read, Record, Swap, Swapped
from propolis.testing.clock import FakeClock
from propolis.testing.engines.lives import live
from propolis.testing.engines.machine import Difference, MadeCall
from propolis.testing.engines.samples import a_job

T = TypeVar("T")

KINDS, NAMES, FEEDS = ("k", "l"), ("a", "b", "c"), ("f", "g")
SECOND = timedelta(seconds=1)
SPANS = (None, None, SECOND, 3 * SECOND)
KEEP_ENTRIES, KEEP_FOR = 4, 20 * SECOND


class KeepsAll(Engine, Records, Feeds, Protocol):
    """What is compared."""


class DrawnChange(NamedTuple):
    kind: str
    name: str
    value: bytes | Keep | None
    expected: str  # any, none, right, old
    at: timedelta | None
    expires_in: timedelta | None


CHANGE = st.builds(
    DrawnChange,
    st.sampled_from(KINDS),
    st.sampled_from(NAMES),
    st.sampled_from([b"1", b"2", b"3", KEEP, None]),
    st.sampled_from(["any", "any", "none", "right", "right", "old"]),
    st.sampled_from(SPANS),
    st.sampled_from(SPANS),
)
SWAP = st.tuples(st.lists(CHANGE, max_size=3, unique_by=lambda c: c[:2]), st.sampled_from([0, 0, 1]))
SWAPS = st.lists(SWAP, min_size=1, max_size=3)


def check_records(
    make: Callable[[FakeClock], Engine],
    *,
    examples: int = 200,
    steps: int = 40,
    seed: int | None = None,
    shrink: bool = True,
) -> None:
    """Hold an engine that keeps records and feeds to what is promised of them: see `check_engine`."""

    live(lambda: RecordMachine(make), examples, steps, seed, shrink=shrink)


class ModelFeed:
    """All that was ever published to a feed, and since when of it something must be there."""

    def __init__(self) -> None:
        self.entries: dict[int, bytes] = {}
        self.places = [0]  # where readers may have stopped
        self.born = 0
        self.expires_at: datetime | None = None

    @property
    def last(self) -> int:
        return max(self.entries, default=0)


class RecordMachine(RuleBasedStateMachine):
    """The calls, and after each of them the comparison."""

    def __init__(self, make: Callable[[FakeClock], Engine]) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.calls: list[MadeCall] = []
        self.stored: dict[tuple[str, str], Record] = {}
        self.versions: dict[tuple[str, str], list[int]] = {}
        self.answered: dict[str, list[Swapped]] = {}
        self.jobs: list[str] = []
        self.made = 0
        self.feeds = {name: ModelFeed() for name in FEEDS}
        self.engine: KeepsAll = make(self.clock)  # type: ignore[assignment]  # whoever calls this says so
        self.runner = asyncio.Runner()
        self._run(self.engine.open())

    def teardown(self) -> None:
        with self.runner:
            self._run(self.engine.close())

    # --- records -----------------------------------------------------------------------------

    @rule(drawn=SWAPS, token=st.sampled_from([None, None, "t", "u"]))
    def swap(self, drawn: Sequence[tuple[list[DrawnChange], int]], token: str | None) -> None:
        swaps = [self._swap(changes, puts) for changes, puts in drawn]
        answers = self._ask("swap", swaps, token=token)
        if token in self.answered:
            self._compare("the answer to a repeated call", self.answered[token], answers)
            return
        if token is not None:
            self.answered[token] = answers
        self._compare("the number of answers", len(swaps), len(answers))
        for swap, answer in zip(swaps, answers, strict=True):
            wrong = self._first_wrong(swap)
            self._compare("what stands in the way of a swap", wrong or "", answer.name)
            self._compare("whether a swap is refused", wrong is not None, answer.version is None)
            if answer.version is not None:
                self._apply(swap, answer.version)

    def _swap(self, drawn: list[DrawnChange], puts: int) -> Swap:
        changes = tuple(
            Change(
                kind=each.kind,
                name=each.name,
                value=each.value,
                expected=self._expected(each),
                at=each.at,
                expires_in=each.expires_in,
            )
            for each in drawn
        )
        self.made += puts
        return Swap(changes=changes, puts=tuple(a_job(id=f"job-{self.made}") for _ in range(puts)))

    def _expected(self, drawn: DrawnChange) -> int | None:
        place = (drawn.kind, drawn.name)
        record = self._live(place)
        right = 0 if record is None else record.version
        old = [version for version in self.versions.get(place, ()) if version != right]
        return {"any": None, "none": 0, "right": right, "old": old[-1] if old else 1}[drawn.expected]

    def _live(self, place: tuple[str, str]) -> Record | None:
        record = self.stored.get(place)
        if record is None or (record.expires_at is not None and record.expires_at <= self.clock.now):
            return None
        return record

    def _first_wrong(self, swap: Swap) -> str | None:
        """The name of the first record whose version is another one."""
        for change in swap.changes:
            record = self._live((change.kind, change.name))
            version = 0 if record is None else record.version
            if change.expected not in (None, version) or (change.value is KEEP and record is None):
                return change.name
        return None

    def _apply(self, swap: Swap, version: int) -> None:
        now = self.clock.now
        for change in swap.changes:
            place = (change.kind, change.name)
            known = self.versions.setdefault(place, [0])
            self._compare("that no version comes back", True, version > max(known))
            known.append(version)
            old = self.stored.pop(place, None)
            if change.value is None:
                continue
            assert not isinstance(change.at, datetime)
            self.stored[place] = Record(
                kind=change.kind,
                name=change.name,
                value=old.value if change.value is KEEP and old else change.value,  # type: ignore[arg-type]  # it is there
                version=version,
                at=None if change.at is None else now + change.at,
                expires_at=None if change.expires_in is None else now + change.expires_in,
            )
        self.jobs += [job.id for job in swap.puts]

    # --- feeds -------------------------------------------------------------------------------

    @rule(name=st.sampled_from(FEEDS), count=st.sampled_from([1, 1, 1, 2, 6]))
    def publish(self, name: str, count: int) -> None:
        feed = self.feeds[name]
        values = [f"{self.made + n}".encode() for n in range(count)]
        self.made += count
        last = self._ask("publish", name, values, keep=KEEP_ENTRIES, keep_for=KEEP_FOR)
        self._compare("that numbers grow", True, last is not None and last - count >= feed.last)
        if self._is_forgotten(feed):
            feed.born = last - count + 1
        feed.entries |= {last - count + 1 + n: value for n, value in enumerate(values)}
        feed.expires_at = self.clock.now + KEEP_FOR

    @rule(name=st.sampled_from(FEEDS), pick=st.integers(0, 1000), limit=st.sampled_from([1, 2, 100]))
    def follow(self, name: str, pick: int, limit: int) -> None:
        """From where some reader may have stopped."""
        feed = self.feeds[name]
        places = feed.places[-4:]
        after = places[pick % len(places)]
        page = self._ask("follow", {name: after}, limit=limit)[name]
        if self._is_forgotten(feed):
            self._compare("a feed that is forgotten", FeedPage([], after), page)
        else:
            self._check_page(feed, after, limit, page)
        feed.places.append(page.after)

    def _is_forgotten(self, feed: ModelFeed) -> bool:
        return feed.expires_at is None or feed.expires_at <= self.clock.now

    def _check_page(self, feed: ModelFeed, after: int, limit: int, page: FeedPage) -> None:
        given = {entry.number: entry.value for entry in page.entries}
        self._compare("the last number", feed.last, page.last)
        self._compare("entries that were published", {n: feed.entries.get(n) for n in given}, given)
        self._compare("that they come in their order", sorted(given), [e.number for e in page.entries])
        self._compare("that they are few enough", True, len(given) <= min(limit, KEEP_ENTRIES))
        until = page.entries[-1].number if given else feed.last
        missing = [n for n in feed.entries if after < n <= until and n not in given]
        newest = sorted(feed.entries)[-1:]
        self._compare("that the newest is not missing", [], [n for n in newest if n in missing])
        reborn = 0 < after < feed.born
        lost = reborn or any(n >= feed.born for n in missing)
        self._compare("whether some are missing", lost, page.gap)
        if missing and given:
            self._compare("that the missing ones are the oldest", True, max(missing) < min(given))

    # --- time --------------------------------------------------------------------------------

    @rule(span=st.sampled_from([SECOND, 2 * SECOND, 2 * SECOND, KEEP_FOR]))
    def advance(self, span: timedelta) -> None:
        self.calls.append(MadeCall("clock.advance", (span,), {}))
        self.clock.advance(span)

    @rule()
    def sweep(self) -> None:
        swept = self._ask("sweep")
        due = sorted({record.kind for record in self._due()})
        self._compare("the kinds that are due", due, [kind for kind in swept.records_due if kind in KINDS])

    def _due(self) -> list[Record]:
        live = [record for place in self.stored if (record := self._live(place)) is not None]
        return [record for record in live if record.at is not None and record.at <= self.clock.now]

    # --- comparing ---------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        for kind in KINDS:
            mine = sorted(
                (it for place in self.stored if (it := self._live(place)) and it.kind == kind),
                key=lambda record: record.name,
            )
            read: Read = self._run(self.engine.records(kind, limit=2))
            rest = self._run(self.engine.records(kind, after=read.after)) if read.after else None
            self._compare("the records", mine, [*read.records, *(rest.records if rest else ())])
            newest = self._run(self.engine.records(kind, newest=True, limit=1))
            self._compare("the newest name", mine[-1:], newest.records)
            due = sorted((it for it in self._due() if it.kind == kind), key=lambda it: (it.at, it.name))
            found = self._run(self.engine.records(kind, due=True))
            self._compare("what is due", due, found.records)
            self._compare("the time", self.clock.now, found.now)
        counts = self._run(self.engine.queues()).get("default")
        self._compare("how many jobs were put", len(self.jobs), counts.put if counts else 0)

    def _ask(self, verb: str, *args: object, **options: object) -> Any:
        self.calls.append(MadeCall(verb, args, options))
        return self._run(getattr(self.engine, verb)(*args, **options))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.get_loop().run_until_complete(call)

    def _compare(self, what: str, expected: object, found: object) -> None:
        if expected != found:
            calls = "\n    ".join(map(str, self.calls))
            raise Difference(f"{what} must be\n    {expected!r}\nand is\n    {found!r}\nafter\n    {calls}")

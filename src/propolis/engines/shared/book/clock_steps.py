"""The steps that see to a clock that goes back (L2): leases and delays that were counted from it follow."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from propolis.engines.shared.book.keeping import B, E, Keeping, Place
from propolis.engines.shared.book.store import Table

TOLERATED_US = 1_000_000  # a clock that is corrected by less is left alone
REMEMBERED_US = 10_000_000  # how far the time that sweeps remember may lag behind
CLOCK = "clock"
FIRST = (0, 0)  # before all places


class Seen(Struct, omit_defaults=True):
    """The largest time that was seen, about, and by how much the clock has gone back since, in all.

    `leases` and `delays` are the places from which those that were counted before follow, and `turns` is
    where those follow that wait for a token; None: all have.
    """

    latest_us: int = 0
    behind_us: int = 0
    leases: Place | None = None
    delays: Place | None = None
    turns: str | None = None


class ClockSteps(Keeping[E, B]):
    """What follows from the time itself."""

    _table: Table

    def place_later(self, entry: E) -> None:
        """Place what may have to wait for a delay."""
        if entry.due_us > self.now_us and not entry.given:
            entry.behind_us = self._look(counting=True).behind_us
        self.place(entry)

    def follow_clock(self, limit: int) -> bool:
        """A bite of what was counted before the clock went back; whether there may be more."""
        seen = self._look(counting=False)
        if seen.leases is None and seen.delays is None and seen.turns is None:
            return False
        seen.leases = seen.leases and self._shorten(seen.leases, limit)
        seen.delays = seen.delays and self._bring_forward(seen.delays, seen.behind_us, limit)
        seen.turns = None if seen.turns is None else self.follow_turns(seen.turns, limit)
        self._keep(seen)
        return (seen.leases or seen.delays or seen.turns) is not None

    def _look(self, *, counting: bool) -> Seen:
        """What is known of the clock, now that it shows this time; `counting`: a delay is counted from it.

        Where nothing waits or runs, nothing is remembered, and elsewhere not each time.  Only sweeps look at
        what runs, as it says nothing of delays.
        """
        raw = self._table.get(CLOCK)
        seen = Seen() if raw is None else msgspec.json.decode(raw, type=Seen)
        last = None if counting else self.ending_last()
        shown_us = seen.latest_us
        if last is not None and seen.leases is None:  # it was given when the clock had come so far
            shown_us = max(shown_us, last.until_us - last.span_us)
        lag_us = TOLERATED_US if counting else REMEMBERED_US
        if shown_us > self.now_us + TOLERATED_US:
            seen.behind_us += max(0, seen.latest_us - self.now_us)  # not by a lease: one may be damaged
            seen.leases = seen.delays = FIRST
            seen.turns = ""
        elif seen.latest_us >= self.now_us - lag_us or not (counting or last or self._anything_waits()):
            return seen
        seen.latest_us = self.now_us
        self._keep(seen)
        return seen

    def _anything_waits(self) -> bool:
        """For a time, or for a token."""
        return bool(self.due_first(FIRST, 1)) or self.awaits_tokens()

    def _keep(self, seen: Seen) -> None:
        self._table.set(CLOCK, msgspec.json.encode(seen))

    def _shorten(self, after: Place, limit: int) -> Place | None:
        """Let leases end one span from now at the latest; they go to before the place of the next bite."""
        bite = self.ending_first(after, limit)
        upto = (bite[-1].until_us, bite[-1].seq) if len(bite) == limit else None
        for entry in bite:
            if entry.until_us > self.now_us + entry.span_us:
                entry.until_us = self.now_us + entry.span_us
                self.changed(entry)
        return upto

    def _bring_forward(self, after: Place, behind_us: int, limit: int) -> Place | None:
        """Let delays be no longer than they were; a time that was given stays what it is."""
        bite = self.due_first(after, limit)
        upto = (bite[-1].due_us, bite[-1].seq) if len(bite) == limit else None
        for entry in bite:
            if not entry.given and entry.behind_us < behind_us:
                entry.due_us = max(self.now_us, entry.due_us - (behind_us - entry.behind_us))
                entry.behind_us = behind_us
                self.place(entry)
        return upto

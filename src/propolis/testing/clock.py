"""A clock that only the test moves."""

from __future__ import annotations

from datetime import UTC, datetime

from propolis.core.clock import from_us, span_us, to_us
from propolis.core.duration import Duration, duration

START = datetime(2026, 1, 1, tzinfo=UTC)


class FakeClock:
    """Stands still until `advance`: engines given it never look at the machine's clock."""

    def __init__(self, start: datetime = START) -> None:
        self._us = to_us(start)

    def now_us(self) -> int:
        return self._us

    @property
    def now(self) -> datetime:
        return from_us(self._us)

    def advance(self, span: Duration) -> datetime:
        self._us += span_us(duration(span))
        return self.now

    def set_back(self, span: Duration) -> None:
        """As when somebody corrects the clock of the machine."""
        self._us -= span_us(duration(span))

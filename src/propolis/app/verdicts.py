"""The verdicts of a task on its own run: returned or raised, they have the same effect.

Returning any other value is success; raising any other exception goes to the error strategy.
"""

from __future__ import annotations

from datetime import timedelta

from propolis.core.duration import Duration, duration


class Verdict(Exception):
    """The root of the three verdicts."""


class Retry(Verdict):
    """Run it again, after the strategy's backoff or after this delay; it counts as a failed attempt."""

    def __init__(self, reason: object = "", *, after: Duration | None = None) -> None:
        super().__init__(reason)
        self.reason = str(reason)
        self.after: timedelta | None = None if after is None else duration(after)


class Discard(Verdict):
    """It will never work: straight to the ending of the error strategy, without further attempts.

    That is the dead shelf unless the strategy says otherwise.  Where its ending is `delete`, nothing is kept
    of the job, and the log of the worker has the reason.
    """

    def __init__(self, reason: object = "") -> None:
        super().__init__(reason)
        self.reason = str(reason)


class Snooze(Verdict):
    """Not now: come back after this delay.  The attempt does not count."""

    def __init__(self, after: Duration) -> None:
        super().__init__(f"snoozed for {after}")
        self.after: timedelta = duration(after)

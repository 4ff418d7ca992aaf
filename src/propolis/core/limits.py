"""Limits: which one holds for a key, and how many starts a rate allows.

A rate is kept as one time for each name, at which its bucket is full again (GCRA): nothing has to be filled
as time passes, and a bucket that is full need not be kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from fractions import Fraction

from msgspec import Struct

from propolis.core.clock import MICROSECOND, from_us, span_us
from propolis.core.duration import duration
from propolis.core.protocols import EACH, MAX_PREFIXES, Rule, Tokens
from propolis.errors import BadDuration, BadSetting

_RATE = re.compile(r" *(\d+(?:\.\d+)?) */ *(\S.*?) *")
_UNITS = {name: duration(f"1{name[0]}") for name in ("s", "min", "h", "d")}


class Rate(Struct, frozen=True):
    """A token each `every_us`, of which `burst` are saved up; each start takes one.

    `full_us` is when a bucket is full again; one that is not kept has been full for ever (0).  One that is
    later than an empty bucket would be, since the clock went back or the rate was another one, counts as
    empty now; whoever finds it writes it down so, or it would stay empty.
    """

    every_us: int
    burst: int

    def bounded(self, full_us: int, now_us: int) -> int:
        return min(full_us, now_us + self.burst * self.every_us)

    def free(self, full_us: int, now_us: int) -> int:
        """How many may start at once."""
        missing_us = max(0, self.bounded(full_us, now_us) - now_us)
        return (self.burst * self.every_us - missing_us) // self.every_us

    def next_us(self, full_us: int, now_us: int) -> int:
        """When there is a token: now, if there is one."""
        return max(now_us, self.bounded(full_us, now_us) - (self.burst - 1) * self.every_us)

    def taken(self, full_us: int, now_us: int) -> int:
        """`full_us` after a start."""
        return max(self.bounded(full_us, now_us), now_us) + self.every_us

    def given_back(self, full_us: int, now_us: int) -> int:
        """`full_us` after one that did not count."""
        return max(self.bounded(full_us, now_us) - self.every_us, now_us)

    def tokens(self, full_us: int, now_us: int) -> Tokens:
        wait_us = self.next_us(full_us, now_us) - now_us
        return Tokens(self.free(full_us, now_us), from_us(wait_us) - from_us(0))


def rate_of(rule: Rule) -> Rate | None:
    return None if rule.every is None else Rate(span_us(rule.every), rule.burst)


def rate_in(rule: Rule) -> Rate:
    """`BadSetting` for a limit that has none."""
    rate = rate_of(rule)
    if rate is None:
        raise BadSetting(f"the limit on {rule.scope.value} {rule.name!r} has no rate: it has no tokens")
    return rate


def longest_prefix(prefixes: Iterable[Rule], key: str) -> Rule | None:
    """Of some limits on prefixes the one that holds for a key that has none of its own."""
    fitting = [rule for rule in prefixes if key.startswith(rule.name.removesuffix(EACH))]
    return max(fitting, key=lambda rule: len(rule.name), default=None)


def too_many_prefixes(name: str) -> BadSetting:
    """For a limit that would be one more than there may be at a time."""
    return BadSetting(
        f"a limit on {name!r} would be one for many keys beside {MAX_PREFIXES} others: remove some, or limit "
        f"the keys themselves"
    )


def every_of(rate: str) -> timedelta:
    """How often a job may start: "100/min" is once in 0.6 s, and "1/10s" in 10 s; never too often."""
    found = _RATE.fullmatch(str(rate))
    with suppress(BadDuration, ArithmeticError, ValueError):  # no time, none at all, or more than is counted
        if found is not None:
            span = _UNITS.get(found[2]) or duration(found[2] if found[2][0].isdigit() else f"1{found[2]}")
            return -(-span_us(span) // Fraction(found[1])) * MICROSECOND
    raise BadSetting(
        f"a rate of {rate!r}?  Write how many in which time, such as '10/s', '100/min' or '5/2h'"
    )


def rate_text(every: timedelta) -> str:
    """As people write it: "100/min"."""
    for unit, span in _UNITS.items():
        number = round(span / every)
        if number > 0 and every_of(f"{number}/{unit}") == every:
            return f"{number}/{unit}"
    return f"1/{every.total_seconds():.15g}s"

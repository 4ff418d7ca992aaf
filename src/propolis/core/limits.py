"""Limits: which one holds for a key, and how many starts a rate allows.

A rate is kept as one time for each name, at which its bucket is full again (GCRA): nothing has to be filled
as time passes, and a bucket that is full need not be kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from propolis.core.clock import from_us, span_us
from propolis.core.protocols import EACH, MAX_PREFIXES, Rule, Tokens
from propolis.errors import BadSetting


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

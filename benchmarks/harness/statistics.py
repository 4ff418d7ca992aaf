"""The few numbers that are told of many."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of repeated runs, with the smallest and the largest."""

    median: float
    low: float
    high: float
    runs: int


def summary(values: Sequence[float]) -> Summary | None:
    """None where there is nothing to tell: no run, or none with a number."""
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        return None
    return Summary(statistics.median(numbers), min(numbers), max(numbers), len(numbers))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """How many times theirs ours is: turn by turn where both took every turn, since turns differ most."""
    if not ours or not theirs:
        return None
    if len(ours) == len(theirs):
        return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    return statistics.median(ours) / statistics.median(theirs)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` per cent of the values do not exceed (nearest rank)."""
    if not ordered:
        return math.nan
    rank = max(1, math.ceil(share / 100 * len(ordered)))
    return ordered[rank - 1]

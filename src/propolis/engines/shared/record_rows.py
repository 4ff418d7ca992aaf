"""Records as engines write and read them: with times in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from propolis.core.clock import EPOCH, moment, span_us, to_us
from propolis.core.records import KEEP, Change, Record, Refusal, Swapped


def moment_us(at: datetime | timedelta | None, now_us: int) -> int | None:
    """A time, or a delay from now."""
    if at is None:
        return None
    return now_us + span_us(at) if isinstance(at, timedelta) else to_us(at)


def record_of(
    kind: str, name: str, value: bytes, version: int, at_us: int | None, expires_us: int | None
) -> Record:
    at = moment(at_us)
    if at is None and at_us is not None:  # it is seen to, and gets a time that can be read
        at = EPOCH
    return Record(kind=kind, name=name, value=value, version=version, at=at, expires_at=moment(expires_us))


def change_fields(change: Change, written: Callable[[bytes], object]) -> dict[str, object]:
    """What a server is sent of a change, its value as `written`; what does not count is left out."""
    fields: dict[str, object] = {"kind": change.kind, "name": change.name}
    if change.value is KEEP:
        fields["keep"] = True
    elif change.value is not None:
        fields["value"] = written(change.value)
    if change.expected is not None:
        fields["expected"] = change.expected
    if isinstance(change.at, datetime):
        fields["at_us"] = to_us(change.at)
    elif change.at is not None:
        fields["at_in_us"] = span_us(change.at)
    if change.expires_in is not None:
        fields["expires_in_us"] = span_us(change.expires_in)
    return fields


def answered(answers: Iterable[Iterable[Any]]) -> list[Swapped]:
    """What a server answers to swaps: of each its version, or nothing, why it was refused, and a name."""
    return [
        Swapped(None, Refusal(refused[0]), refused[1]) if refused else Swapped(int(version))
        for version, *refused in answers
    ]

"""Records as the scripts take and give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from propolis.core import wire
from propolis.core.clock import from_us
from propolis.core.records import Read, Record, Swap, Swapped
from propolis.engines.redis.codec import batch_draft, draft, lua_bytes, packed
from propolis.engines.redis.shards.shard_map import ShardMap
from propolis.engines.shared.record_rows import answered, change_fields, record_of

_answers = msgspec.msgpack.Decoder(list[list[Any]])


def packed_swaps(swaps: Sequence[Swap | Swapped], shards: ShardMap | None) -> bytes:
    """What swap.lua takes; a swap that was refused already stands there as its answer."""
    return packed([_refused(each) if isinstance(each, Swapped) else _swap(each, shards) for each in swaps])


def _swap(swap: Swap, shards: ShardMap | None) -> dict[str, object]:
    return {
        "changes": [change_fields(change, lua_bytes) for change in swap.changes],
        "puts": [draft(job, wire.encode(job), shards) for job in swap.puts],
        "opens": [batch_draft(batch, shards) for batch in swap.opens],
        "bounded": swap.bounded,
    }


def _refused(answer: Swapped) -> dict[str, object]:
    return {"refused": [0, str(answer.refusal), answer.name]}


def answers_from(answer: bytes) -> list[Swapped]:
    return answered(_answers.decode(answer))


def read_from(kind: str, answer: list[Any]) -> Read:
    now, more, found = answer
    records = [_record(kind, found[n : n + 5]) for n in range(0, len(found), 5)]
    return Read(records, records[-1].name if more else None, from_us(int(now)))


def _record(kind: str, fields: list[bytes]) -> Record:
    name, version, at, expires, value = fields
    at_us, expires_us = (int(us) if us else None for us in (at, expires))
    return record_of(kind, name.decode(), value, int(version), at_us, expires_us)

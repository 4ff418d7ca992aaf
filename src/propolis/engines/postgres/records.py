"""Records as they are sent to the server and come from it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from propolis.core.clock import from_us
from propolis.core.records import Read, Record, Swap, Swapped
from propolis.engines.postgres.client import Row
from propolis.engines.postgres.drafts import batch_draft, draft_of, text_of
from propolis.engines.shared.record_rows import answered, change_fields, record_of


def swaps_text(swaps: Sequence[Swap]) -> str:
    """What `swap` in functions/records.sql takes."""
    return text_of(
        [
            {
                "changes": [change_fields(change, _text) for change in swap.changes],
                "puts": [draft_of(job) for job in swap.puts],
                "opens": [batch_draft(batch) for batch in swap.opens],
                "bounded": swap.bounded,
            }
            for swap in swaps
        ]
    )


def _text(value: bytes) -> str:
    return b64encode(value).decode()


def answers_of(text: str) -> list[Swapped]:
    return answered(msgspec.json.decode(text))


def read_of(kind: str, rows: list[Row], limit: int | None) -> Read:
    """Each row also tells the time; where there is no record, one row does nothing else."""
    now = from_us(rows[0]["now_us"])
    found = [row for row in rows if row["name"] is not None]
    page = found if limit is None else found[:limit]
    after = page[-1]["name"] if len(page) < len(found) else None
    return Read([_record(kind, row) for row in page], after, now)


def _record(kind: str, row: Row) -> Record:
    return record_of(kind, row["name"], row["value"], row["version"], row["at_us"], row["expires_us"])

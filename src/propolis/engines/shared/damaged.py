"""What is stored, also where a foreign hand has made it something else: nobody fails over it (L7)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from propolis.core.batch import Batch

T = TypeVar("T")
_batch = msgspec.json.Decoder(Batch)


def decoded(decoder: msgspec.json.Decoder[T], text: str | bytes | None) -> T | None:
    """None where it cannot be read."""
    try:
        return decoder.decode(text) if text else None
    except (msgspec.MsgspecError, UnicodeError, TypeError):
        return None


def batch_as_opened(text: str | bytes | None, batch: str, parent: str | None = None) -> Batch:
    """Where it cannot be read, nobody is called back."""
    return decoded(_batch, text) or Batch(id=batch, parent=parent, note="it cannot be read")

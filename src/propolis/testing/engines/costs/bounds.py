"""Up to where looks count: lowered, so that a small storage has more than that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from propolis.core.protocols import COUNTED
from propolis.engines.memory import book as memory
from propolis.engines.postgres import engine as postgres
from propolis.engines.redis import engine as redis
from propolis.engines.shared.book import stored
from propolis.engines.sqlite import snapshot

_BOUNDS = (
    *[(snapshot, "COUNTED"), (postgres, "COUNTED"), (stored, "COUNTED")],
    *[(stored, "SCAN"), (memory, "SCAN"), (redis, "COUNTED"), (redis, "LOOKED_THROUGH")],
)


@contextmanager
def counting_up_to(most: int = COUNTED) -> Iterator[None]:
    """What is lower already stays as it is."""
    with ExitStack() as bounds:
        for module, name in _BOUNDS:
            bounds.enter_context(patch.object(module, name, min(most, getattr(module, name))))
        yield

"""The engine that keeps jobs in this process."""

from __future__ import annotations

from propolis.engines.memory.engine import MemoryEngine

__all__ = ["MemoryEngine"]

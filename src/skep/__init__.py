"""skep: background jobs that are never lost."""

from __future__ import annotations

__version__ = "0.1.0"

"""Which job runs, in the lines of an app's own logs."""

from __future__ import annotations

from propolis.app.context import JobFilter, add_job

__all__ = ["JobFilter", "add_job"]

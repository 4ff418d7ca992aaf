from __future__ import annotations

from tests.unit.worker.conftest import app

__all__ = ["app"]

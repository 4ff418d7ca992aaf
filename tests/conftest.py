"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("skep", deadline=None)  # a busy machine is not a failing test
settings.load_profile("skep")


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started here are not measured: coverage imports modules, and this test counts them."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)

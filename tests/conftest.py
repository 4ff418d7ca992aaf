"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("skep", deadline=None)  # a busy machine is not a failing test
settings.load_profile("skep")

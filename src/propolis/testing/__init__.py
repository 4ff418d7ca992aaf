"""For tests: the kit that `app.test()` gives, and a clock that only the test moves.

Nothing is imported before somebody asks for it: the plugin of pytest lives here and is loaded into every run.
The suite for engines is in `propolis.testing.engines`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # no loop is broken by this: whoever does not use a name should not pay for it
    from propolis.testing.clock import FakeClock
    from propolis.testing.kit.kit import Kit, SyncKit

__all__ = ["FakeClock", "Kit", "SyncKit"]

_MODULES = {"FakeClock": "clock", "Kit": "kit.kit", "SyncKit": "kit.kit"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

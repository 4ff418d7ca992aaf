from __future__ import annotations

import pytest

from propolis import App


@pytest.fixture
def app() -> App:
    return App("sqlite:////nowhere/to/be/found.db")  # nothing may touch the app's own engine

"""What the tests of batches share."""

from __future__ import annotations

import pytest
from tests.app.shop import Shop


@pytest.fixture
def shop() -> Shop:
    return Shop()

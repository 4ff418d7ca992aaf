"""The suite for the piece `Records`."""

from __future__ import annotations

import pytest

from propolis.core.protocols import Engine, Records
from propolis.testing.engines.promises.inventing import InventingPromise
from propolis.testing.engines.promises.recording import RecordingPromise
from propolis.testing.engines.suite import EngineFixtures


@pytest.mark.asyncio
class RecordsContract(RecordingPromise, InventingPromise, EngineFixtures):
    """Everything that an engine with `Records` promises about them."""

    @pytest.fixture
    def records(self, engine: Engine) -> Records:
        """The first handle, as what keeps records."""
        assert isinstance(engine, Records)
        return engine

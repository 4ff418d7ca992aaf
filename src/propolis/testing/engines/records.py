"""The suites for the pieces `Records` and `Feeds`."""

from __future__ import annotations

import pytest

from propolis.core.protocols import Engine, Feeds, Records
from propolis.testing.engines.promises.inventing import InventingPromise
from propolis.testing.engines.promises.publishing import AnotherFeeds, PublishingPromise
from propolis.testing.engines.promises.recording import RecordingPromise
from propolis.testing.engines.steps import Another
from propolis.testing.engines.suite import EngineFixtures


@pytest.mark.asyncio
class RecordsContract(RecordingPromise, InventingPromise, EngineFixtures):
    """Everything that an engine with `Records` promises about them."""

    @pytest.fixture
    def records(self, engine: Engine) -> Records:
        """The first handle, as what keeps records."""
        assert isinstance(engine, Records)
        return engine


@pytest.mark.asyncio
class FeedsContract(PublishingPromise, EngineFixtures):
    """Everything that an engine with `Feeds` promises about them."""

    def feeds_of(self, engine: Engine) -> Feeds:
        """The same handle, as what keeps feeds; override it where something beside the engine does."""
        assert isinstance(engine, Feeds)
        return engine

    @pytest.fixture
    def feeds(self, engine: Engine) -> Feeds:
        return self.feeds_of(engine)

    @pytest.fixture
    def another_feeds(self, another: Another) -> AnotherFeeds:
        async def open_one() -> Feeds:
            return self.feeds_of(await another())

        return open_one

"""All promises in one class, and the fixtures that their tests ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from skep.broker import Engine
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract.batching import Batching
from skep.testing.contract.breaking import Breaking
from skep.testing.contract.bundling import Bundling
from skep.testing.contract.cancelling import Cancelling
from skep.testing.contract.crashing import Crashing
from skep.testing.contract.deleting import Deleting
from skep.testing.contract.emitting import Emitting
from skep.testing.contract.expiring import Expiring
from skep.testing.contract.fencing import Fencing
from skep.testing.contract.firing import Firing
from skep.testing.contract.leasing import Leasing
from skep.testing.contract.looking import Looking
from skep.testing.contract.ordering import Ordering
from skep.testing.contract.payloads import Payloads
from skep.testing.contract.putting import Putting
from skep.testing.contract.renewing import Renewing
from skep.testing.contract.replaying import Replaying
from skep.testing.contract.ruling import Ruling
from skep.testing.contract.scheduling import Scheduling
from skep.testing.contract.settling import Settling
from skep.testing.contract.sharing import Sharing
from skep.testing.contract.steps import Another, OpenEngine
from skep.testing.contract.uniqueness import Uniqueness
from skep.testing.contract.waiting import Waiting


@pytest.mark.asyncio  # so that the suite also runs where pytest-asyncio is in its strict mode
class BrokerContract(
    Putting,
    Payloads,
    Leasing,
    Bundling,
    Ordering,
    Scheduling,
    Renewing,
    Settling,
    Fencing,
    Crashing,
    Cancelling,
    Expiring,
    Breaking,
    Replaying,
    Deleting,
    Uniqueness,
    Emitting,
    Batching,
    Firing,
    Ruling,
    Looking,
    Sharing,
    Waiting,
):
    """Everything an engine promises.  Inherit from it and override `open_engine`."""

    @pytest.fixture
    def clock(self) -> FakeClock:
        """The time of this test: it stands still until the test moves it."""
        return FakeClock()

    @pytest.fixture
    def retention(self) -> Retention:
        """How long the engine keeps ended jobs; tests that need another one say so by parametrisation."""
        return Retention()

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        """Makes a new, unopened handle on the storage of this test."""
        return pytest.fail("override the fixture open_engine: see the docstring of skep.testing.contract")

    @pytest_asyncio.fixture
    async def engine(self, open_engine: OpenEngine) -> AsyncIterator[Engine]:
        """The first handle, open."""
        handle = await open_engine().open()
        yield handle
        await handle.close()

    @pytest_asyncio.fixture
    async def another(self, open_engine: OpenEngine) -> AsyncIterator[Another]:
        """Opens one more handle on the same storage; they are all closed after the test."""
        async with AsyncExitStack() as stack:

            async def open_one() -> Engine:
                handle = await open_engine().open()
                stack.push_async_callback(handle.close)
                return handle

            yield open_one

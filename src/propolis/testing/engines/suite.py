"""All promises in one class, and the fixtures that their tests ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from propolis.core.protocols import Engine
from propolis.core.transitions import Retention
from propolis.testing.clock import FakeClock
from propolis.testing.engines.promises.batching import BatchingPromise
from propolis.testing.engines.promises.breaking import BreakingPromise
from propolis.testing.engines.promises.bundling import BundlingPromise
from propolis.testing.engines.promises.cancelling import CancellingPromise
from propolis.testing.engines.promises.crashing import CrashingPromise
from propolis.testing.engines.promises.deleting import DeletingPromise
from propolis.testing.engines.promises.emitting import EmittingPromise
from propolis.testing.engines.promises.expiring import ExpiringPromise
from propolis.testing.engines.promises.fencing import FencingPromise
from propolis.testing.engines.promises.gathering import GatheringPromise
from propolis.testing.engines.promises.leasing import LeasingPromise
from propolis.testing.engines.promises.limiting import LimitingPromise
from propolis.testing.engines.promises.looking import LookingPromise
from propolis.testing.engines.promises.losing import LosingPromise
from propolis.testing.engines.promises.matching import MatchingPromise
from propolis.testing.engines.promises.nesting import NestingPromise
from propolis.testing.engines.promises.noting import NotingPromise
from propolis.testing.engines.promises.opening import OpeningPromise
from propolis.testing.engines.promises.ordering import OrderingPromise
from propolis.testing.engines.promises.parking import ParkingPromise
from propolis.testing.engines.promises.payloads import PayloadsPromise
from propolis.testing.engines.promises.putting import PuttingPromise
from propolis.testing.engines.promises.rating import RatingPromise
from propolis.testing.engines.promises.renewing import RenewingPromise
from propolis.testing.engines.promises.replaying import ReplayingPromise
from propolis.testing.engines.promises.ruling import RulingPromise
from propolis.testing.engines.promises.scheduling import SchedulingPromise
from propolis.testing.engines.promises.settling import SettlingPromise
from propolis.testing.engines.promises.sharing import SharingPromise
from propolis.testing.engines.promises.stepping import SteppingPromise
from propolis.testing.engines.promises.uniqueness import UniquenessPromise
from propolis.testing.engines.promises.waiting import WaitingPromise
from propolis.testing.engines.steps import Another, OpenEngine


class EngineFixtures:
    """What all suites ask for.  Override `open_engine`."""

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
        return pytest.fail("override the fixture open_engine: see the docstring of propolis.testing.engines")

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


@pytest.mark.asyncio  # so that the suite also runs where pytest-asyncio is in its strict mode
class CoreContract(
    PuttingPromise,
    PayloadsPromise,
    LeasingPromise,
    BundlingPromise,
    OrderingPromise,
    SchedulingPromise,
    RenewingPromise,
    NotingPromise,
    SettlingPromise,
    FencingPromise,
    LosingPromise,
    CrashingPromise,
    ExpiringPromise,
    SteppingPromise,
    BreakingPromise,
    UniquenessPromise,
    EmittingPromise,
    SharingPromise,
    WaitingPromise,
    EngineFixtures,
):
    """What every engine promises.  Its tests look at jobs through `Inspects`, and operate on some."""


@pytest.mark.asyncio
class BatchesContract(BatchingPromise, NestingPromise, GatheringPromise, OpeningPromise, EngineFixtures):
    """The piece `Batches`."""


@pytest.mark.asyncio
class RulesContract(RulingPromise, ParkingPromise, EngineFixtures):
    """The piece `Rules`: pause, block, cap."""


@pytest.mark.asyncio
class LimitsContract(LimitingPromise, EngineFixtures):
    """The piece `Limits`."""


@pytest.mark.asyncio
class RatesContract(RatingPromise, MatchingPromise, EngineFixtures):
    """The piece `Rates`."""


@pytest.mark.asyncio
class InspectsContract(LookingPromise, EngineFixtures):
    """The piece `Inspects`."""


@pytest.mark.asyncio
class OperatesContract(CancellingPromise, ReplayingPromise, DeletingPromise, EngineFixtures):
    """The piece `Operates`."""


class EngineContract(
    CoreContract,
    BatchesContract,
    RulesContract,
    LimitsContract,
    RatesContract,
    InspectsContract,
    OperatesContract,
):
    """All that an `Engine` promises.  Inherit from it and override `open_engine`."""

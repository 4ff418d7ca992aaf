"""The contract of skep's engines as a test suite, for those who write an engine of their own.

An engine keeps the contract when this class, with its own name and constructor in it, is green:

    class TestMine(BrokerContract):
        @pytest.fixture
        def open_engine(
            self, clock: FakeClock, retention: Retention, tmp_path: Path
        ) -> Callable[[], Engine]:
            return lambda: MyBroker(tmp_path / "jobs", clock=clock, retention=retention)

`open_engine` is the only fixture to write.  It gives a function that makes a new, unopened handle, each
time on the same storage; the storage is empty when the test begins and belongs to it alone.  An engine
that lives inside one process gives the same handle each time.  The handles take the time from
`clock`, which only the tests move, and keep ended jobs as `retention` says, which some tests choose.

Each file of this package holds one promise, and each test names what it shows: transitions (T1…T14, B1,
C1) and invariants (I1…I15).  The suite needs the extra `skep[testing]`: pytest, pytest-asyncio, Hypothesis.
"""

from __future__ import annotations

import pkgutil

import pytest

# Without this, pytest explains a failed assert only in the files of those who use the suite.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

from skep.testing.contract.steps import Another, OpenEngine  # noqa: E402 - only after they are registered
from skep.testing.contract.suite import BrokerContract  # noqa: E402

__all__ = ["Another", "BrokerContract", "OpenEngine"]

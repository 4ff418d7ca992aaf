"""The contract of propolis's engines as a test suite, for whoever writes an engine of their own.

An engine keeps the contract when this class, with its own name and constructor in it, is green:

    class TestMine(EngineContract):
        @pytest.fixture
        def open_engine(
            self, clock: FakeClock, retention: Retention, tmp_path: Path
        ) -> OpenEngine:
            return lambda: MyEngine(tmp_path / "jobs", clock=clock, retention=retention)

`open_engine` is the only fixture to write.  It gives a function that makes a new, unopened handle, each
time on the same storage; the storage is empty when the test begins and belongs to it alone.  An engine
that lives inside one process gives the same handle each time.  The handles take the time from
`clock`, which only the tests move, and keep ended jobs as `retention` says, which some tests choose.

`EngineContract` is everything.  An engine that has fewer pieces takes `CoreContract` and the class of each
piece that it has: `BatchesContract`, `RulesContract`, and so on.

Each file of `promises` holds one promise, and each test names what it shows: transitions (T1…T14, B1,
C1) and invariants (I1…I15).  `check_engine` holds the same engine to a model of the contract, by random
lives.  Both need the extra `propolis[testing]`; examples/json_engine.py is an engine that passes them.
"""

from __future__ import annotations

import pkgutil

import pytest

from propolis.testing.engines import promises

# Without this, pytest explains a failed assert only in the files of those who use the suite.
pytest.register_assert_rewrite(
    f"{__name__}.steps",
    *(f"{promises.__name__}.{each.name}" for each in pkgutil.iter_modules(promises.__path__)),
)

# Only after they are registered.
from propolis.testing.clock import FakeClock  # noqa: E402
from propolis.testing.engines.clock_machine import check_clock  # noqa: E402
from propolis.testing.engines.machine import Difference, check_engine  # noqa: E402
from propolis.testing.engines.record_machine import check_records  # noqa: E402
from propolis.testing.engines.records import FeedsContract, RecordsContract  # noqa: E402
from propolis.testing.engines.steps import Another, OpenEngine  # noqa: E402
from propolis.testing.engines.suite import (  # noqa: E402
    BatchesContract,
    CoreContract,
    EngineContract,
    InspectsContract,
    LimitsContract,
    OperatesContract,
    RatesContract,
    RulesContract,
)

__all__ = [
    "Another",
    "BatchesContract",
    "CoreContract",
    "Difference",
    "EngineContract",
    "FakeClock",
    "FeedsContract",
    "InspectsContract",
    "LimitsContract",
    "OpenEngine",
    "OperatesContract",
    "RatesContract",
    "RecordsContract",
    "RulesContract",
    "check_clock",
    "check_engine",
    "check_records",
]

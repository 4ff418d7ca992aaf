"""An engine that knows only the public names can be certified by the public suite."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine

from .toy import ToyBroker


class TestToy(BrokerContract):
    """S0.1."""

    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: ToyBroker(tmp_path / "jobs.json", clock=clock, retention=retention)


def test_the_toy_engine_borrows_nothing_from_the_others() -> None:
    """S0.1."""
    source = ast.parse((Path(__file__).parent / "toy.py").read_text("utf-8"))
    imported = [node.module or "" for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]

    assert "skep.broker" in imported
    assert [module for module in imported if module.startswith(("skep.brokers", "skep.testing"))] == []

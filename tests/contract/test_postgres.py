"""The PostgreSQL engine keeps the contract."""

from __future__ import annotations

import pytest

from skep.brokers.postgres import PostgresBroker
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine


class TestPostgres(BrokerContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, schema: str
    ) -> OpenEngine:
        return lambda: PostgresBroker(postgres_url, schema=schema, clock=clock, retention=retention)


class TestPostgresBehindPgbouncer(BrokerContract):
    """F30: in transaction mode, where a session lasts for one transaction; hints come directly."""

    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, pgbouncer_url: str, schema: str
    ) -> OpenEngine:
        return lambda: PostgresBroker(
            pgbouncer_url, listen=postgres_url, schema=schema, clock=clock, retention=retention
        )

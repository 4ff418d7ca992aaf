"""The PostgreSQL engine keeps the contract."""

from __future__ import annotations

import uuid

import pytest

from skep.brokers.postgres import PostgresBroker
from skep.life import Retention
from skep.testing.clock import FakeClock
from skep.testing.contract import BrokerContract, OpenEngine
from skep.testing.servers import other_postgres


class TestPostgres(BrokerContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, schema: str
    ) -> OpenEngine:
        return lambda: PostgresBroker(postgres_url, schema=schema, clock=clock, retention=retention)


if other_postgres():

    class TestOtherPostgres(BrokerContract):
        """Each version that is installed."""

        @pytest.fixture
        def open_engine(self, clock: FakeClock, retention: Retention, other_postgres_url: str) -> OpenEngine:
            schema = f"skep_{uuid.uuid4().hex}"  # gone with its server
            return lambda: PostgresBroker(other_postgres_url, schema=schema, clock=clock, retention=retention)


class TestPostgresBehindPgbouncer(BrokerContract):
    """F30: in transaction mode, where a session lasts for one transaction; hints come directly."""

    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, pgbouncer_url: str, schema: str
    ) -> OpenEngine:
        return lambda: PostgresBroker(
            pgbouncer_url, listen=postgres_url, schema=schema, clock=clock, retention=retention
        )

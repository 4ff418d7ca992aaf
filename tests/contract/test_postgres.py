"""The PostgreSQL engine keeps the contract."""

from __future__ import annotations

import uuid

import pytest

from propolis.core.transitions import Retention
from propolis.engines.postgres.engine import PostgresEngine
from propolis.testing.clock import FakeClock
from propolis.testing.engines import EngineContract, OpenEngine
from propolis.testing.servers.serving import other_postgres


class TestPostgres(EngineContract):
    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, empty_schema: str
    ) -> OpenEngine:
        return lambda: PostgresEngine(postgres_url, schema=empty_schema, clock=clock, retention=retention)


if other_postgres():

    class TestOtherPostgres(EngineContract):
        """Each version that is installed."""

        @pytest.fixture
        def open_engine(self, clock: FakeClock, retention: Retention, other_postgres_url: str) -> OpenEngine:
            schema = f"propolis_{uuid.uuid4().hex}"  # gone with its server
            return lambda: PostgresEngine(other_postgres_url, schema=schema, clock=clock, retention=retention)


@pytest.mark.differs_in(
    *["putting", "leasing", "bundling", "renewing", "settling", "fencing", "sharing", "waiting"],
    reason="statements and server are the same; only what a session remembers is lost between calls",
)
class TestPostgresBehindPgbouncer(EngineContract):
    """F30: in transaction mode, where a session lasts for one transaction; hints come directly."""

    @pytest.fixture
    def open_engine(
        self, clock: FakeClock, retention: Retention, postgres_url: str, pgbouncer_url: str, empty_schema: str
    ) -> OpenEngine:
        return lambda: PostgresEngine(
            pgbouncer_url, listen=postgres_url, schema=empty_schema, clock=clock, retention=retention
        )

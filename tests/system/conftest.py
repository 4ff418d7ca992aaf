"""What the fault tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage of its own on each engine that worker processes can share."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/jobs.db"
        case "postgres":
            server, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
            return f"{server}?schema={schema}"
        case _:
            server, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix")
            return f"{server}?prefix={prefix}:"

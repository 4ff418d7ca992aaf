"""Storage that one contract test after the other finds empty."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from .emptying import drop, empty


@pytest.fixture(scope="session")
def lasting_schema(postgres_url: str) -> Iterator[str]:
    """The name of a schema for one test after the other."""
    name = f"propolis_{uuid.uuid4().hex}"
    yield name
    drop(postgres_url, name)


@pytest.fixture
def empty_schema(request: pytest.FixtureRequest, postgres_url: str, lasting_schema: str) -> Iterator[str]:
    """A schema with nothing in it: a new one with --full, and where the opening of handles is tested."""
    if request.config.getoption("--full") or request.function.__module__.endswith(".sharing"):
        name = f"propolis_{uuid.uuid4().hex}"
        yield name
        drop(postgres_url, name)
    else:
        empty(postgres_url, lasting_schema)
        yield lasting_schema

"""Settings for all tests, and the servers that some of them need."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
import pytest_asyncio
from hypothesis import settings

from skep.testing.servers import other_postgres, serving

settings.register_profile("skep", deadline=None)  # a busy machine is not a failing test
settings.load_profile("skep")

# {"postgres": "postgresql://...", "valkey": "redis://..."}: servers given from outside, or by the controller
URLS = "SKEP_TEST_URLS"


class Servers:
    """Starts the servers once per run, when the first test needs them, and stops them with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def urls(self) -> dict[str, str]:
        if URLS not in os.environ:
            os.environ[URLS] = json.dumps(self._stack.enter_context(serving()))
        found: dict[str, str] = json.loads(os.environ[URLS])
        return found

    def close(self) -> None:
        self._stack.close()
        os.environ.pop(URLS, None)


_servers = Servers()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the fault tests at their full size: for hours")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None):  # the workers inherit what the controller started
        _servers.urls()


def pytest_unconfigure() -> None:
    _servers.close()


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """A private PostgreSQL, which does not sync: everything in it is gone after the run."""
    return _servers.urls()["postgres"]


@pytest.fixture(scope="session", params=other_postgres())
def other_postgres_url(request: pytest.FixtureRequest) -> str:
    """Each other PostgreSQL that is installed, with `dev.py test --all-servers`."""
    return _servers.urls()[request.param]


@pytest.fixture(scope="session")
def pgbouncer_url() -> str:
    """A pgbouncer in transaction mode in front of that server."""
    if "pgbouncer" not in _servers.urls():
        pytest.skip("there is no pgbouncer on PATH: install it (Debian: apt install pgbouncer)")
    return _servers.urls()["pgbouncer"]


@pytest.fixture(scope="session")
def valkey_url() -> str:
    """A private Valkey, which syncs every second at most.  It is shared: use a prefix of your own."""
    return _servers.urls()["valkey"]


@pytest.fixture(scope="session")
def redis_url() -> str:
    """The same with a Redis from PATH, where there is one."""
    urls = _servers.urls()
    if "redis" not in urls:
        pytest.skip("there is no redis-server on PATH: apt install redis-server")
    return urls["redis"]


@pytest.fixture
def prefix() -> str:
    """For the names of keys that belong to this test alone."""
    return f"skep-{uuid.uuid4().hex}"


@pytest_asyncio.fixture
async def schema(postgres_url: str) -> AsyncIterator[str]:
    """The name of a schema that belongs to this test alone."""
    import asyncpg

    name = f"skep_{uuid.uuid4().hex}"
    yield name
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE')
    await connection.close()


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started here are not measured: coverage imports modules, and this test counts them."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)

"""Settings for all tests, their three sizes, and the servers that some of them need.

`--fast` runs what needs no server; by default a set-up that differs from another one in few promises runs
only those (the mark `differs_in`); `--full` runs everything at its full size.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import pytest_asyncio
from hypothesis import settings

from propolis.testing.engines import promises
from propolis.testing.servers.serving import ALL_SERVERS, other_postgres, serving

# A busy machine is not a failing test.  Examples are drawn anew with --full only: of one tree, a run says the
# same twice.
settings.register_profile("propolis", deadline=None, derandomize=True)
settings.register_profile("fast", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None)
SEED = 18

# {"postgres": "postgresql://...", "valkey": "redis://..."}: servers given from outside, or by the controller
URLS = "PROPOLIS_TEST_URLS"
# The servers without which tests fail instead of being skipped: "redis pgbouncer"
REQUIRED = "PROPOLIS_REQUIRED_SERVERS"
# Where to write how many tests were skipped for which reason, for whoever has started pytest
SKIPPED = "PROPOLIS_SKIPPED"

ON_SERVERS = {"postgres_url", "other_postgres_url", "pgbouncer_url", "valkey_url", "redis_url", "cluster"}


class Servers:
    """Starts the servers once per run, when the first test needs them, and stops them with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def urls(self) -> dict[str, str]:
        if URLS not in os.environ:
            os.environ[URLS] = json.dumps(self._stack.enter_context(serving()))
        found: dict[str, str] = json.loads(os.environ[URLS])
        return found

    def url(self, name: str, where: str) -> str:
        """The test is skipped where there is no such server, and fails where there has to be one."""
        if name not in self.urls():
            reason = f"there is no {name} on PATH: {where}"
            if name in os.environ.get(REQUIRED, "").split():
                pytest.fail(reason)
            pytest.skip(reason)
        return self.urls()[name]

    def close(self) -> None:
        self._stack.close()
        os.environ.pop(URLS, None)


_servers = Servers()


def pytest_addoption(parser: pytest.Parser) -> None:
    sizes = parser.getgroup("sizes")
    sizes.addoption("--fast", action="store_true", help="run only what needs no server")
    sizes.addoption("--full", action="store_true", help="run everything at its full size: for hours")


def pytest_configure(config: pytest.Config) -> None:
    full = config.getoption("--full")
    settings.load_profile("fast" if config.getoption("--fast") else "full" if full else "propolis")
    if full:
        os.environ[ALL_SERVERS] = "1"
    if getattr(config.option, "numprocesses", None) and not config.getoption("--fast"):
        _servers.urls()  # the workers inherit what the controller has started


def pytest_unconfigure() -> None:
    _servers.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other_postgres_url" in metafunc.fixturenames:
        metafunc.parametrize("other_postgres_url", other_postgres(), indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    kept = [item for item in items if belongs_to_every_run(item)]
    if config.getoption("--fast"):
        kept = [item for item in kept if ON_SERVERS.isdisjoint(getattr(item, "fixturenames", ()))]
    left_out = set(items).difference(kept)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def belongs_to_every_run(item: pytest.Item) -> bool:
    """Of a set-up that is like another one, only the promises in which it may differ."""
    mark = item.get_closest_marker("differs_in")
    if mark is None or not isinstance(item, pytest.Function):
        return item.get_closest_marker("full") is None
    for promise in mark.args:
        if find_spec(f"{promises.__name__}.{promise}") is None:
            raise pytest.UsageError(f"{item.nodeid}: there is no promise named {promise!r}")
    return item.function.__module__.rpartition(".")[2] in mark.args


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(str(report.longrepr[2]) for report in terminalreporter.getreports("skipped"))
    if path := os.environ.get(SKIPPED):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(skipped, file)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int | None:
    """Of the lives that a model lives: the same in each run, and others with --full."""
    return None if request.config.getoption("--full") else SEED


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """A private PostgreSQL, which does not sync: everything in it is gone after the run."""
    return _servers.urls()["postgres"]


@pytest.fixture(scope="session")
def other_postgres_url(request: pytest.FixtureRequest) -> str:
    """Each other PostgreSQL that is installed, with `--full`."""
    return _servers.urls()[request.param]


@pytest.fixture(scope="session")
def pgbouncer_url() -> str:
    """A pgbouncer in transaction mode in front of that server."""
    return _servers.url("pgbouncer", "apt install pgbouncer")


@pytest.fixture(scope="session")
def valkey_url() -> str:
    """A private Valkey, which syncs every second at most.  It is shared: use a prefix of your own."""
    return _servers.urls()["valkey"]


@pytest.fixture(scope="session")
def redis_url() -> str:
    """The same with a Redis from PATH, where there is one."""
    return _servers.url("redis", "apt install redis-server")


@pytest.fixture
def times_count(request: pytest.FixtureRequest) -> bool:
    """Whether a test may assert how long something took: with `--full`, which belongs on a quiet machine."""
    return bool(request.config.getoption("--full"))


@pytest.fixture
def prefix() -> str:
    """For the names of keys that belong to this test alone."""
    return f"propolis-{uuid.uuid4().hex}"


@pytest_asyncio.fixture
async def schema(postgres_url: str) -> AsyncIterator[str]:
    """The name of a schema that belongs to this test alone."""
    import asyncpg

    from propolis.engines.postgres.schema import dropped

    name = f"propolis_{uuid.uuid4().hex}"
    yield name
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(dropped(name))
    await connection.close()


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started here are not measured: coverage imports modules, and this test counts them."""
    for name in ("COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)

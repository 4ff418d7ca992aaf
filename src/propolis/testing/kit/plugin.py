"""The pytest plugin: `propolis_kit` for plain tests, `propolis_async_kit` for asynchronous ones.

It is loaded into every run of pytest where propolis is installed, so it imports nothing before a test asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # no loop is broken by this: whoever does not use the fixtures should not pay for them
    from propolis.app.application import App
    from propolis.testing.kit.kit import Kit, SyncKit

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # then it is for anyio, or whatever else runs asynchronous tests, to run the fixture
    async_fixture: Any = pytest.fixture  # type: ignore[no-redef]  # one of the two


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("propolis_app", 'the app under test, as "module:app": what the fixture propolis_app gives')


@pytest.fixture
def propolis_app(pytestconfig: pytest.Config) -> App:
    """The app under test: the one that the setting `propolis_app` names.  Override this to give another."""
    from propolis.app.application import App
    from propolis.app.loading import load_app

    path = str(pytestconfig.getini("propolis_app"))
    if not path:
        raise pytest.UsageError(
            'which app? Write propolis_app = "module:app" among the settings of pytest, or a fixture '
            "propolis_app that returns it"
        )
    app = load_app(path)
    if not isinstance(app, App):
        raise pytest.UsageError(f"propolis_app: {path} is a {type(app).__qualname__}, which has no test()")
    return app


@pytest.fixture
def propolis_kit(propolis_app: App) -> Iterator[SyncKit]:
    """`with app.test()` around a plain test."""
    with propolis_app.test() as kit:
        yield kit


@async_fixture
async def propolis_async_kit(propolis_app: App) -> AsyncIterator[Kit]:
    """`async with app.test()` around an asynchronous test, in its event loop."""
    async with propolis_app.test() as kit:
        yield kit

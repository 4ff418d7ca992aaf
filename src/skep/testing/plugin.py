"""The pytest plugin: `skep_kit` for plain tests, `askep_kit` for asynchronous ones.

It is loaded into every run of pytest where skep is installed, so it imports nothing before a test asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # no loop is broken by this: who does not use the fixtures should not pay for them
    from skep.app import App
    from skep.testing.kit import Kit, SyncKit

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:  # then it is for anyio, or whoever else runs asynchronous tests, to run the fixture
    async_fixture: Any = pytest.fixture  # type: ignore[no-redef]  # one of the two


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("skep_app", 'the app under test, as "module:app": what the fixture skep_app gives')


@pytest.fixture
def skep_app(pytestconfig: pytest.Config) -> App:
    """The app under test: the one that the setting `skep_app` names.  Override this to give another."""
    from skep.app import App
    from skep.loading import load_app

    path = str(pytestconfig.getini("skep_app"))
    if not path:
        raise pytest.UsageError(
            'which app? Write skep_app = "module:app" among the settings of pytest, or a fixture skep_app '
            "that returns it"
        )
    app = load_app(path)
    if not isinstance(app, App):
        raise pytest.UsageError(f"skep_app: {path} is a {type(app).__qualname__}, which has no test()")
    return app


@pytest.fixture
def skep_kit(skep_app: App) -> Iterator[SyncKit]:
    """`with app.test()` around a plain test."""
    with skep_app.test() as kit:
        yield kit


@async_fixture
async def askep_kit(skep_app: App) -> AsyncIterator[Kit]:
    """`async with app.test()` around an asynchronous test, in its event loop."""
    async with skep_app.test() as kit:
        yield kit

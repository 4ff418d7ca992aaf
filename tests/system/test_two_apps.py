"""Two apps that were given one storage by mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from skep import App
from skep.broker import Filter
from skep.worker import Mode, Settings, Worker


@pytest_asyncio.fixture
async def apps(engine_url: str) -> AsyncIterator[tuple[App, App]]:
    ours, theirs = App(engine_url), App(engine_url)
    yield ours, theirs
    await ours.aclose()
    await theirs.aclose()


async def work(app: App) -> None:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()


@pytest.mark.timeout(60)
async def test_what_is_not_ours_is_never_run_and_waits_on_the_shelf_for_its_own_app(
    apps: tuple[App, App],
) -> None:
    """S1.18: another name, or other arguments under the same name."""
    ours, theirs = apps
    ran: list[tuple[str, object]] = []

    @ours.task(name="bill")
    async def bill(number: int) -> None:
        ran.append(("ours", number))

    @theirs.task(name="bill")
    async def bill_by_name(name: str) -> None:
        ran.append(("theirs", name))

    @theirs.task(name="remind")
    async def remind(name: str) -> None:
        ran.append(("reminded", name))

    await bill_by_name.aenqueue("ada")
    await remind.aenqueue("bob")
    await bill.aenqueue(7)
    await work(ours)
    assert ran == [("ours", 7)]

    shelf = await theirs.jobs.afind(Filter(reason="broken"))
    told = {record.task: record.error.message for record in shelf if record.error}
    assert "do not fit" in told["bill"]
    assert "does the worker import its module" in told["remind"]

    for record in shelf:
        await theirs.jobs.areplay(record.id)
    await work(theirs)
    assert sorted(ran, key=str) == [("ours", 7), ("reminded", "bob"), ("theirs", "ada")]

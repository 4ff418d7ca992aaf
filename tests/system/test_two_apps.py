"""Two apps that were given one storage by mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from propolis import App
from propolis.core.protocols import Filter
from propolis.worker import Mode, Settings, Worker


@pytest_asyncio.fixture
async def apps(engine_url: str) -> AsyncIterator[tuple[App, App]]:
    ours, theirs = App(engine_url), App(engine_url)
    yield ours, theirs
    await ours.aclose()
    await theirs.aclose()


async def work(app: App) -> None:
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY)).run()


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
    messages = {record.task: record.error.message for record in shelf if record.error}
    assert messages.keys() == {"bill"}  # what ours does not know is parked, for whoever does
    assert "do not fit" in messages["bill"]

    for record in shelf:
        await theirs.jobs.areplay(record.id)
    await work(theirs)
    assert sorted(ran, key=str) == [("ours", 7), ("reminded", "bob"), ("theirs", "ada")]

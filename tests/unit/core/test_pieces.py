"""An engine is the core and pieces, and the documentation says which verb belongs to which."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from propolis import App, Handle, contract, every
from propolis.app.client import client as client_module
from propolis.contract import Clock, Engine, Receipt
from propolis.core import protocols
from propolis.engines.memory import MemoryEngine
from propolis.errors import BadSetting
from propolis.testing import engines as suites
from propolis.testing.clock import START
from propolis.values import Filter
from propolis.worker import Worker

OWN_SUITE = "that of the engine"
DOCS = Path(__file__).parents[3] / "docs" / "contract.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def rows() -> list[tuple[str, set[str], str]]:
    """Of each protocol in both tables its members, and what its last column says."""
    tables = DOCS.read_text("utf-8").split("## Pieces")[1].split("\n## ")[0]
    return [
        (name, set(re.findall(r"`(\w+)`", members)) - {"LIMIT"}, last)
        for name, members, last in ROW.findall(tables)
    ]


def documented() -> dict[str, tuple[set[str], str]]:
    """The members and the suite of each piece, as the first table says."""
    return {
        name: (members, last) for name, members, last in rows() if last == OWN_SUITE or "Contract`" in last
    }


def abilities() -> dict[str, set[str]]:
    """The members of what else an engine may be, as the second table says."""
    return {name: members for name, members, _ in rows() if name not in documented()}


def members_of(piece: str) -> set[str]:
    kind = getattr(protocols, piece)
    names = {*vars(kind), *kind.__annotations__}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("piece", documented())
def test_the_table_of_pieces_names_every_member(piece: str) -> None:
    members, suite = documented()[piece]

    assert members == members_of(piece)
    assert suite == OWN_SUITE or hasattr(suites, suite.strip("`"))


@pytest.mark.parametrize("ability", abilities())
def test_the_table_of_abilities_names_every_member(ability: str) -> None:
    assert abilities()[ability] == members_of(ability)


def test_every_protocol_of_an_engine_is_in_one_of_the_tables() -> None:
    """`Engine` is several pieces, and `Lent` is what one of them gives."""
    asked_for = {
        name
        for name, value in vars(protocols).items()
        if getattr(value, "_is_protocol", False) and value.__module__ == protocols.__name__
    }
    assert len(rows()) == len({name for name, _, _ in rows()})
    assert {name for name, _, _ in rows()} == asked_for - {"Engine", "Lent"}


def test_every_member_of_an_engine_belongs_to_one_piece() -> None:
    tabled = [name for _, members, _ in rows() for name in members]
    parts = [part for part in Engine.__mro__ if part.__module__ == protocols.__name__]
    members = {name for part in parts for name in members_of(part.__name__)}

    assert len(tabled) == len(set(tabled))
    assert members <= set(tabled)


def test_who_writes_an_engine_finds_every_protocol_in_one_place() -> None:
    found = {name for name, value in vars(protocols).items() if getattr(value, "_is_protocol", False)}

    assert found - {"Protocol"} <= {*contract.__all__}
    assert {"FeedsOnRecords", "FromExchange", "StoreEngine"} <= {*contract.__all__}


# --- an app on an engine that lacks some of them -----------------------------------------


class Plain:
    """The memory engine without the members of some pieces."""

    def __init__(self, engine: MemoryEngine, lacks: Iterable[str]) -> None:
        lacking = {name for piece in lacks for name in members_of(piece)}
        for name in {name for name in dir(engine) if not name.startswith("_")} - lacking:
            setattr(self, name, getattr(engine, name))


Lacking = Callable[..., None]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Lacking:
    """From now on every app has an engine without these pieces."""

    def lack(*pieces: str) -> None:
        def make(url: str, *, clock: Clock | None = None) -> Plain:  # there is one only
            return Plain(MemoryEngine(clock=clock), pieces)

        monkeypatch.setattr(client_module, "make_engine", make)

    return lack


PIECES = sorted(set(documented()) - {"Core"})
COMES_WITH = {"Limits": {"Rules"}, "Rates": {"Limits", "Rules"}}  # without which it is not


@pytest.mark.parametrize("piece", PIECES)
async def test_an_app_that_needs_a_missing_piece_says_so_when_it_opens_its_engine(
    lacking: Lacking, piece: str
) -> None:
    lacking(piece)
    with pytest.raises(BadSetting, match=rf"Plain, the engine of memory://, lacks the piece {piece}, .*app"):
        await App("memory://", needs=[getattr(contract, piece)]).ready()


@pytest.mark.parametrize("piece", sorted(set(PIECES) - {"Transactional"}))  # which memory has never had
async def test_an_app_whose_engine_has_what_it_needs_opens_it(lacking: Lacking, piece: str) -> None:
    lacking(*set(PIECES) - {piece} - COMES_WITH.get(piece, set()))
    app = App("memory://", needs=[getattr(contract, piece)])

    await app.ready()
    await app.aclose()


async def test_an_app_with_schedules_needs_records(lacking: Lacking) -> None:
    lacking("Records")
    app = App("memory://")

    @app.every("1h")
    @app.task
    def hourly() -> None: ...

    with pytest.raises(BadSetting, match=r"Plain.*Records.*schedules"):
        await app.ready()


async def test_an_app_whose_schedule_keeps_its_jobs_apart_needs_limits(lacking: Lacking) -> None:
    lacking("Limits")
    app = App("memory://")

    @app.every("1h", overlap="queue-one")
    @app.task
    def hourly() -> None: ...

    with pytest.raises(BadSetting, match=r"Plain.*Limits.*queue-one.*hourly"):
        await app.ready()


async def test_on_an_engine_without_rules_schedules_may_overlap_and_are_kept(lacking: Lacking) -> None:
    lacking(*set(PIECES) - {"Records"})
    app = App("memory://")
    report = app.task(report_of)
    await app.schedules.aput("allow", every("1h"), report)

    with pytest.raises(BadSetting, match=r"Plain.*Limits.*queue-one"):
        await app.schedules.aput("one", every("1h", overlap="queue-one"), report)

    assert [stored.schedule.name for stored in await app.schedules.alist()] == ["allow"]
    assert await app.schedules.apause("allow")
    assert await app.schedules.aresume("allow")
    assert await app.schedules.aremove("allow")
    await app.aclose()


def report_of() -> None: ...


Verb = Callable[[App], Awaitable[Any] | AsyncIterator[Any]]

PLAN = every("1h")
NEEDED: dict[str, tuple[str, Verb]] = {
    "jobs.aget": ("Inspects", lambda app: app.jobs.aget("x")),
    "jobs.afind": ("Inspects", lambda app: app.jobs.afind()),
    "jobs.aeach": ("Inspects", lambda app: app.jobs.aeach()),
    "jobs.aexplain": ("Inspects", lambda app: app.jobs.aexplain("x")),
    "jobs.acount": ("Inspects", lambda app: app.jobs.acount(Filter())),
    "jobs.acancel": ("Operates", lambda app: app.jobs.acancel("x")),
    "jobs.acancel_all": ("Inspects", lambda app: app.jobs.acancel_all(Filter())),
    "jobs.areplay": ("Operates", lambda app: app.jobs.areplay("x")),
    "jobs.areplay_all": ("Inspects", lambda app: app.jobs.areplay_all(Filter())),
    "jobs.adelete": ("Operates", lambda app: app.jobs.adelete("x")),
    "jobs.apurge": ("Inspects", lambda app: app.jobs.apurge(Filter())),
    "jobs.areschedule": ("Operates", lambda app: app.jobs.areschedule("x", START)),
    "queues.acounts": ("Inspects", lambda app: app.queues.acounts()),
    "queues.arules": ("Rules", lambda app: app.queues.arules()),
    "queues.apause": ("Rules", lambda app: app.queues.apause("x")),
    "queues.aresume": ("Rules", lambda app: app.queues.aresume("x")),
    "queues.ablock": ("Rules", lambda app: app.queues.ablock("x")),
    "queues.aunblock": ("Rules", lambda app: app.queues.aunblock("x")),
    "queues.astate": ("Rules", lambda app: app.queues.astate("x")),
    "queues.acap": ("Rules", lambda app: app.queues.acap("x", 1)),
    "queues.auncap": ("Rules", lambda app: app.queues.auncap("x")),
    "queues.adrop": ("Operates", lambda app: app.queues.adrop("x")),
    "batches.aget": ("Batches", lambda app: app.batches.aget("x")),
    "batches.afind": ("Batches", lambda app: app.batches.afind()),
    "batches.amembers": ("Batches", lambda app: app.batches.amembers("x")),
    "batches.aids": ("Inspects", lambda app: app.batches.aids("x")),
    "batches.aseal": ("Batches", lambda app: app.batches.aseal("x")),
    "batches.acancel": ("Batches", lambda app: app.batches.acancel("x")),
    "batches.areplay": ("Inspects", lambda app: app.batches.areplay("x")),
    "batches.adelete": ("Batches", lambda app: app.batches.adelete("x")),
    "schedules.aput": ("Records", lambda app: app.schedules.aput("x", PLAN, app.tasks["report"])),
    "schedules.aget": ("Records", lambda app: app.schedules.aget("x")),
    "schedules.alist": ("Records", lambda app: app.schedules.alist()),
    "schedules.apause": ("Records", lambda app: app.schedules.apause("x")),
    "schedules.aresume": ("Records", lambda app: app.schedules.aresume("x")),
    "schedules.arun": ("Records", lambda app: app.schedules.arun("x")),
    "schedules.aremove": ("Records", lambda app: app.schedules.aremove("x")),
    "workers.alist": ("Records", lambda app: app.workers.alist()),
    "batch": ("Batches", lambda app: app.batch([app.tasks["report"].job()])),
    "flow": ("Batches", lambda app: app.tasks["report"].step().aenqueue()),
    "handle.astatus": ("Inspects", lambda app: handle_in(app).astatus()),
    "handle.acancel": ("Operates", lambda app: handle_in(app).acancel()),
    "handle.aresult": ("Inspects", lambda app: handle_in(app).aresult()),
}


def handle_in(app: App) -> Handle[Any]:
    return app.tasks["report"].handle(Receipt("x", created=True))


def test_every_verb_of_an_app_is_listed_with_what_it_needs() -> None:
    app = App("memory://")
    verbs = {
        f"{noun}.{verb}"
        for noun in ("jobs", "queues", "batches", "schedules", "workers")
        for verb, method in vars(type(getattr(app, noun))).items()
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        if not verb.startswith("_")
    }

    assert len(verbs) > 30
    assert verbs <= set(NEEDED)


@pytest.mark.parametrize("verb", NEEDED)
async def test_a_verb_names_the_piece_that_its_engine_lacks(lacking: Lacking, verb: str) -> None:
    lacking(*PIECES)
    piece, call = NEEDED[verb]
    app = App("memory://")
    app.task(name="report")(report_of)

    with pytest.raises(BadSetting, match=rf"Plain\b.* lacks the piece {piece}\b"):
        await done(call(app))
    await app.aclose()


async def done(call: Awaitable[Any] | AsyncIterator[Any]) -> None:
    if isinstance(call, AsyncIterator):
        async for _ in call:
            pass
    else:
        await call


async def test_a_worker_runs_jobs_on_an_engine_that_is_the_core_alone(lacking: Lacking) -> None:
    lacking(*PIECES)
    app, seen = App("memory://"), []

    @app.task
    async def see(n: int) -> None:
        seen.append(n)
        if n == 3:
            worker.stop()

    worker = Worker(app)
    for n in (1, 2, 3):
        await see.aenqueue(n)
    await worker.run()

    assert seen == [1, 2, 3]

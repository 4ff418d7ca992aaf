"""An engine is the core and pieces, and the documentation says which verb belongs to which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from propolis import App, contract
from propolis.app.client import client as client_module
from propolis.contract import Clock, Engine, Limits, Records, Transactional
from propolis.core import protocols
from propolis.engines.memory import MemoryEngine
from propolis.errors import BadSetting
from propolis.testing import engines as suites

DOCS = Path(__file__).parents[3] / "docs" / "contract.md"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


def documented() -> dict[str, tuple[set[str], str]]:
    """The members and the suite of each piece, as the table says."""
    table = DOCS.read_text("utf-8").split("## Pieces")[1].split("\n## ")[0]
    return {
        piece: (set(re.findall(r"`(\w+)`", members)) - {"LIMIT"}, suite)
        for piece, members, suite in ROW.findall(table)
    }


def members_of(piece: str) -> set[str]:
    kind = getattr(protocols, piece)
    names = {*vars(kind), *kind.__annotations__}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("piece", documented())
def test_the_table_of_pieces_names_every_member(piece: str) -> None:
    members, suite = documented()[piece]

    assert members == members_of(piece)
    assert suite == "that of the engine" or hasattr(suites, suite.strip("`"))


def test_every_member_of_an_engine_belongs_to_one_piece() -> None:
    tabled = [name for members, _ in documented().values() for name in members]
    parts = [part for part in Engine.__mro__ if part.__module__ == protocols.__name__]
    members = {name for part in parts for name in members_of(part.__name__)}

    assert len(tabled) == len(set(tabled))
    assert members <= set(tabled)


def test_who_writes_an_engine_finds_every_protocol_in_one_place() -> None:
    found = {name for name, value in vars(protocols).items() if getattr(value, "_is_protocol", False)}

    assert found - {"Protocol"} <= {*contract.__all__}
    assert {"FeedsOnRecords", "FromExchange", "StoreEngine"} <= {*contract.__all__}


class Plain:
    """An engine that lacks two pieces."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        if name in ("limits", "swap", "records"):
            raise AttributeError(name)
        return getattr(self._engine, name)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(url: str, *, clock: Clock | None = None) -> Plain:  # there is one only
        return Plain(MemoryEngine(clock=clock))

    monkeypatch.setattr(client_module, "make_engine", make)


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("piece", [Limits, Transactional])
async def test_an_app_that_needs_a_missing_piece_says_so_when_it_opens_its_engine(piece: type) -> None:
    with pytest.raises(BadSetting, match=rf"Plain.*{piece.__name__}"):
        await App("memory://", needs=[piece]).ready()


@pytest.mark.usefixtures("plain")
async def test_an_app_with_schedules_needs_records() -> None:
    app = App("memory://")

    @app.every("1h")
    @app.task
    def hourly() -> None: ...

    with pytest.raises(BadSetting, match=r"Plain.*Records.*schedules"):
        await app.ready()


async def test_an_app_whose_engine_has_what_it_needs_opens_it() -> None:
    app = App("memory://", needs=[Records, Limits])

    await app.ready()
    await app.aclose()

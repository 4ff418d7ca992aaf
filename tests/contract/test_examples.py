"""An engine that brings no more than a store can be certified by the public suite."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from examples import json_engine as json_example
from examples import lmdb_engine as lmdb_example
from examples.json_engine import json_engine
from examples.lmdb_engine import lmdb_engine

from propolis.contract import Engine, Filter, Retention
from propolis.errors import EngineUnavailable
from propolis.testing.engines import (
    EngineContract,
    FakeClock,
    FeedsContract,
    OpenEngine,
    RecordsContract,
    check_clock,
    check_engine,
    check_records,
)
from propolis.testing.engines.samples import a_job

LIVES = (8, 100)  # of fifty steps by default, and with --full


class OnJson:
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: json_engine(tmp_path / "jobs.json", clock=clock, retention=retention)


class OnLmdb:
    @pytest.fixture
    def open_engine(self, clock: FakeClock, retention: Retention, tmp_path: Path) -> OpenEngine:
        return lambda: lmdb_engine(tmp_path / "jobs.mdb", clock=clock, retention=retention, sync=False)


class TestJson(OnJson, EngineContract):
    """S0.1."""


class TestLmdb(OnLmdb, EngineContract):
    """S0.1."""


class TestJsonRecords(OnJson, RecordsContract): ...


class TestLmdbRecords(OnLmdb, RecordsContract): ...


class TestJsonFeeds(OnJson, FeedsContract): ...


class TestLmdbFeeds(OnLmdb, FeedsContract): ...


@pytest.mark.parametrize("name", ["json", "lmdb"])
def test_an_engine_over_the_book_is_what_the_model_says(
    name: str, tmp_path: Path, seed: int | None, request: pytest.FixtureRequest
) -> None:
    """I1-I15, L2, R1."""
    numbers = count()
    makers: dict[str, Callable[[FakeClock], Engine]] = {
        "json": lambda clock: json_engine(tmp_path / str(next(numbers)), clock=clock),
        "lmdb": lambda clock: lmdb_engine(tmp_path / str(next(numbers)), clock=clock, sync=False),
    }
    for check in (check_engine, check_records, check_clock):
        check(makers[name], examples=LIVES[request.config.getoption("--full")], seed=seed)


@pytest.mark.parametrize("example", [json_example, lmdb_example])
def test_an_example_borrows_nothing_from_the_other_engines(example: object) -> None:
    """S0.1: it imports what propolis shows to everybody who writes an engine, and nothing else of it."""
    source = ast.parse(Path(str(vars(example)["__file__"])).read_text("utf-8"))
    froms = {node.module or "" for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    names = {each.name for node in ast.walk(source) if isinstance(node, ast.Import) for each in node.names}

    assert {name for name in froms | names if name.startswith("propolis")} == {"propolis.contract"}


async def test_a_line_that_was_not_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F35: an engine over a store says that it is away, and what was not stored does not come later."""
    engine = await json_engine(tmp_path / "jobs.json").open()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(json_example.Table, "append", full)
        with pytest.raises(EngineUnavailable, match="no space left"):
            await engine.put([a_job(id="lost")])
    await engine.put([a_job(id="kept")])

    assert await engine.get("lost") is None
    await engine.close()
    other = await json_engine(tmp_path / "jobs.json").open()
    assert [info.id for info in (await other.find(Filter())).jobs] == ["kept"]
    await other.close()


async def test_a_file_that_is_written_anew_stays_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_example, "MAX_LINES", 1)
    path = tmp_path / "jobs.json"
    engine = await json_engine(path).open()
    job = a_job()
    await engine.put([job])
    for _ in range(100):
        await engine.reschedule(job.id, await engine.now())
    await engine.close()

    assert path.read_bytes().count(b"\n") < 50
    assert path.stat().st_mode & 0o777 == 0o600

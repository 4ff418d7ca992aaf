from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType

import pytest

from propolis import engines
from propolis.cli.storage import script_for
from propolis.core.clock import Clock
from propolis.core.protocols import Durability
from propolis.engines import make_engine, open_engine
from propolis.engines.address import Address
from propolis.engines.memory import MemoryEngine
from propolis.errors import BadSetting, DurabilityTooLow, UnknownEngine


async def test_a_url_chooses_the_engine() -> None:
    engine = await open_engine("memory://")
    assert isinstance(engine, MemoryEngine)
    assert engine.durability is Durability.MEMORY
    await engine.close()


def test_an_unknown_scheme_lists_the_known_ones_and_hides_the_password() -> None:
    with pytest.raises(UnknownEngine, match=r"memory://, postgres://, .* redis://, .* sqlite://") as caught:
        make_engine("carrier-pigeon://bob:secret@roof")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "driver", "advice"),
    [
        ("postgresql://localhost/db", "asyncpg", "install propolis[postgres]"),
        ("redis://localhost", "hiredis", "install propolis[redis]"),
        ("redis+cluster://localhost", "hiredis", "install propolis[redis]"),
    ],
)
def test_a_missing_driver_is_an_error_that_says_what_to_install(url: str, driver: str, advice: str) -> None:
    program = f"import sys; sys.modules[{driver!r}] = None; from propolis.cli import main; main()"
    command = [sys.executable, "-c", program, "queues", "--url", url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert advice in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_option_that_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(BadSetting, match="size"):
        make_engine("memory://?size=5")


async def test_memory_is_refused_where_jobs_must_outlive_the_process() -> None:
    with pytest.raises(DurabilityTooLow, match="sqlite"):
        await open_engine("memory://", floor=Durability.PROCESS)


class TheirEngine(MemoryEngine):
    """An engine of another package, which has SQL to show."""

    def script(self) -> str:
        return "CREATE TABLE theirs ();"


@pytest.fixture
def their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that offers `theirs://` by an entry point."""
    package = ModuleType("their_package")

    def from_url(address: Address, clock: Clock | None) -> TheirEngine:
        return TheirEngine(clock=clock)

    vars(package)["from_url"] = from_url
    monkeypatch.setitem(sys.modules, "their_package", package)
    point = EntryPoint("theirs", "their_package:from_url", engines.GROUP)
    monkeypatch.setattr(engines, "entry_points", lambda group: EntryPoints([point]))


@pytest.mark.usefixtures("their_package")
def test_another_package_may_offer_an_engine() -> None:
    """S0.1: engines of third parties are found by entry points."""
    assert isinstance(make_engine("theirs://"), TheirEngine)


@pytest.mark.usefixtures("their_package")
def test_an_engine_of_another_package_may_show_its_sql() -> None:
    assert script_for("theirs://") == "CREATE TABLE theirs ();"


def test_an_engine_without_sql_needs_none() -> None:
    with pytest.raises(BadSetting, match="memory:// needs no SQL"):
        script_for("memory://")


def test_the_sql_of_an_engine_is_shown_without_a_server(tmp_path: Path) -> None:
    assert 'CREATE SCHEMA IF NOT EXISTS "mine"' in script_for("postgresql://nowhere.invalid/db?schema=mine")
    assert "CREATE TABLE propolis_job" in script_for(f"sqlite:///{tmp_path}/jobs.db")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_know_no_engine_by_name() -> None:
    program = "import sys, propolis.cli.storage; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = {f"propolis.engines.{name}" for name in ("memory", "postgres", "redis", "sqlite")}
    assert not names & set(ended.stdout.split())

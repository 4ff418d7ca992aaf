from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from types import ModuleType

import pytest

from skep import engines
from skep.address import Address, masked
from skep.broker import Durability
from skep.brokers.memory import MemoryBroker
from skep.clock import Clock
from skep.engines import make_engine, open_engine
from skep.errors import BadSetting, DurabilityTooLow, UnknownEngine


async def test_a_url_chooses_the_engine() -> None:
    engine = await open_engine("memory://")
    assert isinstance(engine, MemoryBroker)
    assert engine.durability is Durability.MEMORY
    await engine.close()


def test_an_unknown_scheme_lists_the_known_ones_and_hides_the_password() -> None:
    with pytest.raises(UnknownEngine, match=r"memory://, postgres://, .* redis://, .* sqlite://") as caught:
        make_engine("carrier-pigeon://bob:secret@roof")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "driver", "advice"),
    [
        ("postgresql://localhost/db", "asyncpg", "install skep[postgres]"),
        ("redis://localhost", "hiredis", "install skep[redis]"),
        ("redis+cluster://localhost", "hiredis", "install skep[redis]"),
    ],
)
def test_who_has_no_driver_is_told_what_to_install(url: str, driver: str, advice: str) -> None:
    program = f"import sys; sys.modules[{driver!r}] = None; from skep.cli import main; main()"
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


def test_another_package_may_offer_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """S0.1: engines of third parties are found by entry points."""
    package = ModuleType("their_package")

    def from_url(address: Address, clock: Clock | None) -> MemoryBroker:
        return MemoryBroker(clock=clock)

    vars(package)["from_url"] = from_url
    monkeypatch.setitem(sys.modules, "their_package", package)
    point = EntryPoint("theirs", "their_package:from_url", engines.GROUP)
    monkeypatch.setattr(engines, "entry_points", lambda group: EntryPoints([point]))
    assert isinstance(make_engine("theirs://"), MemoryBroker)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pa55@host:1/0", "redis://:***@host:1/0"),
        ("postgresql://me:pa55@host/db", "postgresql://me:***@host/db"),
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        (
            "postgresql://h/d?listen=postgresql://me:pa55@h2/d",
            "postgresql://h/d?listen=postgresql://me:***@h2/d",
        ),
        (
            "postgresql://h/d?listen=postgresql%3A%2F%2Fme%3Apa55%40h2%2Fd",
            "postgresql://h/d?listen=postgresql%3A%2F%2Fme%3A***%40h2%2Fd",
        ),
        ("postgresql://h/d?user=me&password=pa55", "postgresql://h/d?user=me&password=***"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked(url) == shown

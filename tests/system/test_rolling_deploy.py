"""Old and new code on one storage: first the old, then both, then the new, then the old again.

The old code is this tree.  The new code is a copy with changed programs, and with tables or a layout that
only add to those of the old.
"""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import propolis
from propolis.engines import open_engine
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of

HERE = Path(__file__).parent
OLD = Path(propolis.__file__).parent
ENOUGH = 30  # jobs that each process has run before the deployment goes on
PATIENCE = 240.0  # seconds, of which a busy machine may need many
WRONG = ("Traceback", "CRITICAL", "ERROR", "the engine is away")

Process = subprocess.Popen[str]


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return f"{request.getfixturevalue('valkey_url')}?prefix={request.getfixturevalue('prefix')}:"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """The package as the next version has it: whatever it puts has a colour."""
    package = tmp_path / "new" / "propolis"
    shutil.copytree(OLD, package, ignore=shutil.ignore_patterns("__pycache__"))
    sql, lua = package / "engines/sqlite/sql", package / "engines/redis/lua/verbs"
    (sql / "tables/0003_colours.sql").write_text(
        "ALTER TABLE propolis_job ADD COLUMN colour TEXT;\n"
        "CREATE TABLE propolis_colour (name TEXT PRIMARY KEY) WITHOUT ROWID;\n"
    )
    replace(
        sql / "statements.sql", "batch, member, body)\nVALUES (", "batch, member, body, colour)\nVALUES ("
    )
    replace(
        sql / "statements.sql",
        "?, ?, ?, ?, ?, ?);\n\n-- name: stand_new",
        "?, ?, ?, ?, ?, ?, 'red');\n\n-- name: stand_new",
    )
    replace(
        lua / "put_plain.lua",
        "if call.n_new > 0 then",
        "redis.call('INCR', base .. 'colours')\nif call.n_new > 0 then",
    )
    replace(package / "engines/redis/key_layout.py", "LAYOUT, OLDEST = 1, 1", "LAYOUT, OLDEST = 2, 1")
    replace(lua / "exchange.lua", "local at = 4", "redis.call('INCR', base .. 'exchanges')\nlocal at = 4")
    return package


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


class Deployment:
    """Processes of the old and the new code, and what each has put and run."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._url = url
        self._number = 0
        self.running: dict[str, Process] = {}

    def start(self, code: Path, mode: str = "work") -> str:
        """Returns its name, which begins with that of its code."""
        self._number += 1
        name = f"{'old' if code == OLD else 'new'}{self._number}"
        with (self._folder / f"{name}.log").open("w") as errors:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(HERE / "rolling_process.py"), mode, self._url, str(self._folder / name)],
                env={**os.environ, "PYTHONPATH": str(code.parent)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return name

    def told(self, word: str, name: str) -> list[str]:
        """What this process has put, or run."""
        ledger = self._folder / name
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return [line.removeprefix(f"{word} ") for line in lines if line.startswith(word)]

    def ran(self, name: str, *, from_code: str = "") -> int:
        return sum(job.startswith(from_code) for job in self.told("ran", name))

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            assert time.monotonic() < deadline, self.errors()
            for name, process in self.running.items():
                assert process.poll() is None, (name, self.errors())
            time.sleep(0.02)

    def stop(self, *names: str) -> None:
        for name in names:
            self.running[name].send_signal(signal.SIGTERM)
        self.wait_for(*names)

    def wait_for(self, *names: str) -> None:
        for name in names:
            process = self.running.pop(name)
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, (name, self.errors())

    def errors(self) -> dict[str, str]:
        return {log.stem: log.read_text() for log in self._folder.glob("*.log") if log.stat().st_size}


@pytest.fixture
def deployment(tmp_path: Path, url: str) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path, url)
    yield deployment
    for process in deployment.running.values():
        process.kill()
        process.communicate()


async def test_nothing_is_lost_or_refused_by_a_rolling_deployment_and_a_rollback(
    deployment: Deployment, url: str, new: Path, tmp_path: Path
) -> None:
    old = [deployment.start(OLD) for _ in range(2)]
    deployment.until(lambda: all(deployment.ran(each) >= ENOUGH for each in old))
    later = [deployment.start(new) for _ in range(2)]
    deployment.until(
        lambda: (
            sum(deployment.ran(each, from_code="old") for each in later) >= ENOUGH
            and sum(deployment.ran(each, from_code="new") for each in old) >= ENOUGH
        )
    )
    deployment.stop(*old)
    before = {each: deployment.ran(each) for each in later}
    deployment.until(lambda: all(deployment.ran(each) >= before[each] + ENOUGH for each in later))
    again = [deployment.start(OLD) for _ in range(2)]
    deployment.until(lambda: sum(deployment.ran(each, from_code="new") for each in again) >= ENOUGH)
    deployment.stop(*later)
    deployment.until(lambda: all(deployment.ran(each) >= ENOUGH for each in again))
    deployment.stop(*again)
    last = deployment.start(OLD, "drain")
    deployment.wait_for(last)

    everybody = [*old, *later, *again, last]
    put = {job for each in everybody for job in deployment.told("put", each)}
    ran = {job for each in everybody for job in deployment.told("ran", each)}
    assert not put - ran
    assert not {
        name: text for name, text in deployment.errors().items() if any(word in text for word in WRONG)
    }
    engine = await open_engine(url)
    counts = (await engine.queues())["default"]
    await engine.close()
    assert (counts.waiting, counts.running, counts.dead) == (0, 0, 0)
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as db:
            assert db.execute("SELECT count(*) FROM propolis_migration").fetchone() == (3,)
    else:
        server, _, prefix = url.partition("?prefix=")
        link = RedisLink(target_of(Address(server)))
        await link.open()
        assert await link.command("GET", f"{prefix}layout") == b"2 1"
        await link.close()


@pytest.mark.parametrize("listener", ["old", "new"])
def test_hints_arrive_from_old_code_to_new_and_back(deployment: Deployment, new: Path, listener: str) -> None:
    codes = {"old": OLD, "new": new}
    hears = deployment.running[deployment.start(codes.pop(listener), "listen")]
    puts = deployment.running[deployment.start(codes.popitem()[1], "listen")]
    for _ in range(5):
        assert ask(hears, "wait") == "waiting"
        assert ask(puts, "put") == "put"
        assert hears.stdout is not None
        assert hears.stdout.readline().strip() == "heard", deployment.errors()


def ask(process: Process, order: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{order}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()

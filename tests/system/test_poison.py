"""Jobs that take their process with them, on real engines with real processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.core.job import State

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")

HERE = Path(__file__).parent
NEIGHBOURS = 6


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    monkeypatch.setenv("WORKER_JOBS_URL", url)
    return url


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    monkeypatch.syspath_prepend(str(HERE))
    sys.modules.pop("worker_jobs", None)  # so that it takes this test's engine
    app = load_app("worker_jobs:app")
    yield app
    await app.aclose()


@contextmanager
def workers(*options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "propolis", "worker", "worker_jobs:app", "--lease", "1s", *options]
    process = subprocess.Popen(command, cwd=HERE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(240):
        while not await condition():
            await asyncio.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("how", ["exit", "kill"])
async def test_poison_is_dead_after_one_loss_and_three_crashes_and_no_neighbour_is(
    url: str, app: Registry, how: str
) -> None:
    """F07, F08, S0.45, S4.4: it kills the worker once, with all who are in it; then only its own process."""
    neighbours = [await app.tasks["neighbour"].aenqueue(0.3) for _ in range(NEIGHBOURS)]
    poison = await app.tasks["bomb"].aenqueue(how)
    innocent = [await app.tasks["neighbour"].aenqueue(0.0) for _ in range(NEIGHBOURS)]

    async def all_ended() -> bool:
        records = [await handle.astatus() for handle in (poison, *neighbours, *innocent)]
        return all(record is not None and record.state.terminal for record in records)

    with workers("--processes", "2", "-q", "default=20"):
        await until(all_ended)

    record = await poison.astatus()
    assert record is not None
    assert (record.state, record.reason, record.crashes) == (State.DEAD, "crashed", 3)
    assert record.losses == 1
    for handle in (*neighbours, *innocent):
        status = await handle.astatus()
        assert status is not None
        assert (status.state, status.failures) == (State.DONE, 0)
        assert (status.crashes, status.losses <= 1) == (0, True)


async def test_three_bombs_of_different_kinds_bury_no_innocent(url: str, app: Registry) -> None:
    """F07, F08: each kills a worker once, with whoever is in it; from then on it only harms its process."""
    innocent = [await app.tasks["neighbour"].aenqueue(0.5) for _ in range(NEIGHBOURS)]
    bombs = [await app.tasks["bomb"].aenqueue(how) for how in ("exit", "segfault", "kill")]
    innocent += [await app.tasks["neighbour"].aenqueue(0.0) for _ in range(NEIGHBOURS)]

    async def all_ended() -> bool:
        records = [await handle.astatus() for handle in (*bombs, *innocent)]
        return all(record is not None and record.state.terminal for record in records)

    with workers("--processes", "2", "-q", "default=20"):
        await until(all_ended)

    for handle in bombs:
        record = await handle.astatus()
        assert record is not None
        assert (record.state, record.reason, record.crashes) == (State.DEAD, "crashed", 3), record.history
        assert 1 <= record.losses <= len(bombs), record.history
    for handle in innocent:
        status = await handle.astatus()
        assert status is not None
        assert (status.state, status.failures, status.crashes) == (State.DONE, 0, 0), status.history
        assert status.losses <= len(bombs), status.history


async def test_children_die_with_their_worker_even_if_they_hear_nothing(
    url: str, app: Registry, tmp_path: Path
) -> None:
    """F06, F48: kill -9 of the worker while its child is in a C function that holds the interpreter."""
    sign = tmp_path / "pid"
    await app.tasks["hold"].aenqueue(str(sign))

    async def started() -> bool:
        return sign.exists() and bool(sign.read_text())

    async def gone() -> bool:
        return not is_running(int(sign.read_text()))

    with workers() as worker:
        await until(started)
        assert not await gone()
        worker.send_signal(signal.SIGKILL)
        await until(gone)

"""What happens to PostgreSQL and to the way there: nothing acknowledged is lost, and no call hangs."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from propolis import App
from propolis.app.client import puts
from propolis.core.job import Done, Lease, State
from propolis.engines.postgres import client as postgres_link
from propolis.engines.postgres import hints as postgres_hints
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown, StorageFull
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.proxy import Proxy
from propolis.testing.servers.serving import PostgresServer, postgres
from propolis.worker import Settings, Worker


async def take(engine: PostgresEngine, limit: int = 100) -> list[Lease]:
    return await engine.lease({"default": limit}, span=SPAN, holder=HOLDER)


async def hearing(engine: PostgresEngine) -> None:
    await engine.wait(["default"], 0)  # from now on it listens
    async with asyncio.timeout(120):
        while not engine.hears:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One of our own, which syncs, and which these tests may mistreat as long as they mend it."""
    with postgres(durable=True) as started:
        yield started


@pytest_asyncio.fixture
async def admin(server: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(server.url)
    await connection.execute(dropped("propolis"))
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def proxy(server: PostgresServer) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as opened:
        yield opened


def through(proxy: Proxy) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres"


# --- the wire ----------------------------------------------------------------------------


async def test_no_call_waits_longer_for_a_black_hole_than_its_patience(
    proxy: Proxy, admin: asyncpg.Connection
) -> None:
    """F17: calls that were on their way, and calls that need a new connection."""
    engine = await PostgresEngine(through(proxy), patience="500ms").open()
    await engine.put([a_job(id="before")])
    proxy.black_hole()

    async with asyncio.timeout(120):
        for act in (lambda: engine.put([a_job()]), lambda: take(engine), engine.sweep, engine.queues) * 2:
            with pytest.raises((OutcomeUnknown, EngineUnavailable)):
                await act()
        answers = await asyncio.gather(*(engine.queues() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(answer, EngineUnavailable) for answer in answers)
    proxy.restore()

    async with asyncio.timeout(120):
        found = None
        while found is None:  # its patience is short for a busy machine as well
            with suppress(OutcomeUnknown, EngineUnavailable):
                found = await engine.get("before")
    assert found.state is State.READY
    await engine.close()


async def test_opening_behind_a_black_hole_does_not_hang(
    server: PostgresServer, proxy: Proxy, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F17: neither where nothing answers, nor where the answers stop in the middle."""
    with monkeypatch.context() as patched:
        patched.setattr(postgres_link, "CONNECT_WITHIN", 0.5)
        patched.setattr(postgres_link, "MIGRATE_WITHIN", 0.5)
        proxy.black_hole()
        async with asyncio.timeout(120):
            with pytest.raises(EngineUnavailable):
                await PostgresEngine(through(proxy), patience="500ms").open()
        proxy.restore()
        proxy.black_hole_after(b"CREATE SCHEMA")
        async with asyncio.timeout(120):
            with pytest.raises(OutcomeUnknown):
                await PostgresEngine(through(proxy), patience="500ms").open()
        proxy.restore()

    engine = await PostgresEngine(through(proxy)).open()
    await engine.put([a_job()])
    await engine.close()


async def test_a_put_whose_answer_is_lost_is_made_again_and_makes_one_job(
    server: PostgresServer, proxy: Proxy, admin: asyncpg.Connection
) -> None:
    """F15, I1: also when the job has run and gone before the put is repeated."""
    app = App(through(proxy))
    runs: list[int] = []

    @app.task(name="tests.count")
    async def count(number: int) -> None:
        runs.append(number)

    await count.aenqueue(0)
    direct = App(server.url)
    direct.task(name="tests.count")(count.function)
    worker = Worker(direct, Settings())
    running = asyncio.create_task(worker.run())

    for number in range(1, 6):
        proxy.lose_answer_to(b"tests.count")
        handle = await count.aenqueue(number)
        assert handle.created
    assert proxy.lost == 5

    async with asyncio.timeout(120):
        while len(runs) < 6:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # in which a second job would run
    worker.stop()
    await running
    assert sorted(runs) == list(range(6))
    await app.aclose()
    await direct.aclose()


async def test_jobs_put_together_whose_answers_are_all_lost_are_not_put_one_by_one(
    proxy: Proxy, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F15, I1: everybody is told that it is not known, and each job is there once."""
    monkeypatch.setattr(puts, "REPEAT_AFTER", (0.01, 0.01))
    app = App(through(proxy))

    @app.task(name="tests.nothing")
    async def nothing() -> None: ...

    await app.ready()
    proxy.lose_answer_to(b"tests.nothing", times=3)
    answers = await asyncio.gather(*(nothing.aenqueue() for _ in range(20)), return_exceptions=True)

    assert [type(answer) for answer in answers] == [OutcomeUnknown] * 20
    assert proxy.lost == 3
    engine = await PostgresEngine(through(proxy)).open()
    assert len(await take(engine)) == 20
    await engine.close()
    await app.aclose()


async def test_connections_that_break_lose_nothing(proxy: Proxy, admin: asyncpg.Connection) -> None:
    """F16: every second put meets a broken connection; what is acknowledged is there, once."""
    app = App(through(proxy))

    @app.task(name="tests.nothing")
    async def nothing() -> None: ...

    handles = []
    for number in range(20):
        if number % 2:
            proxy.reset()
        handles.append(await nothing.aenqueue())

    engine = await PostgresEngine(through(proxy)).open()
    assert [lease.id for lease in await take(engine)] == [handle.id for handle in handles]
    await engine.close()
    await app.aclose()


async def test_a_listener_that_is_cut_off_listens_again_and_looks_around(
    server: PostgresServer, proxy: Proxy, admin: asyncpg.Connection
) -> None:
    """F32: a put that nobody could hear of is found as soon as somebody listens again."""
    engine = await PostgresEngine(server.url, listen=through(proxy)).open()
    await hearing(engine)
    proxy.reset()
    while engine.hears:
        await asyncio.sleep(0.01)
    await admin.fetchval("SELECT propolis.enqueue($1)", '{"v": 1, "id": "unheard", "task": "t"}')
    await engine.rules()

    async with asyncio.timeout(120):
        assert await take(engine) != [] or await engine.wait(["default"], 20)
    await hearing(engine)
    await engine.close()


async def test_a_listener_that_hears_nothing_finds_out(
    server: PostgresServer, proxy: Proxy, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F17: a black hole, which no error tells about; meanwhile everybody polls."""
    monkeypatch.setattr(postgres_hints, "SILENCE", 0.2)
    monkeypatch.setattr(postgres_hints, "HEARD_WITHIN", 0.3)
    engine = await PostgresEngine(server.url, listen=through(proxy)).open()
    await hearing(engine)
    proxy.black_hole()

    async with asyncio.timeout(120):
        while engine.hears:
            await asyncio.sleep(0.01)
    proxy.restore()

    await hearing(engine)
    await engine.close()


async def test_a_pooler_that_passes_no_notifications_on_is_told_about_once(
    pgbouncer_url: str, schema: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30: the worker polls instead, and the log says what to do."""
    monkeypatch.setattr(postgres_hints, "HEARD_WITHIN", 0.2)
    monkeypatch.setattr(postgres_hints, "LISTEN_IN_VAIN", 0.1)
    app = App(f"{pgbouncer_url}?schema={schema}")
    ran = asyncio.Event()

    @app.task(name="tests.ring")
    async def ring() -> None:
        ran.set()

    worker = Worker(app, Settings(poll=timedelta(seconds=0.2)))
    with caplog.at_level(logging.INFO, "propolis.postgres"):
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(120):
            while caplog.text.count("no notification arrives") < 1:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1)  # in which it tries again, in vain
        other = App(f"{pgbouncer_url}?schema={schema}")
        await other.client.aput(a_job(task="tests.ring"))
        async with asyncio.timeout(120):
            await ran.wait()

    assert caplog.text.count("no notification arrives") == 1
    assert "listen=" in caplog.text
    assert "is behind a pooler" in caplog.text
    worker.stop()
    await running
    await app.aclose()
    await other.aclose()


# --- the server --------------------------------------------------------------------------


async def test_a_server_killed_with_9_keeps_what_it_has_acknowledged() -> None:
    """F11, I3: and fences go on growing."""
    with postgres(durable=True) as server:
        engine = await PostgresEngine(server.url, patience="5s").open()
        await engine.put([a_job(id=f"job-{number}") for number in range(5)])
        held = await take(engine, 2)
        await engine.put([a_job(id="last")])
        server.kill()
        with pytest.raises((OutcomeUnknown, EngineUnavailable)):
            await engine.put([a_job()])
        await asyncio.to_thread(server.start)

        assert await engine.settle([(lease, Done()) for lease in held]) == []
        rest = await take(engine)
        assert [lease.id for lease in rest] == ["job-2", "job-3", "job-4", "last"]
        assert min(lease.fence for lease in rest) > max(lease.fence for lease in held)
        await engine.close()


async def test_a_commit_whose_copy_is_not_confirmed_has_an_unknown_outcome(
    server: PostgresServer, admin: asyncpg.Connection
) -> None:
    """F29: somebody cancels the wait for a synchronous standby; the job is there, but perhaps only here."""
    engine = await PostgresEngine(server.url).open()
    await admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    await admin.execute("SELECT pg_reload_conf()")
    put = [a_job()]
    try:
        putting = asyncio.create_task(engine.put(put))
        cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        async with asyncio.timeout(120):
            while not await admin.fetch(cancel):
                await asyncio.sleep(0.01)
                if putting.done():  # before the server had read its settings anew
                    put.append(a_job())
                    putting = asyncio.create_task(engine.put(put[-1:]))
        with pytest.raises(OutcomeUnknown, match="synchronous replication"):
            await putting
    finally:
        await admin.execute("SET synchronous_commit = local")
        await admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await admin.execute("SELECT pg_reload_conf()")

    assert [lease.id for lease in await take(engine)] == [job.id for job in put]
    await engine.close()


async def test_a_failover_loses_nothing_that_was_copied_and_fences_go_on_growing() -> None:
    """F28, F29, I3: the old server is killed, its standby promoted; the same engine goes on there."""
    with postgres(durable=True) as old:
        engine = await PostgresEngine(old.url, patience="5s").open()
        [new] = [old.standby(old.folder.parent / "standby")]
        new.start()
        url = f"postgresql://postgres@127.0.0.1:{old.port},127.0.0.1:{new.port}/postgres"
        both = await PostgresEngine(f"{url}?target_session_attrs=primary", patience="5s").open()
        try:
            await engine.close()
            reading = PostgresEngine(new.url)
            await both.put([a_job(id=f"job-{number}") for number in range(40)])
            before = await take(both, 39)
            await replayed(old, new)
            with pytest.raises(EngineUnavailable, match=r"read-only.*primary"):  # F55
                await reading.open()
            await reading.open_to_look()
            with pytest.raises(EngineUnavailable, match="read-only"):
                await reading.put([a_job()])
            await reading.close()
            old.kill()
            standby = await asyncpg.connect(new.url)
            assert await standby.fetchval("SELECT pg_promote()")
            await standby.close()

            async with asyncio.timeout(120):
                while (lost := await settled(both, before)) is None:
                    await asyncio.sleep(0.05)
            [after] = await take(both)
            assert lost == []
            assert after.id == "job-39"
            assert after.fence > max(lease.fence for lease in before)
        finally:
            await both.close()
            new.stop()


async def replayed(old: PostgresServer, new: PostgresServer) -> None:
    there, here = await asyncpg.connect(old.url), await asyncpg.connect(new.url)
    goal = await there.fetchval("SELECT pg_current_wal_flush_lsn()::text")
    async with asyncio.timeout(120):
        while not await here.fetchval("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", goal):
            await asyncio.sleep(0.01)
    await there.close()
    await here.close()


async def settled(engine: PostgresEngine, leases: list[Lease]) -> list[Lease] | None:
    try:
        return await engine.settle([(lease, Done()) for lease in leases])
    except (EngineUnavailable, OutcomeUnknown):
        return None


async def test_too_many_connections_are_waited_for(server: PostgresServer) -> None:
    """F40: as an error that says so, and only until there is room."""
    with postgres(settings=("max_connections=8", "superuser_reserved_connections=0")) as small:
        engine = await PostgresEngine(small.url).open()
        others: list[asyncpg.Connection] = []
        with suppress(asyncpg.TooManyConnectionsError):
            while True:
                others.append(await asyncpg.connect(small.url))

        with pytest.raises(EngineUnavailable, match="too many"):
            await PostgresEngine(small.url).open()
        assert await engine.put([a_job()])  # what is open stays open
        for other in others:
            await other.close()
        again = await PostgresEngine(small.url).open()
        await again.close()
        await engine.close()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Eight megabytes that anybody may write to."""
    folder = Path(tempfile.mkdtemp(prefix="propolis-"))
    folder.chmod(0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=777", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        folder.rmdir()
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    folder.rmdir()


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 65536):
            pass


def place_for(server: PostgresServer, folder: Path) -> Path:
    place = folder / "space"
    place.mkdir()
    os.chown(place, server.folder.stat().st_uid, -1)
    return place


async def put_until_refused(engine: PostgresEngine) -> list[str]:
    put: list[str] = []
    with suppress(StorageFull):
        while len(put) < 10_000:
            put += [receipt.id for receipt in await engine.put([a_job("x" * 8000)])]
    return put


async def test_a_full_disk_is_told_and_mends_itself(small_disk: Path) -> None:
    """F35 for PostgreSQL: nothing is acknowledged that has no room."""
    with postgres() as server:
        admin = await asyncpg.connect(server.url)
        await admin.execute(f"CREATE TABLESPACE small LOCATION '{place_for(server, small_disk)}'")
        await admin.execute("ALTER DATABASE postgres SET default_tablespace = small")
        await admin.close()
        engine = await PostgresEngine(server.url).open()
        fill(small_disk / "filler")

        put = await put_until_refused(engine)
        with pytest.raises(StorageFull, match="free some space"):
            await engine.put([a_job("x" * 8000)])
        (small_disk / "filler").unlink()

        put += [receipt.id for receipt in await engine.put([a_job()])]
        assert [lease.id for lease in await take(engine, 10_000)] == put
        await engine.close()


# --- rights ------------------------------------------------------------------------------


async def test_a_wrong_password_is_told_and_not_shown(
    server: PostgresServer, admin: asyncpg.Connection
) -> None:
    rules = server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text("host all bob 127.0.0.1/32 scram-sha-256\n" + before)
    await admin.execute("DROP ROLE IF EXISTS bob")
    await admin.execute("CREATE ROLE bob LOGIN PASSWORD 'right'")
    await admin.execute("SELECT pg_reload_conf()")
    try:
        async with asyncio.timeout(120):
            while True:  # until the server has read its rules again
                with pytest.raises(EngineError) as raised:
                    await PostgresEngine(f"postgresql://bob:wrong@127.0.0.1:{server.port}/postgres").open()
                if "password" in str(raised.value):
                    break
    finally:
        rules.write_text(before)
        await admin.execute("SELECT pg_reload_conf()")

    assert "wrong" not in str(raised.value)


async def test_missing_rights_are_told_with_what_to_do(
    server: PostgresServer, admin: asyncpg.Connection
) -> None:
    await admin.execute("DROP ROLE IF EXISTS eve")
    await admin.execute("CREATE ROLE eve LOGIN")

    with pytest.raises(EngineError, match=r"permission denied.*propolis init --sql"):
        await PostgresEngine(f"postgresql://eve@127.0.0.1:{server.port}/postgres", schema="eves").open()


async def test_a_clock_that_is_wrong_changes_nothing(
    server: PostgresServer, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F37, S2.31, I13: ours is a day ahead; the server's counts."""
    engine = await PostgresEngine(server.url).open()
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 86_400 * 10**9)
    await engine.put([a_job(due_at=await engine.now() + timedelta(hours=1)), a_job(id="now")])

    leases = await take(engine)

    assert [lease.id for lease in leases] == ["now"]
    assert leases[0].until <= await engine.now() + SPAN
    assert (await engine.sweep()).reaped == 0
    await engine.close()

"""Worker processes on Redis while they, the server, the master or the network go away."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from propolis.core.envelope import Envelope
from propolis.core.ids import new_id
from propolis.core.job import JobInfo, State
from propolis.core.protocols import Engine, Filter
from propolis.engines import open_engine
from propolis.errors import EngineError, EngineUnavailable, OutcomeUnknown
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.proxy import Proxy
from propolis.testing.servers.redis import redis, redis_cluster, redis_sentinels

from .fleet import Fleet

JOBS = 10_000
SOON = 90.0
OPTIONS = ("--lease", "2s")
WORKER = str(Path(__file__).with_name("fault_worker.py"))


@asynccontextmanager
async def engine_at(url: str) -> AsyncIterator[Engine]:
    engine = await open_engine(url)
    try:
        yield engine
    finally:
        await engine.close()


async def put_surely(engine: Engine, jobs: list[Envelope]) -> None:
    """As a careful producer does it: the same call again until it is answered."""
    token = new_id()
    while True:
        try:
            await engine.put(jobs, token=token)
        except (EngineUnavailable, OutcomeUnknown):
            await asyncio.sleep(0.05)
        else:
            return


async def put_all(engine: Engine, jobs: list[Envelope]) -> None:
    for start in range(0, len(jobs), 200):
        await put_surely(engine, jobs[start : start + 200])


async def records(engine: Engine) -> list[JobInfo]:
    found: list[JobInfo] = []
    after: int | None = 0
    while after is not None:
        page = await engine.find(Filter(), limit=2000, after=after)
        found += page.jobs
        after = page.after
    return found


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON):
        while not seen():
            await asyncio.sleep(0.02)


async def drained(engine: Engine) -> None:
    async with asyncio.timeout(SOON):
        while True:
            try:
                counts = await engine.queues()
            except EngineError:
                counts = {}
            if counts and not any(each.waiting + each.running for each in counts.values()):
                return
            await asyncio.sleep(0.05)


def explain(fleet: Fleet, sent: list[Envelope], found: list[JobInfo]) -> None:
    """Nothing is lost, and every further run has its reason on record."""
    starts = Counter(line.job_id for line in fleet.lines() if line.what == "start")
    ends = Counter(line.job_id for line in fleet.lines() if line.what == "end")
    assert {record.id for record in found} == {job.id for job in sent}
    assert all(record.state is State.DONE for record in found)
    for record in found:
        job_id = record.id
        assert ends[job_id] >= 1, "done without having run to its end"
        assert starts[job_id] <= record.attempts
        assert record.attempts == 1 + record.losses + record.crashes, "a run without a reason"


class Harassed:
    """A fleet whose workers are killed and replaced."""

    def __init__(self, fleet: Fleet, workers: int = 3) -> None:
        self._fleet = fleet
        self._log = fleet.ledger.with_name("log")
        self._alive = [self._start() for _ in range(workers)]

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            return self._fleet.run(WORKER, stderr=log)

    async def all_at_work(self, engine: Engine) -> list[Envelope]:
        """Until each has run something, since one that finds no server when it starts gives up.

        Gives the jobs that were put for that.
        """
        put: list[Envelope] = []
        async with asyncio.timeout(SOON):
            while {worker.pid for worker in self._alive} - {line.pid for line in self._fleet.lines()}:
                put += count_jobs(10, seconds=0.01, priority=9)
                await engine.put(put[-10:])
                await asyncio.sleep(0.1)
        return put

    def kill_one(self) -> None:
        victim = self._alive.pop(random.randrange(len(self._alive)))
        victim.kill()
        victim.wait()
        self._alive.append(self._start())

    async def stop(self) -> str:
        """Each has to end well; gives the output of all of them.

        The loop goes on meanwhile: a proxy of the test may stand between them and the server.
        """
        for worker in self._alive:
            assert worker.poll() is None, f"a worker gave up: {self._log.read_text()[-2000:]}"
            worker.send_signal(signal.SIGTERM)
        await until(lambda: all(worker.poll() is not None for worker in self._alive))
        assert [worker.returncode for worker in self._alive] == [0] * len(self._alive)
        return self._log.read_text()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[str], Fleet]]:
    fleets: list[Fleet] = []

    def make(url: str) -> Fleet:
        fleets.append(Fleet(tmp_path, url=url))
        return fleets[-1]

    yield make
    for each in fleets:
        each.close()


def count_jobs(number: int, *, seconds: float = 0.0, priority: int = 0) -> list[Envelope]:
    return [a_job(seconds, task="count", priority=priority, max_crashes=1000) for _ in range(number)]


def ended(fleet: Fleet) -> int:
    """The last line may still be on its way."""
    return fleet.ledger.read_bytes().count(b"end ") if fleet.ledger.exists() else 0


async def test_killing_workers_and_the_server_loses_nothing_and_explains_every_second_run(
    fleet: Callable[[str], Fleet],
) -> None:
    """F01, F11, I5, I8, L2, L3, S1.29, S4.24: ten thousand jobs, AOF always, kill -9 of both."""
    with redis(durable=True) as server:
        workers = fleet(server.url)
        async with engine_at(server.url) as engine:
            sent = count_jobs(JOBS, seconds=0.02)
            await put_all(engine, sent)
            harassed = Harassed(workers)
            for _ in range(2):
                sent += await harassed.all_at_work(engine)
                assert ended(workers) < JOBS  # it is the middle
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                harassed.kill_one()
                harassed.kill_one()
            sent += await harassed.all_at_work(engine)
            await drained(engine)
            await harassed.stop()
            found = await records(engine)
        explain(workers, sent, found)
        assert any(record.losses for record in found)


async def test_behind_sentinels_a_killed_master_loses_nothing_that_was_copied(
    fleet: Callable[[str], Fleet],
) -> None:
    """F24, F25, I3: level `node`; three thousand jobs, and more that are put during the failover."""
    with redis_sentinels(durable=True) as servers:
        url = f"{servers.url}?copies=1&copied_within=500ms&patience=2s&connect_within=1s"
        workers = fleet(url)
        async with engine_at(url) as engine:
            sent = count_jobs(3000)
            await put_all(engine, sent[:2000])
            harassed = Harassed(workers)
            await until(lambda: ended(workers) >= 500)
            sent += await harassed.all_at_work(engine)
            await asyncio.to_thread(servers.master.kill)
            putting = asyncio.ensure_future(put_all(engine, sent[2000:3000]))
            before = ended(workers)
            await until(lambda: servers.replica.info("replication")["role"] == "master")
            await asyncio.to_thread(servers.master.start)
            # The sentinels would do this as well, ten seconds later.
            servers.master.ask("REPLICAOF", "127.0.0.1", servers.replica.port)
            await putting
            await until(lambda: ended(workers) > before)
            await drained(engine)
            await harassed.stop()
            found = await records(engine)
        explain(workers, sent, found)


@pytest.mark.parametrize("shards", ["", "&shards=6&partitions=default:6"], ids=["in one slot", "shards"])
async def test_in_a_cluster_a_killed_master_is_replaced_while_workers_go_on(
    fleet: Callable[[str], Fleet], shards: str
) -> None:
    """F24 in a cluster: whichever master has the jobs, or most of them, is killed."""
    with redis_cluster(durable=True) as servers:
        url = f"{servers.url}?copies=1&copied_within=500ms&patience=2s&connect_within=1s{shards}"
        workers = fleet(url)
        async with engine_at(url) as engine:
            sent = count_jobs(3000)
            await put_all(engine, sent[:2000])
            harassed = Harassed(workers)
            await until(lambda: ended(workers) >= 500)
            sent += await harassed.all_at_work(engine)
            victim = max(servers.masters, key=lambda server: server.ask("DBSIZE"))
            heir = servers.replicas[servers.masters.index(victim)]
            await asyncio.to_thread(victim.kill)
            putting = asyncio.ensure_future(put_all(engine, sent[2000:3000]))
            before = ended(workers)
            await until(lambda: heir.info("replication")["role"] == "master")
            await asyncio.to_thread(victim.start)
            await putting
            await until(lambda: ended(workers) > before)
            await drained(engine)
            await harassed.stop()
            found = await records(engine)
        explain(workers, sent, found)


async def test_lost_answers_and_resets_lose_nothing_and_put_nothing_twice(
    fleet: Callable[[str], Fleet],
) -> None:
    """F15, F16: the network breaks again and again, before and after the server has heard."""
    with redis() as server:
        async with Proxy(server.port) as proxy:
            url = f"redis://127.0.0.1:{proxy.port}"
            workers = fleet(url)
            harassed = Harassed(workers, workers=2)
            async with engine_at(server.url) as observer, engine_at(url) as engine:
                sent = count_jobs(3000)
                await put_all(engine, sent[:1000])
                sent += await harassed.all_at_work(engine)
                putting = asyncio.ensure_future(put_all(engine, sent[1000:3000]))
                for turn in range(20):
                    if turn % 2:
                        proxy.reset()
                    else:
                        proxy.swallow_an_answer()
                    await asyncio.sleep(0.1)  # the pace of the faults, not a wait for something
                await putting
                await drained(observer)
                await harassed.stop()
                found = await records(observer)
    explain(workers, sent, found)


async def test_a_worker_in_a_black_hole_stops_its_jobs_and_another_runs_them(
    fleet: Callable[[str], Fleet],
) -> None:
    """F17, F20, L2: the worker notices by its own clock, before its leases end."""
    with redis() as server:
        async with Proxy(server.port) as proxy, engine_at(server.url) as engine:
            cut = fleet(f"redis://127.0.0.1:{proxy.port}?patience=1s&copied_within=500ms&connect_within=1s")
            lonely = cut.start(*OPTIONS)
            job = a_job(60, task="sleep_first", max_crashes=1000)
            await engine.put([job])
            await until(lambda: bool(cut.lines_of("start", job.id)))

            proxy.black_hole()
            other = fleet(server.url)
            other.start(*OPTIONS)
            await until(lambda: bool(cut.lines_of("end", job.id)))

            record = await engine.get(job.id)
            assert record is not None
            assert (record.attempts, record.losses) == (2, 1)
            [first, second] = cut.lines_of("start", job.id)
            assert second.fence > first.fence
            assert [line.pid for line in cut.lines_of("end", job.id)] == [second.pid]
            proxy.restore()
            later = a_job(0.0, task="count")
            await engine.put([later])
            await until(lambda: bool(cut.lines_of("end", later.id)))
            assert lonely.poll() is None


async def test_a_server_that_is_away_for_long_leaves_workers_waiting_and_calm(
    fleet: Callable[[str], Fleet],
) -> None:
    """F13: an enqueue fails at once, no worker gives up, none of them burns the processor."""
    with redis(durable=True) as server:
        workers = fleet(server.url)
        harassed = Harassed(workers, workers=2)
        async with engine_at(server.url) as engine:
            [first, second] = count_jobs(2)
            await engine.put([first])
            await until(lambda: bool(workers.lines_of("end", first.id)))
            await harassed.all_at_work(engine)
            await asyncio.to_thread(server.stop)
            with pytest.raises((EngineUnavailable, OutcomeUnknown)):
                async with asyncio.timeout(5):
                    await engine.put([second])
            used = [processor_time(worker) for worker in workers.workers]
            await asyncio.sleep(3)  # away, not a wait for something
            spent = [processor_time(w) - u for w, u in zip(workers.workers, used, strict=True)]
            assert max(spent) < 3 * 0.10
            await asyncio.to_thread(server.start)
            await put_surely(engine, [second])
            await until(lambda: bool(workers.lines_of("end", second.id)))
        await harassed.stop()


def processor_time(worker: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def test_emptying_the_server_under_a_worker_brings_nothing_back_and_breaks_nothing(
    fleet: Callable[[str], Fleet],
) -> None:
    """F27: FLUSHALL and SCRIPT FLUSH while jobs run."""
    with redis() as server:
        workers = fleet(server.url)
        harassed = Harassed(workers, workers=1)
        async with engine_at(server.url) as engine:
            [running] = count_jobs(1, seconds=30.0)
            await engine.put([running, *count_jobs(50, seconds=0.5)])
            await until(lambda: bool(workers.lines_of("start", running.id)))
            server.ask("FLUSHALL")
            server.ask("SCRIPT", "FLUSH")
            [after] = count_jobs(1)
            await engine.put([after])
            await until(lambda: bool(workers.lines_of("end", after.id)))
            await drained(engine)
            output = await harassed.stop()
            assert {record.id for record in await records(engine)} == {after.id}
            assert not workers.lines_of(
                "end", running.id
            )  # it was stopped when its lease could not be renewed
        assert "is lost" in output
        assert "Traceback" not in output


async def test_these_tests_would_notice_a_lost_job_and_a_run_without_a_reason(
    fleet: Callable[[str], Fleet],
) -> None:
    """The control: a server that keeps nothing is killed, and a job is started twice on one lease."""
    with redis() as server:
        workers = fleet(server.url)
        async with engine_at(server.url) as engine:
            lost = count_jobs(10)
            await engine.put(lost)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            [job] = kept = count_jobs(1)
            await put_surely(engine, kept)
            workers.run(WORKER)
            await drained(engine)
            found = await records(engine)
        explain(workers, kept, found)

        with pytest.raises(AssertionError):
            explain(workers, [*lost, *kept], found)
        [line] = workers.lines_of("start", job.id)
        with workers.ledger.open("a") as ledger:
            ledger.write(f"start {job.id} {line.fence} {line.pid} {line.at}\n")
        with pytest.raises(AssertionError):
            explain(workers, kept, found)

"""`propolis bench`: its statistics, and that it measures on real engines and leaves nothing behind."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from propolis.bench.figures import Figure, machine, percentile, summed_up
from propolis.bench.target import UnknownTarget, bench_target, with_option
from propolis.cli import main
from propolis.cli.bench import shown
from propolis.engines.address import Address
from propolis.engines.redis.client.link import RedisLink
from propolis.engines.redis.client.target import target_of
from propolis.engines.table import ENGINES
from propolis.errors import UnknownEngine

FEW = ("--jobs", "200", "--repeat", "1", "--seconds", "1", "--rate", "50")
QUICK = ("raw", "enqueue", "drain", "idle", "load", "memory")  # recovery takes as long as a lease


def bench(url: str, *arguments: str, steps: tuple[str, ...] = QUICK) -> dict[str, Any]:
    only = [part for step in steps for part in ("--only", step)]
    done = subprocess.run(
        [sys.executable, "-m", "propolis", "bench", url, *FEW, *only, "--json", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def names(document: dict[str, Any]) -> list[str]:
    return [figure["name"] for figure in document["figures"]]


# --- statistics --------------------------------------------------------------------------


def test_several_runs_are_summed_up_by_their_middle_and_by_the_middle_of_their_ratios() -> None:
    runs = [
        Figure("drain", 50, "jobs/s", 100),
        Figure("drain", 10, "jobs/s", 40),
        Figure("drain", 90, "jobs/s", 100),
    ]
    [summary] = summed_up(runs)
    assert (summary.median, summary.lowest, summary.highest) == (50, 10, 90)
    assert (summary.raw, summary.of_raw, summary.runs) == (100, 0.5, 3)


def test_what_has_no_raw_loop_has_no_ratio() -> None:
    [summary] = summed_up([Figure("idle", 1.5, "ms")])
    assert summary.raw is None
    assert summary.of_raw is None


def test_figures_keep_the_order_in_which_they_came() -> None:
    figures = [Figure(name, 1, "s") for name in ("b", "a", "b", "c")]
    assert [summary.name for summary in summed_up(figures)] == ["b", "a", "c"]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_a_value_is_shown_with_as_many_digits_as_it_is_worth() -> None:
    assert [shown(value) for value in (12345.6, 12.345, 0.01234)] == ["12,346", "12.3", "0.0123"]


def test_the_machine_and_the_versions_stand_beside_the_figures() -> None:
    assert {"python", "cores", "propolis", "msgspec"} <= machine().keys()


# --- where it measures -------------------------------------------------------------------


def test_an_option_is_put_into_a_url_or_replaced_there() -> None:
    assert with_option("postgresql://h/d?a=1&schema=x", "schema", "y") == "postgresql://h/d?a=1&schema=y"


def test_a_url_that_names_no_engine_is_refused() -> None:
    with pytest.raises(UnknownEngine):
        bench_target("carrier-pigeon://")


@pytest.mark.parametrize("scheme", ENGINES)
def test_there_is_a_raw_loop_for_each_engine_of_ours(scheme: str) -> None:
    assert not isinstance(bench_target(f"{scheme}://"), UnknownTarget)


def test_an_engine_of_ours_without_a_raw_loop_is_measured_like_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENGINES, "quiet", "propolis.engines.quiet.engine:from_url")
    assert isinstance(bench_target("quiet://"), UnknownTarget)


async def test_an_engine_of_somebody_elses_is_measured_on_a_queue_of_its_own() -> None:
    async with UnknownTarget().place("memory://") as place:
        assert place.queue.startswith("propolis_bench_")
    assert await UnknownTarget().raw(place, 1, "") is None


# --- that it measures --------------------------------------------------------------------


@pytest.mark.usefixtures("uncovered")
def test_sqlite_is_measured_in_a_file_of_its_own_which_is_gone_afterwards(tmp_path: Path) -> None:
    document = bench(f"sqlite:///{tmp_path}/jobs.db?synchronous=normal")
    assert list(tmp_path.iterdir()) == []
    assert document["about"]["durability"] == "process"
    assert document["about"]["sqlite"] == sqlite3.sqlite_version
    assert {"enqueue, bulk", "drain", "worker CPU per job", "memory of an idle worker"} <= {*names(document)}
    [drain] = (figure for figure in document["figures"] if figure["name"] == "drain")
    assert drain["of_raw"] == pytest.approx(drain["median"] / drain["raw"])


@pytest.mark.usefixtures("uncovered")
def test_memory_is_measured_in_one_process() -> None:
    document = bench("memory://", "--backlog", "50")
    assert "memory of an idle worker" not in names(document)
    assert "sent to started, idle, p99" in names(document)


@pytest.mark.usefixtures("uncovered")
async def test_postgres_is_measured_in_a_schema_of_its_own_which_is_gone_afterwards(
    postgres_url: str,
) -> None:
    document = bench(postgres_url, steps=("drain", "idle"))
    assert document["about"]["fsync"] == "off"  # as the servers of tests are: it must be told
    connection = await asyncpg.connect(postgres_url)
    left = await connection.fetch("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'propolis_bench%'")
    await connection.close()
    assert left == []


@pytest.mark.usefixtures("uncovered")
async def test_redis_is_measured_under_a_prefix_of_its_own_whose_keys_are_gone_afterwards(
    valkey_url: str,
) -> None:
    document = bench(valkey_url, steps=("drain", "idle"))
    assert document["about"]["maxmemory_policy"] == "noeviction"
    link = RedisLink(target_of(Address(valkey_url)))
    await link.open()
    left = [key for key in await link.command("KEYS", "*") if b"propolis_bench" in key]
    await link.close()
    assert left == []


@pytest.mark.usefixtures("uncovered")
def test_people_get_a_table_and_see_what_is_going_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "propolis", "bench", f"sqlite:///{tmp_path}/jobs.db", *FEW, "--only", "drain"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "of raw" in done.stdout
    assert "run 1: a worker runs 200 jobs" in done.stderr


def test_a_folder_that_is_not_there_is_told_as_everywhere_else(tmp_path: Path) -> None:
    answer = CliRunner().invoke(
        main, ["bench", f"sqlite:///{tmp_path}/nowhere/jobs.db", *FEW, "--only", "enqueue"]
    )
    assert answer.exit_code != 0
    assert f"error: there is no folder {tmp_path}/nowhere" in answer.output

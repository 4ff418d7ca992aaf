"""`propolis batches` and `propolis flow`, as a shell would call them, on a SQLite file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from propolis import App
from propolis.cli import main
from propolis.cli.batches import bar
from propolis.core.batch import BatchState, BatchStatus
from propolis.flows import each
from propolis.strategies import dead
from propolis.worker import Mode, Settings, Worker


class Bench:
    """A batch in a file, and the command line that looks at it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/jobs.db"
        self.app = app = App(self.url)

        @app.task(on_error=dead)
        async def work(n: int) -> None:
            if n < 0:
                raise ValueError(n)

        self.work = work

    def run(self) -> None:
        asyncio.run(Worker(self.app, Settings(mode=Mode.UNTIL_EMPTY)).run())

    def __call__(
        self, *arguments: str, command: str = "batches", code: int = 0, answer: str | None = None
    ) -> str:
        result = CliRunner().invoke(main, [command, *arguments, "--url", self.url], input=answer)
        assert result.exit_code == code, result.output
        return result.output


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.app.close()


def test_batches_are_counted_by_state_and_tell_how_long_they_took(bench: Bench) -> None:
    """S3.22."""
    bench.app.batch(bench.work.many([1])).enqueue()
    bench.app.batch(bench.work.many([-1])).enqueue()
    bench.app.batch(bench.work.many([2])).enqueue()
    bench.run()
    bench.app.batch(bench.work.many([3])).enqueue()
    assert "1 dead, 1 in-progress, 2 success" in bench("list")
    spans = [json.loads(line)["took_s"] for line in bench("list", "--json").splitlines() if line[0] == "{"]
    assert [span is not None for span in spans] == [True, True, True, False]
    assert all(0 < span < 60 for span in spans[:3])


def test_batches_are_listed_and_shown_with_a_bar(bench: Bench) -> None:
    bench(command="init")
    assert "there is no batch" in bench("list", code=1)
    batch = bench.app.batch(bench.work.many([1, 2, -3, 4]), note="a://u:secret@h", keep_for="1h").enqueue()
    bench.app.batch(bench.work.using(delay="1h").many([5]), seal=False).enqueue()
    bench.run()
    listed = bench("list")
    assert "partial-success" in listed
    assert "open" in listed
    assert "secret" not in listed
    assert "--limit shows more" in bench("list", "--limit", "1")
    shown = bench("show", batch.id, "--members")
    assert f"{'█' * 30}{'▒' * 10} 4 of 4" in shown
    assert "failed" in shown
    assert "secret" not in shown
    assert '"state": "partial-success"' in bench("show", batch.id, "--json", "--members")
    assert "no such batch" in bench("show", "nobody", code=1)


def test_only_some_members_are_shown_and_those_that_failed_first(bench: Bench) -> None:
    batch = bench.app.batch(bench.work.many([*range(60), *[-1] * 55])).enqueue()
    bench.run()
    shown = bench("show", batch.id, "--members")
    assert shown.count("failed") == 50
    assert "50 of 115 members" in shown


def test_a_batch_is_sealed_cancelled_replayed_and_deleted(bench: Bench) -> None:
    batch = bench.app.batch(bench.work.using(delay="1h").many([1, 2]), seal=False).enqueue()
    assert "sealed" in bench("seal", batch.id)
    assert "nothing to do" in bench("seal", batch.id)
    assert "2 members cancelled" in bench("cancel", batch.id)
    other = bench.app.batch(bench.work.many([-1])).enqueue()
    bench.run()
    assert "1 member replayed" in bench("replay", other.id)
    bench("delete", other.id, answer="n\n", code=1)
    assert other.status() is not None
    assert "deleted" in bench("delete", other.id, "--yes")
    for verb in ("seal", "cancel", "replay"):
        assert "no such batch" in bench(verb, other.id, code=1)
    assert "no such batch" in bench("delete", other.id, "--yes", code=1)


def test_a_flow_is_drawn_and_cancelled(bench: Bench) -> None:
    @bench.app.task(name="spread")
    async def spread(n: int) -> list[int]:
        return list(range(n))

    later = bench.work.using(delay="1h")
    run = (spread.step(3) | each(later.step())).enqueue()
    bench.run()
    shown = bench("show", run.id, command="flow")
    assert f"{run.id}  in-progress\n├─ spread" in shown
    assert "3: 3 waiting" in shown
    assert "flowchart LR" in bench("show", run.id, "--mermaid", command="flow")
    assert '"state": "in-progress"' in bench("show", run.id, "--json", command="flow")
    assert "cancelled" in bench("cancel", run.id, command="flow")
    assert "nothing to do" in bench("cancel", run.id, command="flow")
    assert "no such flow" in bench("show", "nobody", command="flow", code=1)
    batch = bench.app.batch().enqueue()
    for verb in ("show", "cancel"):
        assert "is no flow" in bench(verb, batch.id, command="flow", code=1)


def status(total: int, **counts: Any) -> BatchStatus:
    fields = {"enqueued": 0, "retrying": 0, "running": 0, "done": 0, "dead": 0, "cancelled": 0, **counts}
    return BatchStatus(
        id="b",
        state=BatchState.OPEN,
        sealed=True,
        total=total,
        created_at=datetime(2030, 1, 1, tzinfo=UTC),
        finished_at=None,
        keep_until=None,
        **fields,
    )


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        (status(0), "██████████ 0 of 0"),
        (status(4), "░░░░░░░░░░ 0 of 4"),
        (status(1000, done=999), "█████████░ 999 of 1,000"),
        (status(10, done=9, dead=1), "█████████▒ 10 of 10"),
        (status(1000, done=500, cancelled=1), "████▒░░░░░ 501 of 1,000"),
        (status(1000, dead=1), "░░░░░░░░░░ 1 of 1,000"),
    ],
)
def test_a_bar_is_full_only_when_nothing_is_left(given: BatchStatus, drawn: str) -> None:
    assert bar(given, 10) == drawn

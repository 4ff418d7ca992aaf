"""Noticing what other processes write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from propolis.engines.sqlite import file_watch as watching
from propolis.engines.sqlite.file_watch import FileWatches

WAIT = 10.0


class Looks:
    """Says that there is something new from the moment at which it is told so."""

    def __init__(self) -> None:
        self.committed = False
        self.count = 0
        self.seen = asyncio.Event()

    def __call__(self) -> bool:
        self.count += 1
        if self.committed:
            self.seen.set()
        return self.committed

    def commit(self) -> None:
        self.committed = True


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.db-wal"
    path.write_bytes(b"written")
    return path


async def test_a_commit_after_a_write_is_seen(log: Path) -> None:
    looks = Looks()
    with FileWatches(str(log)).calling(looks):
        with log.open("ab") as file:
            file.write(b"more")
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_what_was_written_before_the_watch_and_is_committed_after_it_is_seen(log: Path) -> None:
    """No write tells of it: the log was written just before, and syncing it takes a while."""
    looks = Looks()
    with FileWatches(str(log)).calling(looks):
        assert not looks.seen.is_set()
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_a_wait_before_which_nothing_was_written_looks_once(log: Path) -> None:
    """Or else an idle worker would look again and again for nothing, each time it has waited long enough."""
    watches = FileWatches(str(log))
    with watches.calling(looks := Looks()):
        await looks_are_over(looks)
    with watches.calling(looks := Looks()):
        await looks_are_over(looks)
    assert looks.count == 1


async def test_what_was_written_between_two_waits_and_is_committed_in_the_second_is_seen(log: Path) -> None:
    watches = FileWatches(str(log))
    with watches.calling(looks := Looks()):
        await looks_are_over(looks)
    write(log)
    with watches.calling(looks := Looks()):
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_looks_that_one_wait_did_not_come_to_are_for_the_next(log: Path) -> None:
    watches = FileWatches(str(log))
    with watches.calling(Looks()):
        pass
    with watches.calling(looks := Looks()):
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_the_commit_after_one_that_was_for_others_is_seen(log: Path) -> None:
    """The write that was told of may have been the next one's already; another does not come."""
    looks = Looks()

    def others_first() -> bool:
        return looks() or looks.count == 1

    with FileWatches(str(log)).calling(others_first):
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_without_the_systems_help_it_looks_often(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> int:
        raise OSError("no more watches")

    monkeypatch.setattr(watching, "_watch", refuse)
    looks = Looks()
    with FileWatches(str(log)).calling(looks):
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_nothing_is_looked_at_after_the_end(log: Path) -> None:
    looks = Looks()
    with FileWatches(str(log)).calling(looks):
        pass
    looks.commit()
    later: list[Callable[[], bool]] = []
    asyncio.get_running_loop().call_later(watching.FIRST_CHECK * 2, later.append, looks)
    while not later:
        await asyncio.sleep(0)
    assert not looks.seen.is_set()


async def test_a_watch_is_used_again_and_closed_at_the_end(log: Path) -> None:
    before = open_files()
    watches = FileWatches(str(log))
    for _ in range(5):
        with watches.calling(Looks()):
            pass
    assert len(open_files() - before) == 2  # the watch and its timer
    watches.close()
    assert open_files() == before


async def test_a_watch_that_is_in_use_when_all_are_closed_is_closed_after_that(log: Path) -> None:
    before = open_files()
    watches = FileWatches(str(log))
    with watches.calling(Looks()):
        watches.close()
    assert open_files() == before


async def test_a_log_that_was_removed_and_made_anew_is_watched(log: Path) -> None:
    watches = FileWatches(str(log))
    with watches.calling(Looks()):
        pass
    old = made_anew(log)
    looks = Looks()
    with watches.calling(looks):
        with old.open("ab") as file:
            file.write(b"nobody cares")
        await looks_are_over(looks)
        with log.open("ab") as file:
            file.write(b"more")
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_a_log_that_was_removed_and_has_a_new_one_of_its_number_is_watched(log: Path) -> None:
    """As a fork leaves it, before which the last connection is closed; also in the middle of a wait."""
    watches = FileWatches(str(log))
    with watches.calling(Looks()):
        pass
    for in_a_wait in (False, True):
        looks = Looks()
        if not in_a_wait:
            replace(log)
        with watches.calling(looks):
            if in_a_wait:
                replace(log)
            await looks_are_over(looks)
            with log.open("ab") as file:
                file.write(b"more")
            looks.commit()
            await asyncio.wait_for(looks.seen.wait(), WAIT)


@pytest.mark.parametrize(("vain", "most"), [(0, 1000), (1000, 60)], ids=["eager", "in no hurry"])
async def test_whoever_has_checked_in_vain_many_times_checks_now_and_then(
    log: Path, vain: int, most: int
) -> None:
    """Of many idle processes one gets each job, and the others leave the machine to it."""
    looks = Looks()
    looks.commit()
    watches = FileWatches(str(log))
    watches.vain = vain
    with watches.calling(looks), log.open("ab", buffering=0) as file:
        for _ in range(300):
            file.write(b"more")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert looks.count <= most
    assert looks.count >= 100 or vain


async def test_whoever_is_in_no_hurry_sees_a_commit_all_the_same(log: Path) -> None:
    """Whether it was told of the write, or of an earlier one, or the write was before the wait."""
    watches = FileWatches(str(log))
    watches.vain = 1000
    for written in (0, 1, 3):
        looks = Looks()
        with watches.calling(looks), log.open("ab", buffering=0) as file:
            for _ in range(written):
                await looks_are_over(looks)
                file.write(b"more")
            looks.commit()
            await asyncio.wait_for(looks.seen.wait(), WAIT)


async def test_whoever_is_in_no_hurry_checks_again_after_a_write_that_is_not_yet_a_commit(log: Path) -> None:
    watches = FileWatches(str(log))
    looks = Looks()
    with watches.calling(looks):
        await looks_are_over(looks)
        watches.vain = 1000
        before = looks.count
        write(log)
        while looks.count == before:
            await asyncio.sleep(0)
        looks.commit()
        await asyncio.wait_for(looks.seen.wait(), WAIT)


def replace(log: Path) -> None:
    """File systems give the number of a removed file to the next, mostly; if not, this shows less."""
    log.unlink()
    log.write_bytes(b"new")


async def looks_are_over(looks: Looks) -> None:
    """Until the looks have ended that follow a beginning or a write without a commit."""
    seen = -1
    while seen != looks.count:
        seen = looks.count
        await asyncio.sleep(watching.FIRST_CHECK * watching.GROWTH ** (watching.CHECKS + 1))


@pytest.fixture(autouse=True)
def a_tenth_of_a_second_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "CHECKS", 25)


def write(log: Path) -> None:
    log.write_bytes(b"more")


def made_anew(log: Path) -> Path:
    """Gives where the old one is."""
    old = log.rename(log.with_name("old"))
    log.write_bytes(b"new")
    return old


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))

"""A container that has little memory: a cgroup of its own, of the old or the new kind."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from propolis.core.ids import new_id

from .fleet import wait_for

OLD, NEW = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

# Run as `python -c ENTER FOLDER PROGRAM…`: nothing of the program is outside of the container.
ENTER = (
    "import os, sys\n"
    "open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


class Container:
    """Where memory is short in it, the kernel kills the process that has most; or `whole`, all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_old = folder.parent == OLD

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="ascii")

    def limit(self, size: int) -> None:
        self._write("memory.limit_in_bytes" if self._is_old else "memory.max", str(size))
        for swap, value in (("memory.memsw.limit_in_bytes", str(size)), ("memory.swap.max", "0")):
            if (self.folder / swap).exists():
                self._write(swap, value)

    @contextmanager
    def dying_whole(self) -> Iterator[None]:
        """As `memory.oom.group` has it; old cgroups do not know that, so there we do it ourselves."""
        if not self._is_old:
            self._write("memory.oom.group", "1")
            yield
            return
        self._write("memory.oom_control", "1")  # who wants more waits until somebody is killed
        events, over = os.eventfd(0), os.eventfd(0)
        control = os.open(self.folder / "memory.oom_control", os.O_RDONLY)
        killing = threading.Thread(target=self._kill_when_short, args=(events, over))
        try:
            self._write("cgroup.event_control", f"{events} {control}")
            killing.start()
            yield
        finally:
            os.eventfd_write(over, 1)
            if killing.ident is not None:
                killing.join()
            for fd in (events, over, control):
                os.close(fd)

    def _kill_when_short(self, events: int, over: int) -> None:
        while over not in select.select([events, over], [], [])[0]:
            os.eventfd_read(events)
            self.kill()

    def kill(self) -> None:
        """Everything in it, and none of them sees another one die."""
        stopped: set[int] = set()
        while new := set(self.processes()) - stopped:
            for pid in new:
                send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            send(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]

    def is_dead(self) -> bool:
        return not self.processes()


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def made_container() -> Iterator[Container]:
    """Gone afterwards, with whatever is in it.  Where there can be none, the test is skipped loudly."""
    parent, limit = (OLD, "memory.limit_in_bytes") if OLD.is_dir() else (NEW, "memory.max")
    folder = parent / f"propolis-test-{new_id()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"F07 and F63 ARE NOT TESTED HERE: cgroups cannot be written: {error}")
    try:
        if not (folder / limit).exists():
            pytest.skip("F07 and F63 ARE NOT TESTED HERE: the memory controller is not delegated")
        yield Container(folder)
    finally:
        for pid in Container(folder).processes():
            send(pid, signal.SIGKILL)
        wait_for(lambda: removed(folder), 30)


def removed(folder: Path) -> bool:
    """Not while something in it is about to end."""
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()

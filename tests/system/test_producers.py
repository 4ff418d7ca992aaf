"""Programs that put jobs and have no event loop of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skep.errors import OutcomeUnknown
from skep.producer import Background

from .fleet import wait_for

PUT_ONE = """
from skep import App

app = App({url!r})

@app.task
def ping() -> None: ...

ping.enqueue()
"""

AND_FORK = """
import os
if os.fork() == 0:
    ping.enqueue()
    raise SystemExit
os.wait()
ping.enqueue()
"""


@pytest.mark.parametrize("more", ["", AND_FORK, "app.close()"], ids=["at once", "after a fork", "closed"])
def test_a_program_that_puts_a_job_ends_without_a_word(engine_url: str, more: str) -> None:
    """Nobody has to close anything, and a child that ends leaves the connections of its parent alone."""
    program = PUT_ONE.format(url=engine_url) + more
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


HELD = """
import os, threading
from skep import App

app = App({url!r})
held, go_on = threading.Event(), threading.Event()

def hold() -> None:
    with app._lock:
        held.set()
        go_on.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    app.jobs.find()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go_on.set()
holder.join()
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    """That makes the engine, which may take a while, when the fork happens."""
    program = HELD.format(url=f"sqlite:///{tmp_path}/jobs.db")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert (ended.stdout, ended.stderr) == ("7\n", "")


def test_who_waits_while_another_thread_closes_the_app_hears_of_it() -> None:
    background = Background()
    waiting = asyncio.Event()

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def stop() -> None:
        wait_for(waiting.is_set)
        background.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(OutcomeUnknown, match="closed by another thread"):
        background.wait(wait_for_ever())
    stopping.join()

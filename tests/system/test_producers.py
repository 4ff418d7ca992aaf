"""Programs that put jobs and have no event loop of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

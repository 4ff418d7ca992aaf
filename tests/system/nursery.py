"""Worker processes that start at once, because they are forks of one that has imported everything.

    python nursery.py MODULE:APP COUNT

Keeps so many of them alive until its standard input closes.  They do not isolate suspects: all that happens
to their jobs is done to them from outside.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from datetime import timedelta

from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.worker.settings import Lane, Settings
from propolis.worker.supervisor import run_worker

PR_SET_PDEATHSIG = 1
SETTINGS = Settings(
    lanes=[Lane({"default": 1}, 10)],
    lease=timedelta(seconds=1),
    isolate_suspects=False,
)


def fork_worker(app: Registry) -> None:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os._exit(run_worker(app, SETTINGS))


def end_with_the_test() -> None:
    sys.stdin.read()
    os._exit(0)


def main(path: str, count: int) -> None:
    app = load_app(path)
    for _ in range(count):
        fork_worker(app)
    threading.Thread(target=end_with_the_test, daemon=True).start()
    while True:
        os.wait()
        fork_worker(app)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""A worker for the fault tests that comes only when it is woken: it sweeps at its start, and after hints.

So whatever starts on it was announced, however busy the machine is: without a hint it waits for hours.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from propolis.app.loading import load_app
from propolis.worker.settings import Settings
from propolis.worker.supervisor import run_worker
from propolis.worker.sweeping import sweeper

if __name__ == "__main__":
    sweeper.SWEEP_EVERY = 7200.0
    sys.exit(run_worker(load_app("fault_tasks:app"), Settings(poll=timedelta(hours=1))))

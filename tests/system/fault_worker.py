"""A worker for the fault tests that trusts jobs whose worker was killed: none of these has harmed anybody.

Otherwise each would run in a child process of its own, and ten thousand jobs would take minutes.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from propolis.app.loading import load_app
from propolis.worker.settings import Settings
from propolis.worker.supervisor import run_worker

if __name__ == "__main__":
    sys.exit(
        run_worker(load_app("fault_tasks:app"), Settings(lease=timedelta(seconds=2), isolate_suspects=False))
    )

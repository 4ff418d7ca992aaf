"""The sizes of a run, and what happens to tests whose server is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REDIS = "tests/contract/test_redis.py"

pytestmark = pytest.mark.usefixtures("uncovered")


def run_pytest(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With no server at all."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=ROOT,
        env={**os.environ, "PROPOLIS_TEST_URLS": "{}", "PROPOLIS_REQUIRED_SERVERS": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_server_skips_and_that_is_counted_by_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "skipped.json"
    done = run_pytest(REDIS, "-k", "TestRedis and settling_nothing", PROPOLIS_SKIPPED=str(path))

    assert done.returncode == 0, done.stdout
    assert json.loads(path.read_text()) == {"Skipped: there is no redis on PATH: apt install redis-server": 1}


def test_a_missing_server_fails_where_it_is_required() -> None:
    servers = "pgbouncer redis"
    done = run_pytest(REDIS, "-k", "TestRedis and settling_nothing", PROPOLIS_REQUIRED_SERVERS=servers)

    assert done.returncode == 1
    assert "there is no redis on PATH" in done.stdout


def test_by_default_a_set_up_runs_the_promises_in_which_it_differs() -> None:
    names = run_pytest("--collect-only", REDIS).stdout.splitlines()

    assert f"{REDIS}::TestValkey::test_a_sealed_empty_batch_finishes_at_once" in names
    assert f"{REDIS}::TestRedis::test_a_sealed_empty_batch_finishes_at_once" not in names
    assert f"{REDIS}::TestRedis::test_a_put_by_another_handle_ends_the_wait" in names

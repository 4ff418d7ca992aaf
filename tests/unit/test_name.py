"""The name that this project had before is nowhere in it but in the changelog: it belongs to others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLD = "sk" + "ep"
ALLOWED = {"CHANGELOG.md"}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone, so there are no tracked files")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_bears_the_old_name() -> None:
    assert [name for name in tracked_files() if OLD in name.lower()] == []


def test_no_tracked_file_contains_the_old_name() -> None:
    word = OLD.encode()
    files = [name for name in tracked_files() if name not in ALLOWED]
    assert [name for name in files if word in (ROOT / name).read_bytes().lower()] == []

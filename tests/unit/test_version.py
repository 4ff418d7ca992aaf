"""The version has one source."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import propolis

ROOT = Path(__file__).resolve().parents[2]


def test_the_build_reads_the_version_from_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" not in pyproject["project"]
    assert pyproject["project"]["dynamic"] == ["version"]
    source = (ROOT / pyproject["tool"]["hatch"]["version"]["path"]).read_text("utf-8")
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [propolis.__version__]


def test_ci_runs_on_every_python_that_the_package_names() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    named = re.findall(r"Python :: (3\.\d+)", " ".join(pyproject["project"]["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    [matrix] = re.findall(r"python: \[(.+)\]", workflow)
    assert re.findall(r'"(.+?)"', matrix) == named

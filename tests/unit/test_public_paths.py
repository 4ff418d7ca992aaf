"""What users import is decided: README, pages and examples keep to it, and every name is there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import propolis

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.py"), *ROOT.glob("CONTRIBUTING.md")]
)
NAMES = [
    *("App", "BatchReport", "Depends", "Discard", "Handle", "Job", "PropolisError", "Retry", "Snooze"),
    *("Task", "Transaction", "cron", "current_job", "every"),
]
MODULES = [
    "propolis",
    "propolis.contract",
    "propolis.engines",
    "propolis.errors",
    "propolis.flows",
    "propolis.integrations.otel",
    "propolis.integrations.sentry",
    "propolis.logs",
    "propolis.strategies",
    "propolis.testing",
    "propolis.testing.engines",
    "propolis.values",
]
IMPORT = re.compile(r"^(?:from|import) propolis\b[^\n(]*(?:\([^)]*\))?", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(source: Path) -> str:
    return str(source.relative_to(ROOT))


def programs(source: Path) -> list[str]:
    text = source.read_text("utf-8")
    return BLOCK.findall(text) if source.suffix == ".md" else [text]


def imports(program: str) -> Iterator[tuple[str, str | None]]:
    """The modules of propolis that a program imports, each with the name that it takes from there."""
    tree = ast.parse("\n".join(IMPORT.findall(program)))  # the rest need not be whole
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.startswith("propolis"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "propolis":
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_programs_of_the_docs_import_public_names_only(source: Path) -> None:
    for module, name in (found for program in programs(source) for found in imports(program)):
        assert module in MODULES
        if name is not None and module != "propolis.errors":
            assert name in importlib.import_module(module).__all__


def test_the_root_has_the_names_that_were_decided() -> None:
    assert sorted(propolis.__all__) == sorted(NAMES)


@pytest.mark.parametrize("module", [name for name in MODULES if name != "propolis.errors"])
def test_a_public_module_has_every_name_that_it_offers(module: str) -> None:
    found = importlib.import_module(module)
    assert all(hasattr(found, name) for name in found.__all__)

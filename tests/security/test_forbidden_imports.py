"""Nothing in the package turns bytes or text into code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "propolis"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Each can run what it reads.
MODULES = {
    "_pickle",
    "cloudpickle",
    "code",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "shelve",
    "yaml",
}
BUILTINS = {"__import__", "compile", "eval", "exec"}
CALLS = {"os.popen", "os.system", "subprocess.getoutput", "subprocess.getstatusoutput"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {each.name}" for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in MODULES:
                    yield f"from {module} import"
                yield from (f"from {module} import {n.name}" for n in names if f"{module}.{n.name}" in CALLS)
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield f"{name}()"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if f"{name}.{attribute}" in CALLS:
                yield f"{name}.{attribute}"
            case ast.keyword(arg="shell", value=value) if not is_false(value):
                yield "shell="
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                if name.split(".")[0] in MODULES:
                    yield f"import_module({name!r})"


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    assert list(offences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "import os, marshal",
        "from pickle import loads",
        "from yaml.loader import Loader",
        "def f():\n    import shelve",
        "if TYPE_CHECKING:\n    import dill",
        "eval('1')",
        "x = [exec(line) for line in lines]",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "import os\nos.system('true')",
        "run = os.system",
        "from os import system",
        "subprocess.run(line, shell=True)",
        "subprocess.run(line, shell=wanted)",
        "importlib.import_module('pickle')",
    ],
)
def test_each_of_these_would_be_found(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    ["import json", "re.compile('x')", "subprocess.run([], shell=False)", "self.eval()", "# import pickle"],
)
def test_these_are_harmless(source: str) -> None:
    assert not list(offences(source))

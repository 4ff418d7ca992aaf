"""The map of the code is right, and the rooms stay small enough to be read."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from propolis import App
from propolis.worker import Lane, Mode, Settings, Worker

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "propolis"
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

MAX_ENTRIES, MAX_ROOT_ENTRIES = 14, 20
MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_EXAMPLE_LINES = 600, 40, 200
MAX_FILE_LINES = 800  # of any kind, and of tests
UNBOUNDED = {"engines/redis/lua/verbs", "testing/engines/promises"}  # one file per verb, one per promise


def shown(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# --- from a slot to an outcome -----------------------------------------------------------


def section(title: str) -> str:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")
    assert rest, f"the page has no part named {title!r}"
    return rest.partition("\n## ")[0]


def path_of_a_job() -> list[Path]:
    """The files that the page names, in its order."""
    return [
        PACKAGE / name
        for name in re.findall(r"^\d\. `([\w/]+\.py)`", section("From a slot to an outcome"), re.MULTILINE)
    ]


def name_of(path: Path) -> str:
    return ".".join(("propolis", *path.relative_to(PACKAGE).with_suffix("").parts))


def imports_of(path: Path) -> set[Path]:
    modules = {
        node.module
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ImportFrom) and node.module is not None
    }
    return {path for path in FILES if name_of(path) in modules}


def test_the_page_names_at_most_four_files_from_slot_to_outcome() -> None:
    assert 2 <= len(path_of_a_job()) <= 4
    assert all(path in FILES for path in path_of_a_job())


def test_those_files_import_one_another_in_that_order_and_never_back() -> None:
    path = path_of_a_job()
    for index, file in enumerate(path):
        imported = imports_of(file)
        assert set(path[index + 1 : index + 2]) <= imported, f"{shown(file)} does not import the next"
        assert not imported & set(path[: index + 1]), f"{shown(file)} imports one that comes before it"


def test_only_those_files_decide_what_the_outcome_is() -> None:
    """Whatever else of the worker has to do with an outcome is given one."""
    outside = {
        f"{shown(file)}: {function.name}"
        for file in FILES
        if shown(file).startswith("worker/") and file not in path_of_a_job()
        for function in functions_of(file)
        if function.returns is not None and "Outcome" in names_in(function.returns)
    }
    # The pump hands a list of outcomes on, as it got them.
    assert {name for name in outside if not name.startswith("worker/pump.py: _take_done")} == set()


def names_in(annotation: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}


class Followed:
    """The files of the worker whose code runs from where a slot begins a job to where it is settled."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._on = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "begin" and code.co_filename.endswith("worker/attempt.py"):
            self._on = True
            self._note(frame.f_back)
        if code.co_name == "settle" and code.co_filename.endswith("worker/pump.py"):
            self._on = False
        if self._on:
            self._note(frame)

    def _note(self, frame: FrameType | None) -> None:
        name = "" if frame is None else frame.f_code.co_filename.replace("\\", "/")
        if "/propolis/worker/" in name:
            self.files.append("worker/" + name.rpartition("/propolis/worker/")[2])


async def files_run(app: App) -> list[str]:
    followed, before = Followed(), sys.getprofile()
    sys.setprofile(followed)
    try:
        await Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=[Lane({"default": 1}, 1)])).run()
    finally:
        sys.setprofile(before)
        await app.aclose()
    # Two questions, whether its lease is still ours and what time it is; and its own context.
    questions = {"worker/keeper.py", "worker/settings.py"}
    around = {"worker/calls/own_context.py", "worker/process/signals.py"}
    return [file for file in followed.files if file not in questions | around]


async def test_a_job_runs_through_those_files_and_through_no_other() -> None:
    app = App("memory://")

    @app.task
    async def succeed() -> None: ...

    await succeed.aenqueue()
    files = await files_run(app)
    assert set(files) == {shown(path) for path in path_of_a_job()}
    assert files[0] == shown(path_of_a_job()[0])


async def test_so_does_one_that_fails_and_the_log_has_it_when_its_outcome_is_known() -> None:
    app = App("memory://")

    @app.task(retries=0)
    async def fail() -> None:
        raise ValueError

    await fail.aenqueue()
    files = await files_run(app)
    logs = {"worker/process/run_log.py", "worker/process/storms.py"}
    first = min(files.index(each) for each in logs)
    assert set(files[:first]) == {shown(path) for path in path_of_a_job()}
    assert set(files[first:]) <= {shown(path) for path in path_of_a_job()} | logs
    assert shown(path_of_a_job()[0]) == files[0]


# --- the tree on the page ------------------------------------------------------


def test_every_room_is_on_the_page_and_everything_on_it_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rooms = {f"`{path.name}/`" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert {room for room in rooms if room not in page} == set()
    named = re.findall(r"`((?:src/propolis|tests|docs|examples|benchmarks)/[\w/.]*)`", page)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
    inside = re.findall(r"`((?:app|bench|cli|core|demo|engines|testing|worker)/[\w/]*(?:\.py)?)`", page)
    assert [name for name in inside if not (PACKAGE / name).exists()] == []


def test_the_page_wraps_at_110() -> None:
    assert [line for line in PAGE.read_text(encoding="utf-8").splitlines() if len(line) > 110] == []


# --- bars --------------------------------------------------------------------------------


def folders() -> Iterator[Path]:
    yield from (
        path for path in [PACKAGE, *PACKAGE.rglob("*")] if path.is_dir() and path.name != "__pycache__"
    )


def test_no_folder_has_too_many_entries() -> None:
    """Modules and folders, as a reader sees them: `__init__.py` says what the folder is."""
    crowded = {
        shown(folder)
        for folder in folders()
        if shown(folder) not in UNBOUNDED
        and sum(not entry.name.startswith("__") for entry in folder.iterdir())
        > (MAX_ROOT_ENTRIES if folder == PACKAGE else MAX_ENTRIES)
    }
    assert crowded == set()


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> Iterator[Function]:
    yield from (node for node in ast.walk(TREES[path]) if isinstance(node, Function))


def docstring_lines(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            text = node.body[0]
            found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def code_lines(path: Path) -> set[int]:
    """The lines with code: neither blank, nor a comment, nor a docstring."""
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in empty and token.type != tokenize.ENDMARKER:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - docstring_lines(ast.parse(path.read_text(encoding="utf-8")))


CODE = {path: code_lines(path) for path in FILES}


def test_no_module_is_too_long() -> None:
    long = {shown(path) for path in FILES if len(CODE[path]) > MAX_MODULE_LINES}
    assert long == set()


def test_no_file_is_too_long_also_of_the_tests() -> None:
    files = [*FILES, *(ROOT / "tests").rglob("*.py")]
    long = {path.name for path in files if len(path.read_text("utf-8").splitlines()) > MAX_FILE_LINES}
    assert long == set()


@pytest.mark.parametrize("name", ["json_engine", "lmdb_engine"])
def test_an_engine_over_the_book_is_short(name: str) -> None:
    assert len(code_lines(ROOT / "examples" / f"{name}.py")) <= MAX_EXAMPLE_LINES


def test_no_function_is_too_long() -> None:
    long = {
        f"{shown(path)}:{function.name}"
        for path in FILES
        for function in functions_of(path)
        if len(CODE[path] & set(range(function.lineno, (function.end_lineno or 0) + 1))) > MAX_FUNCTION_LINES
    }
    assert long == set()


def test_no_public_class_name_occurs_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(shown(path))
    twice = {name for name, found in places.items() if len(found) > 1 and not name.startswith("_")}
    assert twice == set()


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('def f():\n    """Much\n    text."""\n\n    # a comment\n    return 1  # another\n', 2),
        ("def f():\n    return '''one\ntwo'''\n", 3),
        ('"""Of the module."""\n\nX = 1\n', 1),
    ],
)
def test_lines_are_counted_as_a_reader_counts_them(
    source: str, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    monkeypatch.setitem(TREES, path, ast.parse(source))
    assert len(code_lines(path)) == lines


# --- words -------------------------------------------------------------------------------


VAGUE = {"told", "tell", "said", "say", "facts", "look"}


def names_of_values(tree: ast.AST) -> Iterator[str]:
    """What is assigned, and what functions take."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
            ):
                yield name


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_a_value_is_named_after_what_it_is(path: Path) -> None:
    """docs/style.md: `told` could be anything; a bound is a maximum (`MAX_…`)."""
    names = set(names_of_values(TREES[path]))
    assert not {name for name in names if name.strip("_").lower() in VAGUE or name.startswith("MOST_")}

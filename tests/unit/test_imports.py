"""What importing propolis costs, and in which direction its modules know one another."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from propolis.engines.table import ENGINES

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "propolis"

# From the bottom: a room imports only from itself and from the rooms before it.
ROOMS = [
    ["propolis.errors"],
    ["propolis.core"],
    ["propolis.engines"],
    ["propolis.app"],
    ["propolis.worker"],
    ["propolis.bench", "propolis.cli", "propolis.demo", "propolis.testing"],
]
# The same inside of core, where nothing imports what stands beside it.
CORE = [
    ["clock", "duration", "ids"],
    ["strategy"],
    ["envelope"],
    ["batch"],
    ["job"],
    ["policy", "schedule", "transitions", "wire"],
    ["records"],
    ["protocols"],
    ["limits"],
]
INPUT_AND_OUTPUT = [
    "asyncio",
    "concurrent.futures",
    "io",
    "multiprocessing",
    "pathlib",
    "socket",
    "threading",
]
FOLDERS = {target.split(".")[2] for target in ENGINES.values()}  # of the engines

# Slow to import, or of no use to somebody who only wants to enqueue.
HEAVY = [
    "asyncpg",
    "click",
    "grpc",
    "hiredis",
    "hypothesis",
    "nats",
    "pytest",
    "redis",
    "rich",
    "sqlite3",
    "starlette",
    "uvloop",
]

LOOK = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(event) if event.startswith("socket.") else None)
for name in sys.argv[1:]:
    __import__(name)
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


def imported_by(*names: str) -> tuple[list[str], list[str]]:
    """The modules that a fresh interpreter has after importing these, and what it did with sockets."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOK, *names], capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    return seen["modules"], seen["opened"]


def heavy_among(modules: Iterable[str], heavy: Iterable[str]) -> list[str]:
    return [module for module in modules if module.split(".")[0] in heavy]


@pytest.mark.usefixtures("uncovered")
def test_importing_propolis_opens_no_socket_and_imports_no_engine_and_nothing_heavy() -> None:
    modules, opened = imported_by("propolis")
    assert opened == []
    assert heavy_among(modules, HEAVY) == []
    assert not [
        name
        for name in modules
        if name.startswith(("propolis.testing", *(f"propolis.engines.{engine}" for engine in FOLDERS)))
    ]


@pytest.mark.usefixtures("uncovered")
def test_one_engine_does_not_import_another() -> None:
    modules, _ = imported_by("propolis.engines.memory")
    assert heavy_among(modules, HEAVY) == []
    assert not [name for name in modules if name.startswith(("propolis.engines.sqlite", "propolis.testing"))]


def test_a_socket_would_have_been_seen() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        imported_by("no_such_module")
    look = LOOK.replace("__import__(name)", "__import__('socket').socket().close()")
    done = subprocess.run([sys.executable, "-c", look, "x"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["opened"]


# --- who imports whom --------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = ["propolis", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return graph_of(SOURCES)


def imports_of(source: str, modules: Iterable[str]) -> set[str]:
    """The modules among these that the source imports anywhere: in functions and for types as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for each in names:
                    inner = f"{module}.{each.name}"
                    found.add(inner if inner in modules else module)
            case ast.ImportFrom():
                raise AssertionError("relative imports are not understood here: write the whole name")
    return found & set(modules)


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    return {name: imports_of(source, sources) for name, source in sources.items()}


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules on one cycle, or none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if cycle := visit(other, [*path, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def room_of(module: str) -> int | None:
    """Its height; None for what only gathers names of other rooms, such as `propolis` itself."""
    for height, rooms in enumerate(ROOMS):
        if any(module == room or module.startswith(f"{room}.") for room in rooms):
            return height
    return None


def family_of(module: str) -> str | None:
    """The engine that a module of engines/ belongs to; None if it is shared by all."""
    name = module.removeprefix("propolis.engines.").partition(".")[0]
    return name if name in FOLDERS else None


def test_there_is_no_import_cycle_of_any_kind(graph: dict[str, set[str]]) -> None:
    assert find_cycle(graph) == []


def test_imports_point_one_way(graph: dict[str, set[str]]) -> None:
    """The app alone reaches up, for its test kit, and only when somebody asks for one."""
    for module, imports in graph.items():
        height = room_of(module)
        for other in imports:
            reached = room_of(other)
            if (
                height is None
                or (height == len(ROOMS) - 1 and reached is None)
                or (module, other) == ("propolis.app.application", "propolis.testing.kit.kit")
            ):
                continue
            assert reached is not None, f"{module} imports {other}, which only gathers names"
            assert reached <= height, f"{module} imports {other}, which stands above it"


def test_values_stand_on_simpler_ones(graph: dict[str, set[str]]) -> None:
    heights = {f"propolis.core.{name}": height for height, names in enumerate(CORE) for name in names}
    assert heights.keys() == {module for module in graph if module.startswith("propolis.core.")}
    for module, height in heights.items():
        for other in graph[module] & heights.keys():
            assert heights[other] < height, f"{module} imports {other}, which does not stand below it"


def test_every_room_has_its_modules() -> None:
    assert not [room for rooms in ROOMS for room in rooms if room not in SOURCES]


@pytest.mark.parametrize("module", [name for name in SOURCES if name.startswith("propolis.core.")])
def test_values_and_decisions_do_no_input_or_output(module: str) -> None:
    assert imports_of(SOURCES[module], [*HEAVY, *INPUT_AND_OUTPUT]) == set()


def test_engines_never_import_one_another(graph: dict[str, set[str]]) -> None:
    for module, imports in graph.items():
        if module.startswith("propolis.engines."):
            for other in imports:
                if other.startswith("propolis.engines."):
                    assert family_of(other) in (None, family_of(module)), f"{module} imports {other}"


def test_only_the_test_kit_and_the_app_import_the_test_kit(graph: dict[str, set[str]]) -> None:
    """The app does so when `app.test()` is called; that `import propolis` does not is tested above."""
    for module, imports in graph.items():
        if not module.startswith("propolis.testing") and module != "propolis.app.application":
            assert not [other for other in imports if other.startswith("propolis.testing")], module


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "import b", "b": "import a"},
        {"a": "import b", "b": "def f():\n    import a"},
        {"a": "from b import x", "b": "from c import x", "c": "if TYPE_CHECKING:\n    from a import X"},
        {"p": "from p.a import x", "p.a": "from p import x"},
        {"p": "", "p.a": "from p import b", "p.b": "from p import a"},
        {"a": "class C:\n    def f(self):\n        from a import C"},
    ],
)
def test_each_of_these_cycles_would_be_found(sources: dict[str, str]) -> None:
    assert find_cycle(graph_of(sources))


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "", "b": "import a", "c": "import a, b"},
        {"p": "from p.a import x", "p.a": "from p.b import x", "p.b": "import json"},
    ],
)
def test_these_are_no_cycles(sources: dict[str, str]) -> None:
    assert not find_cycle(graph_of(sources))

"""The pytest plugin, in runs of pytest of its own, and the page that tells how to use it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = "propolis.testing.kit.plugin"

SHOP = """
from propolis import App

app = App("sqlite:////nowhere/to/be/found.db")
ran = []

@app.task
async def task(n: int) -> None:
    ran.append(n)
"""
PLAIN = """
import shop

def test_plain(propolis_kit):
    shop.task.enqueue(1)
    propolis_kit.assert_enqueued(shop.task, 1)
    assert propolis_kit.drain() == 1
    assert shop.ran == [1]
"""
ASYNC = """
import pytest
import shop

@pytest.mark.asyncio
async def test_async(propolis_async_kit):
    await shop.task.using(delay="1h").aenqueue(2)
    assert await propolis_async_kit.advance("1h") == 1
    assert shop.ran == [2]
"""


@pytest.fixture
def shop(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with an app."""
    pytester.makepyfile(shop=SHOP)
    pytester.syspathinsert()
    return pytester


def run(project: pytest.Pytester, *, mode: str = "strict") -> pytest.RunResult:
    ours = ["-p", "no:propolis", "-p", PLUGIN]
    theirs = [
        "-p",
        "no:randomly",
        f"--asyncio-mode={mode}",
        "-o",
        "asyncio_default_fixture_loop_scope=function",
    ]
    return project.runpytest_inprocess(*ours, *theirs, "-W", "error")


def test_a_plain_test_gets_a_kit_of_the_app_that_the_settings_name(shop: pytest.Pytester) -> None:
    shop.makeini("[pytest]\npropolis_app = shop:app")
    shop.makepyfile(PLAIN)
    run(shop).assert_outcomes(passed=1)


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_an_asynchronous_test_gets_one_in_its_own_loop(shop: pytest.Pytester, mode: str) -> None:
    shop.makeini("[pytest]\npropolis_app = shop:app")
    shop.makepyfile(ASYNC)
    run(shop, mode=mode).assert_outcomes(passed=1)


def test_a_fixture_of_the_project_may_say_which_app(shop: pytest.Pytester) -> None:
    shop.makeconftest(
        "import pytest\n@pytest.fixture\ndef propolis_app():\n    import shop\n    return shop.app\n"
    )
    shop.makepyfile(PLAIN)
    run(shop).assert_outcomes(passed=1)


def test_each_test_begins_with_nothing(shop: pytest.Pytester) -> None:
    shop.makeini("[pytest]\npropolis_app = shop:app")
    again = "def test_{0}(propolis_kit):\n    assert propolis_kit.jobs() == []\n    shop.task.enqueue(1)\n"
    shop.makepyfile("import shop\n" + again.format("one") + again.format("two"))
    run(shop).assert_outcomes(passed=2)


def test_without_an_app_the_fixture_says_what_to_do(shop: pytest.Pytester) -> None:
    shop.makepyfile(PLAIN)
    result = run(shop)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(['*which app? Write propolis_app = "module:app"*'])


def test_something_that_is_no_app_is_refused(shop: pytest.Pytester) -> None:
    shop.makeini("[pytest]\npropolis_app = shop:registry")
    with (shop.path / "shop.py").open("a") as file:
        file.write('\nfrom propolis.app.registry import Registry\nregistry = Registry("memory://")\n')
    shop.makepyfile(PLAIN)
    result = run(shop)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*propolis_app: shop:registry is a Registry*"])


def test_a_failed_assertion_is_shown_at_the_line_of_the_test(shop: pytest.Pytester) -> None:
    shop.makeini("[pytest]\npropolis_app = shop:app")
    shop.makepyfile(
        "import shop\ndef test_it(propolis_kit):\n    propolis_kit.assert_enqueued(shop.task, 3)\n"
    )
    result = run(shop)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*propolis_kit.assert_enqueued(shop.task, 3)",
            "E*shop.task(3) was not enqueued; nothing was enqueued",
        ]
    )
    result.stdout.no_fnmatch_line("*kit.py*")


def test_the_plugin_alone_loads_neither_an_engine_nor_a_worker(shop: pytest.Pytester) -> None:
    shop.makepyfile(
        "import sys\n"
        "def test_it():\n"
        "    assert not [name for name in sys.modules "
        "if name.startswith(('propolis.engines.sqlite', 'propolis.engines.memory', 'propolis.worker'))]\n"
    )
    result = shop.runpytest_subprocess("-p", "no:propolis", "-p", PLUGIN)
    result.assert_outcomes(passed=1)


def test_the_plugin_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"propolis": PLUGIN}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("testing.md", ["pyproject.toml", "shop.py", "test_shop.py", "test_shop_with_pytest.py"]),
        ("batches.md", ["gallery.py", "test_gallery.py"]),
        ("flows.md", ["pages.py", "test_pages.py"]),
        ("schedules.md", ["accounts.py", "feeds.py", "shop.py", "test_shop.py"]),
    ],
)
def test_a_page_with_examples_works_as_written(
    pytester: pytest.Pytester, name: str, expected: list[str]
) -> None:
    files: dict[str, str] = {}
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for kind, block in re.findall(r"^```(python|toml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        name = "pyproject.toml" if kind == "toml" else block.split("\n", 1)[0].removeprefix("# ")
        files[name] = files.get(name, "") + block
    for name, text in files.items():
        (pytester.path / name).write_text(text, encoding="utf-8")
    pytester.syspathinsert()
    assert sorted(files) == expected
    tests = sum(text.count("def test_") for text in files.values())
    run(pytester, mode="auto").assert_outcomes(passed=tests)
    assert not list(pytester.path.glob("*.db"))

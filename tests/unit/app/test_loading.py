"""From "module:app" to the app, or to a sentence that says what to mend."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from propolis.app.loading import load_app
from propolis.errors import AppNotFound, BadSetting

APP = "from propolis import App\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def a_module(here: Path, text: str) -> str:
    name = f"tasks_{uuid4().hex}"
    (here / f"{name}.py").write_text(text, encoding="utf-8")
    return name


def test_an_app_is_found_by_module_and_name_in_the_working_directory(here: Path) -> None:
    name = a_module(here, f"{APP}app = App('memory://')\nclass Box:\n    inner = app\n")
    assert load_app(f"{name}:app").url == "memory://"
    assert load_app(f"{name}:app") is load_app(f"{name}:Box.inner")


def test_the_working_directory_is_looked_at_last(here: Path) -> None:
    """S20."""
    load_app(a_module(here, f"{APP}app = App('memory://')"))
    assert sys.path[-1] == os.getcwd()


def test_a_module_alone_means_the_only_app_in_it(here: Path) -> None:
    name = a_module(here, f"{APP}app = App('memory://')\nalias = app\n")
    assert load_app(name) is load_app(f"{name}:app")


@pytest.mark.parametrize(
    ("text", "attribute", "advice"),
    [
        ("", "", "holds no App"),
        (f"{APP}a, b = App('memory://'), App('memory://')", "", ":a or "),
        (f"{APP}app = App('memory://')", ":ap", "has no 'ap': write "),
        (f"{APP}app = App", ":app", "it is a type, not an App"),
        ("x = 3", ":x", "it is a int, not an App"),
        ("import no_such_module_at_all", ":app", "No module named 'no_such_module_at_all'"),
        ("\n\nundefined", ":app", "NameError: name 'undefined' is not defined"),
        ("def broken(:", ":app", "SyntaxError"),
    ],
)
def test_what_is_no_app_is_an_error_that_says_so(here: Path, text: str, attribute: str, advice: str) -> None:
    name = a_module(here, text)
    with pytest.raises(AppNotFound, match=advice) as caught:
        load_app(f"{name}{attribute}")
    assert caught.value.path == f"{name}{attribute}"


def test_an_error_in_the_module_is_told_with_its_line(here: Path) -> None:
    name = a_module(here, "\n\n1 / 0\n")
    with pytest.raises(AppNotFound, match=rf"ZeroDivisionError.*{name}\.py, line 3"):
        load_app(name)


def test_a_setting_that_is_wrong_in_the_module_speaks_for_itself(here: Path) -> None:
    name = a_module(here, f"{APP}app = App('memory://')\n@app.task(timeout='soon')\ndef f() -> None: ...\n")
    with pytest.raises(BadSetting, match="'soon' is not a duration"):
        load_app(name)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("no_such_module:app", "there is no module 'no_such_module': run from the folder"),
        ("no_such.module:app", "there is no module 'no_such'"),
        ("json.nothing:app", "there is no module 'json.nothing'"),
        ("tasks.py", 'write "tasks", without'),
        ("", "write it as"),
        (":app", "write it as"),
        ("../tasks:app", "write it as"),
        (".tasks:app", "write it as"),
    ],
)
def test_a_path_that_leads_nowhere_says_how_to_write_it(here: Path, path: str, advice: str) -> None:
    with pytest.raises(AppNotFound, match=advice):
        load_app(path)

"""The reader of SQL files: lists of columns are said once, and stand wherever they are named."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from propolis.engines.shared.statements import load_functions, load_statements

NAME = re.compile(r"\b[A-Z]+_COLUMNS\b")


def texts_of(engine: str) -> str:
    functions = load_functions(engine) if engine == "postgres" else ""
    return functions + "".join(load_statements(engine).values())


@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_no_name_of_a_list_of_columns_reaches_a_server(engine: str) -> None:
    assert NAME.findall(texts_of(engine)) == []


@pytest.mark.parametrize("engine", ["postgres", "sqlite"])
def test_every_list_of_columns_is_used_more_than_once(engine: str) -> None:
    sql = files("propolis.engines") / engine / "sql"
    program = [*(sql / "functions").iterdir()] if engine == "postgres" else []
    program += [sql / "statements.sql", sql / "columns.sql"]
    lines = [line for file in program for line in file.read_text().splitlines()]
    used = [name for line in lines if not line.startswith("-- name:") for name in NAME.findall(line)]
    listed = re.findall(r"^-- name: (\w+)$", (sql / "columns.sql").read_text(), re.MULTILINE)
    assert {name for name in listed if used.count(name) < 2} == set()


def test_a_list_behind_a_prefix_is_of_its_columns() -> None:
    running = load_statements("sqlite")["running_job"]
    assert running.startswith("SELECT j.seq, j.id, j.task, ")
    assert ", j.history, r.fence AS lease_fence, " in running

"""SQL as programs in files: each statement is named by a line `-- name: …` above it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from importlib.resources import files

from propolis.engines.shared.migrations import Migration

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"--.*")


def load_statements(engine: str) -> dict[str, str]:
    """The statements of engines/<engine>/sql/statements.sql by their names."""
    columns = _columns(engine)
    named = _parts(engine, "statements.sql").items()
    return {name: _spelled_out(body.strip().rstrip(";"), columns) for name, body in named}


def load_migrations(engine: str) -> list[Migration]:
    """The migrations in engines/<engine>/sql/tables/, in their order."""
    folder = files("propolis.engines") / engine / "sql" / "tables"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [Migration(int(file[:4]), file, (folder / file).read_text(encoding="utf-8")) for file in found]


def load_functions(engine: str) -> str:
    """The program in engines/<engine>/sql/functions/: its types, then all else, by file names."""
    folder = files("propolis.engines") / engine / "sql" / "functions"
    found = sorted((entry.name != "types.sql", entry.name) for entry in folder.iterdir())
    program = "\n".join((folder / name).read_text(encoding="utf-8") for _, name in found)
    return _spelled_out(program, _columns(engine))


def _columns(engine: str) -> dict[str, str]:
    """The lists in engines/<engine>/sql/columns.sql by their names; each may have those before it."""
    columns: dict[str, str] = {}
    for name, body in _parts(engine, "columns.sql").items():
        columns[name] = " ".join(_spelled_out(_COMMENT.sub("", body), columns).split())
    return columns


def _parts(engine: str, file: str) -> dict[str, str]:
    text = (files("propolis.engines") / engine / "sql" / file).read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _spelled_out(sql: str, columns: Mapping[str, str]) -> str:
    """With each list of columns in the place of its name: `j.NAME` is each of them behind `j.`."""
    for name, listed in columns.items():
        sql = re.sub(rf"\b(\w+\.)?{name}\b", partial(_listed, listed), sql)
    return sql


def _listed(columns: str, found: re.Match[str]) -> str:
    return re.sub(r"\b(?=\w)", found[1] or "", columns)

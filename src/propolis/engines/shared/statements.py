"""SQL as programs in files: each statement is named by a line `-- name: …` above it."""

from __future__ import annotations

import re
from importlib.resources import files

from propolis.engines.shared.migrations import Migration

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load_statements(engine: str) -> dict[str, str]:
    """The statements of engines/<engine>/sql/statements.sql by their names."""
    text = (files("propolis.engines") / engine / "sql" / "statements.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    return {key: body.strip().rstrip(";") for key, body in zip(parts[::2], parts[1::2], strict=True)}


def load_migrations(engine: str) -> list[Migration]:
    """The migrations in engines/<engine>/sql/tables/, in their order."""
    folder = files("propolis.engines") / engine / "sql" / "tables"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [Migration(int(file[:4]), file, (folder / file).read_text(encoding="utf-8")) for file in found]


def load_functions(engine: str) -> str:
    """The program in engines/<engine>/sql/functions/: its types, then all else, by file names."""
    folder = files("propolis.engines") / engine / "sql" / "functions"
    found = sorted((entry.name != "types.sql", entry.name) for entry in folder.iterdir())
    return "\n".join((folder / name).read_text(encoding="utf-8") for _, name in found)

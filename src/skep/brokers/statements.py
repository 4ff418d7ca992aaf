"""SQL as programs in files: each statement is named by a line `-- name: …` above it."""

from __future__ import annotations

import re
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load_statements(name: str) -> dict[str, str]:
    """The statements of sql/<name>.sql by their names."""
    text = (files("skep.brokers") / "sql" / f"{name}.sql").read_text(encoding="utf-8")
    _, *parts = _NAME.split(text)
    return {key: body.strip().rstrip(";") for key, body in zip(parts[::2], parts[1::2], strict=True)}


def load_migrations(name: str) -> list[tuple[int, str, str]]:
    """The migrations in sql/<name>/ as (number, file name, script), in their order."""
    folder = files("skep.brokers") / "sql" / name
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(file[:4]), file, (folder / file).read_text(encoding="utf-8")) for file in found]

"""Code with other SQL than ours: a copy of the folder, changed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import propolis.engines.postgres
from propolis.engines.postgres import schema
from propolis.engines.shared import statements
from propolis.engines.shared.statements import load_migrations

OURS = Path(propolis.engines.postgres.__file__).parent / "sql"
NEXT = load_migrations("postgres")[-1].number + 1
CHANGED = f"{NEXT:04}_changed.sql"
ADDITIVE = """\
CREATE TABLE painted (id text PRIMARY KEY);
ALTER TYPE stored_job ADD ATTRIBUTE colour text CASCADE;
ALTER TABLE chunk ADD COLUMN colour text;
ALTER TABLE batch ADD COLUMN colour text;
ALTER TABLE rule ADD COLUMN colour text;
ALTER TABLE tally ADD COLUMN colour text;
ALTER TABLE known ADD COLUMN colour text;
ALTER TABLE records ADD COLUMN colour text;
"""


class Code:
    """The SQL of some version of the code.  An engine that is made in `used` is that version's."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sql = root / "postgres" / "sql"
        shutil.copytree(OURS, self._sql)

    def change(self, old: str, new: str) -> None:
        """Somewhere in the functions."""
        for file in (self._sql / "functions").iterdir():
            text = file.read_text(encoding="utf-8")
            if old in text:
                file.write_text(text.replace(old, new, 1), encoding="utf-8")
                return
        raise AssertionError(f"no function has {old!r}")

    def migrate(self, script: str) -> None:
        (self._sql / "tables" / CHANGED).write_text(script, encoding="utf-8")

    @contextmanager
    def used(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statements, "files", lambda _: self._root)
            schema._fingerprint.cache_clear()
            try:
                yield
            finally:
                schema._fingerprint.cache_clear()


def painting(root: Path) -> Code:
    """Newer code: a function that uses a table of an additive migration."""
    code = Code(root)
    code.migrate(ADDITIVE)
    code.change(
        "    INSERT INTO tally (queue, put, deleted) VALUES (of_queue, 1, 0);\n",
        "    INSERT INTO tally (queue, put, deleted) VALUES (of_queue, 1, 0);\n"
        "    INSERT INTO painted (id) VALUES (new_id);\n",
    )
    return code

"""Tables as numbered, frozen migrations: which are there, which are to be run, what is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from propolis.errors import SchemaDrifted, SchemaTooNew

_COMPATIBLE_FROM = re.compile(r"^-- compatible_from: (\d+)$", re.MULTILINE)
_MADE = re.compile(r"^(CREATE|DROP) (?:TABLE|SEQUENCE) (\w+)", re.MULTILINE)


class Migration(NamedTuple):
    """A file in sql/tables/.  Once it is released it stays as it is, to the last byte."""

    number: int
    file: str
    script: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.script.encode()).hexdigest()

    @property
    def compatible_from(self) -> int:
        """The migration that code has to know to use the tables after this one.

        One that only adds keeps 1, and code from before it goes on.  Any other says so in a line of its own:
        `-- compatible_from: 7`.
        """
        found = _COMPATIBLE_FROM.search(self.script)
        return int(found[1]) if found else 1


class Installed(NamedTuple):
    """What storage records of a migration that was run."""

    number: int
    checksum: str
    compatible_from: int


def pending(known: Sequence[Migration], installed: Iterable[Installed], where: str) -> list[Migration]:
    """The migrations that are still to be run.

    `SchemaTooNew` if later code has changed what ours relies on, `SchemaDrifted` if what was run is not what
    we know by these numbers.
    """
    there = {each.number: each for each in installed}
    newest = known[-1].number
    if max((each.compatible_from for each in there.values()), default=0) > newest:
        raise SchemaTooNew(max(there), newest)
    for each in known:
        found = there.get(each.number)
        if found is None and each.number < max(there, default=0):
            raise SchemaDrifted(where, f"migration {each.number} was left out")
        if found is not None and found.checksum != each.checksum:
            raise SchemaDrifted(where, f"migration {each.number} was not {each.file} as it is here")
    return [each for each in known if each.number not in there]


def made_by(migrations: Iterable[Migration]) -> list[str]:
    """The tables and sequences that are there after these, without those that later code may have added."""
    made: list[str] = []
    for verb, name in (found for each in migrations for found in _MADE.findall(each.script)):
        if verb == "CREATE":
            made.append(name)
        else:
            made.remove(name)
    return made

"""What a command runs: a program and its arguments as the code declares them, with places for values.

A place is written `{name}`, a literal brace is doubled.  Each element of the declaration becomes exactly one
element of argv, whatever the values are: nothing splits them, and no shell reads them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from string import Formatter

from msgspec import Struct

from propolis.errors import BadSetting

Value = str | int | float  # no bool: programs do not agree on how a truth is written

# Programs that run a script which they are given; wherever one of these words stands, it may be run.
_SHELL = re.compile(r"(?:r?bash|[dy]?ash|[lmor]?ksh|pdksh|t?csh|zsh|fish|posh|sh|pwsh|su|runuser)[0-9.]*")
_SPLITS = re.compile(r"-[A-Za-z0]*S.*|--split-string.*", re.DOTALL)  # of env: it makes words of a text
_SCRIPT_FOLLOWS = re.compile(r"-[A-Za-z]*c[A-Za-z]*")  # also -ec and -lc


class ValuePlace(Struct, frozen=True):
    """Where a value goes.  `any`: it may also begin with a dash."""

    name: str
    any: bool = False


class Text(Struct, frozen=True):
    """Fixed text with places in it."""

    pieces: tuple[str | ValuePlace, ...]

    @property
    def places(self) -> list[ValuePlace]:
        return [piece for piece in self.pieces if isinstance(piece, ValuePlace)]

    @property
    def fixed(self) -> str | None:
        """The text, if there is no place in it."""
        return None if self.places else "".join(map(str, self.pieces))

    @property
    def beginning(self) -> str:
        """The fixed text before the first place."""
        return str(self.pieces[0]) if self.pieces and isinstance(self.pieces[0], str) else ""

    def filled(self, values: Mapping[str, object]) -> str:
        return "".join(
            _written(piece.name, values[piece.name]) if isinstance(piece, ValuePlace) else piece
            for piece in self.pieces
        )

    def argument(self, values: Mapping[str, object]) -> str:
        """Filled, as one element of argv; `ValueError` if that cannot be, or could be taken for an option.

        The whole element counts, not the value: after an empty value comes what stands behind it.
        """
        text, dashes = self.filled(values), self.beginning
        if "\0" in text:
            raise ValueError(f"an argument cannot hold a NUL: {_names(self.places)}")
        if self.places and not dashes.strip("-") and text[len(dashes) :].startswith("-"):
            first = self.places[0]
            if not first.any:
                raise ValueError(
                    f"{first.name}: it would begin with '-', as an option does: if that is meant, declare "
                    f"the place as {{{first.name}:any}}"
                )
        return text


class Template:
    """A declared command.  Raises `BadSetting` for what is none, or lets a job choose what is run."""

    def __init__(self, name: str, program: Sequence[str], stdin: str | None = None) -> None:
        if isinstance(program, str) or not program:
            raise BadSetting(
                f'{name}: give the program and its arguments as a list, such as ["program", "{{place}}"]: '
                f"no shell would split a line"
            )
        self._argv = [parsed(name, element) for element in program]
        self._stdin = None if stdin is None else parsed(name, stdin)
        self._check_program(name)
        self._check_shell(name)

    @property
    def names(self) -> list[str]:
        """Of the places, each once."""
        texts = self._argv if self._stdin is None else [*self._argv, self._stdin]
        return list(dict.fromkeys(place.name for text in texts for place in text.places))

    def argv(self, values: Mapping[str, object]) -> list[str]:
        """`ValueError` for values that their places do not take."""
        return [text.argument(values) for text in self._argv]

    def stdin(self, values: Mapping[str, object]) -> str | None:
        return None if self._stdin is None else self._stdin.filled(values)

    def check(self, **values: object) -> None:
        """`ValueError` for values that could not be run with; one for each place."""
        self.argv(values)
        self.stdin(values)

    def _check_program(self, name: str) -> None:
        if not self._argv[0].fixed:
            raise BadSetting(
                f"{name}: the program itself must be fixed text: a job brings values, never the program"
            )
        for text in self._argv:
            if "\0" in text.filled({place.name: "" for place in text.places}):
                raise BadSetting(f"{name}: an argument cannot hold a NUL")

    def _check_shell(self, name: str) -> None:
        """A value inside of a script is code: a shell may get it only as a parameter of a fixed script."""
        words = [text.fixed for text in self._argv]
        if not self.names:
            return
        for at, word in enumerate(words):
            program = posixpath.basename(word or "")
            if program == "env" and any(_SPLITS.fullmatch(text.beginning) for text in self._argv[at + 1 :]):
                raise BadSetting(f"{name}: env -S would split what a job brings: give words one by one")
            if not _SHELL.fullmatch(program):
                continue
            if _has_fixed_script(words[at:]):
                return  # whatever stands behind it are the parameters of the script
            raise BadSetting(
                f"{name}: {word} would run what a job brings: keep its script fixed, and give values "
                f'behind it, as in ["sh", "-c", \'wc -l "$1"\', "sh", "{{file}}"].  Where {word} is not run '
                f"here, write it into one element with its option, as in --shell={word}"
            )


def _has_fixed_script(words: list[str | None]) -> bool:
    """`words` begin with a shell; None is one with a place."""
    for flag, word in enumerate(words):
        if word is None:
            return False
        if _SCRIPT_FOLLOWS.fullmatch(word):
            script = (words[flag + 1 :] or [None])[0]
            return script is not None and not script.startswith(("-", "+"))
    return False


def parsed(name: str, text: str) -> Text:
    """Text with places in it; `name` is what it belongs to."""
    if not isinstance(text, str):
        raise BadSetting(f"{name}: {text!r} is no text: write every argument as a string")
    pieces: list[str | ValuePlace] = []
    try:
        for before, field, spec, conversion in Formatter().parse(text):
            if before:
                pieces.append(before)
            if field is not None:
                pieces.append(_place(field, spec or "", conversion))
    except ValueError as error:
        raise BadSetting(
            f"{name}: {text!r}: {error}: a place is written {{name}} or {{name:any}}, a brace {{{{ or }}}}"
        ) from error
    return Text(tuple(pieces))


def _place(field: str, spec: str, conversion: str | None) -> ValuePlace:
    if spec not in ("", "any") or conversion is not None:
        raise ValueError(f"the place {field!r} can only have :any")
    if not field.isidentifier() or iskeyword(field) or field.startswith("_") or field == "self":
        raise ValueError(f"{field!r} cannot be the name of a place")
    return ValuePlace(field, any=spec == "any")


def _written(name: str, value: object) -> str:
    """A number as Python writes it."""
    if isinstance(value, bool) or not isinstance(value, Value):
        raise ValueError(f"{name}: takes text or a number, not {type(value).__qualname__}")
    return str(value)


def _names(places: list[ValuePlace]) -> str:
    return ", ".join(place.name for place in places)

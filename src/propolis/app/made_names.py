"""Keys and unique keys made of the arguments of a call: `key="tenant:{tenant}"`, `unique=("month",)`.

They are made of the JSON that travels, so that they are the same whoever makes the job, and by whatever way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from propolis.app.commands.template import Text, parsed
from propolis.app.signature import Signature, encode_value
from propolis.core import wire
from propolis.core.envelope import NO_KWARGS, Envelope
from propolis.errors import BadSetting

KEY_HEADER = "propolis-key"  # of a step that is not there yet: its key, but for its first argument
MAX_READABLE = 400  # characters of a unique key that shows its arguments; a longer one is their hash

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _number(text: str) -> int | float:
    """1.0 and 1 are the same number, wherever they come from."""
    number = float(text)
    return int(number) if number.is_integer() else number


_values = msgspec.json.Decoder(float_hook=_number)
_pieces = msgspec.json.Decoder(list[str | None])


class MadeNames:
    """What a task makes of its arguments.  `BadSetting` for a name that is no parameter of it."""

    def __init__(
        self,
        task: str,
        signature: Signature,
        *,
        key: str | None = None,
        unique: tuple[str, ...] | None = None,
    ) -> None:
        self._task = task
        self._signature = signature
        self._key = None if key is None else _key_text(task, key)
        self._unique = unique
        self._key_names = () if self._key is None else tuple(place.name for place in self._key.places)
        self._names = frozenset((*self._key_names, *_checked_unique(task, unique)))
        for name in sorted(self._names):
            self._check_parameter(name)

    def _check_parameter(self, name: str) -> None:
        parameters = self._signature.parameters
        if name not in parameters or parameters[name].kind in _VARIABLE:
            what = "key=" if name in self._key_names else "unique="
            names = [each.name for each in parameters.values() if each.kind not in _VARIABLE]
            raise BadSetting(
                f"{self._task}: {what} names {name!r}, which is no parameter of it: it has "
                f"{', '.join(names) or 'none'}"
            )

    def check(self) -> None:
        """`BadSetting` for what no call has, now that every annotation can be resolved."""
        for name in sorted(self._names & self._signature.provided.keys()):
            raise BadSetting(
                f"{self._task}: {name!r} is given by the worker, and no call has it: make key= and unique= "
                f"of arguments that travel"
            )

    def fields(self, args: Raw, kwargs: Raw) -> dict[str, Any]:
        """Those that the envelope of such a call gets."""
        return self._made(self._values(args, kwargs, self._signature.positions))

    def later(self, job: Envelope) -> Envelope:
        """A step that is not there yet: the step before it will give its first argument."""
        first, *positions = self._signature.positions
        values = self._values(job.args, job.kwargs, positions)
        if first not in self._names:
            return replace(job, **self._made(values))
        if self._unique is not None and first in self._unique:
            raise BadSetting(
                f"{self._task}: unique= is made of {first!r}, which only the step before it knows: give this "
                f"step a key that is known now, as in {self._task}.using(unique=…), or unique=None"
            )
        assert self._key is not None
        pieces = [None if piece == first else text for piece, text in self._pieces(values | {first: ""})]
        made = {} if self._unique is None else {"unique": self._unique_key(values)}
        header = msgspec.json.encode(pieces).decode()
        return replace(job, **made, headers={**job.headers, KEY_HEADER: header})

    def _made(self, values: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self._key is not None:
            made["key"] = "".join(text for _, text in self._pieces(values))
            wire.check_text("key", made["key"])
        if self._unique is not None:
            made["unique"] = self._unique_key(values)
        return made

    def _pieces(self, values: dict[str, Any]) -> Iterator[tuple[str | None, str]]:
        """The parts of the key, each with the name of the argument that it is made of."""
        assert self._key is not None
        for piece in self._key.pieces:
            if isinstance(piece, str):
                yield None, piece
            else:
                yield piece.name, key_part(self._task, piece.name, values[piece.name])

    def _unique_key(self, values: dict[str, Any]) -> str:
        assert self._unique is not None
        chosen = msgspec.json.encode([values[name] for name in self._unique], order="sorted")
        readable = f"{self._task} {chosen.decode()}"
        return (
            readable if len(readable) <= MAX_READABLE else f"{self._task} sha256:{sha256(chosen).hexdigest()}"
        )

    def _values(self, args: Raw, kwargs: Raw, positions: list[str]) -> dict[str, Any]:
        given = dict(zip(positions, _values.decode(args), strict=False))
        named = {} if kwargs is NO_KWARGS else _values.decode(kwargs)
        return {**self._defaults, **named, **given}

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        self.check()
        found = {name: self._signature.parameters[name].default for name in self._names}
        return {
            name: _values.decode(encode_value(default))
            for name, default in found.items()
            if default is not inspect.Parameter.empty
        }


def key_part(task: str, name: str, value: object) -> str:
    """A value inside of a key."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadSetting(
            f"{task}: no key can be made of {name}={value!r:.100}, which is neither text nor a number: say "
            f"using(key=…), or using(key=None) for none"
        )
    return str(value)


def with_key_of_first(job: Envelope, first: bytes) -> Envelope:
    """A step that is put now: its key is made with its first argument, if it is made of that.

    `BadSetting` for what no key can be made of.
    """
    header = job.headers.get(KEY_HEADER)
    if header is None:
        return job
    value = _values.decode(first)
    key = "".join(
        key_part(job.task, "its first argument", value) if p is None else p for p in _pieces.decode(header)
    )
    wire.check_text("key", key)
    return replace(job, key=key, headers={n: v for n, v in job.headers.items() if n != KEY_HEADER})


def _key_text(task: str, key: object) -> Text:
    if not isinstance(key, str):
        raise BadSetting(f'{task}: key={key!r} is no text: write it like "tenant:{{tenant}}"')
    text = parsed(f"{task}: key=", key)
    if not key or any(place.any for place in text.places):
        raise BadSetting(
            f'{task}: key={key!r}: write the name of a parameter into braces, as in "tenant:{{tenant}}"'
        )
    return text


def _checked_unique(task: str, unique: object) -> tuple[str, ...]:
    if unique is None:
        return ()
    if not isinstance(unique, tuple) or not all(isinstance(name, str) for name in unique):
        raise BadSetting(
            f'{task}: unique={unique!r}: give the names of parameters as a tuple, such as ("customer", '
            f'"month") or ("customer",); () lets one job of the task wait or run at a time'
        )
    return unique

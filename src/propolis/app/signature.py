"""The arguments of a task: checked when it is enqueued, decoded by types when it runs.

One decoder is compiled per task from its signature.  Parameters that the worker provides (the job
itself, dependencies) are left out of what travels.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar, get_args, get_origin

import msgspec
from msgspec import Raw

from propolis.app.verdicts import Verdict
from propolis.core.envelope import NO_ARGS, NO_KWARGS
from propolis.core.wire import HARD_LIMIT
from propolis.errors import BadCall, BadSetting, BrokenPayload

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_CHECK = "__propolis_check__"

F = TypeVar("F", bound=Callable[..., Any])


class Provided(ABC):
    """A parameter annotated with a subclass of this is given by the worker."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    async def given(cls, job: Any) -> Self:
        """What the worker gives for it, while it prepares to run `job`."""


# The job that is running here.  It stands this low so that whoever waits for a job can see it.
current: ContextVar[Provided | None] = ContextVar("propolis_current_job", default=None)


class Depends:
    """A parameter with this as its default, or in its annotation, gets what `provider` makes.

    The provider is a function, a coroutine function or a generator of either kind that yields once
    and cleans up afterwards; it may itself ask for the job and for dependencies.
    """

    def __init__(self, provider: Callable[..., Any]) -> None:
        self.provider = provider


def accepting(check: Callable[..., None], function: F) -> F:
    """Have the arguments of `function` checked beyond their types, wherever its signature is.

    `check` is called with what travels, and raises `ValueError` for what the function does not accept.
    """
    function.__dict__[_CHECK] = check
    return function


def encode_value(value: object) -> bytes:
    """`value` as JSON; `BadCall` for what has no JSON form."""
    return _encoder.encode(value)


def encode_result(value: object) -> bytes:
    """The same; `ValueError` for what is more than an engine has to keep."""
    encoded = encode_value(value)
    if len(encoded) > HARD_LIMIT:
        raise ValueError(f"{len(encoded):,} bytes are too many")
    return encoded


def decoder_for(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_decode_model)


def _encode_model(value: Any) -> Any:
    """Pydantic models, without importing pydantic: whoever has none does not pay for it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise BadCall(
        f"{type(value).__qualname__} has no JSON form: pass a dataclass, a model or plain values instead"
    )


def _decode_model(kind: Any, value: Any) -> Any:
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise TypeError(f"no way to make {kind!r} from JSON: use a dataclass, a model or plain values")


_encoder = msgspec.json.Encoder(enc_hook=_encode_model)


class Signature:
    """How a function is called.  Annotations are resolved at first use, when all modules are loaded."""

    def __init__(self, function: Callable[..., Any], names: Mapping[str, Any] | None = None) -> None:
        """`names` are those around a function that was defined inside another one."""
        self._function = function
        self._names_around = names
        self._signature = inspect.signature(function)
        self._accepts: Callable[..., None] | None = getattr(function, _CHECK, None)

    @cached_property
    def providers(self) -> dict[str, Signature]:
        """The signatures of the functions that make the dependencies."""
        sources = self.provided.items()
        return {
            name: Signature(s.provider, self._names_around) for name, s in sources if isinstance(s, Depends)
        }

    def asks_for(self, kind: type) -> bool:
        """Does the function, or one that makes a dependency of it, want this from the worker?"""
        return any(
            self.providers[name].asks_for(kind) if isinstance(source, Depends) else issubclass(source, kind)
            for name, source in self.provided.items()
        )

    @cached_property
    def hints(self) -> Mapping[str, Any]:
        try:
            return typing.get_type_hints(self._function, None, self._names_around, include_extras=True)
        except NameError as error:
            raise BadSetting(
                f"{self._function.__qualname__}: the annotation {error.name!r} is not defined at run time: "
                f"import it outside of `if TYPE_CHECKING`"
            ) from error

    @cached_property
    def provided(self) -> dict[str, Depends | type[Provided]]:
        """The parameters that the worker gives, and what each of them asks for."""
        found = {}
        for name, parameter in self._signature.parameters.items():
            if (source := _source(self.hints.get(name), parameter.default)) is not None:
                found[name] = source
        return found

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """All of them, also those that the worker gives."""
        return self._signature.parameters

    @cached_property
    def _travelling(self) -> list[inspect.Parameter]:
        return [p for p in self._signature.parameters.values() if p.name not in self.provided]

    @cached_property
    def _public(self) -> inspect.Signature:
        return inspect.Signature(self._travelling)

    @cached_property
    def _positional(self) -> list[inspect.Parameter]:
        return [p for p in self._travelling if p.kind in _POSITIONAL]

    @cached_property
    def _simple(self) -> bool:
        """Only ordinary parameters: what travels is one array."""
        return len(self._positional) == len(self._travelling)

    @cached_property
    def _names(self) -> list[str]:
        return [parameter.name for parameter in self._positional]

    @cached_property
    def _by_position(self) -> msgspec.json.Decoder[Any]:
        """Decodes the array of arguments at once; missing ones at the end get their defaults."""
        fields: list[Any] = []
        for index, parameter in enumerate(self._positional):
            kind = self._kind(parameter)
            if parameter.default is inspect.Parameter.empty:
                fields.append((f"p{index}", kind))
            else:
                fields.append(
                    (f"p{index}", kind, msgspec.field(default_factory=_constant(parameter.default)))
                )
        shape = msgspec.defstruct("Arguments", fields, array_like=True, forbid_unknown_fields=True)
        return decoder_for(shape)

    def _kind(self, parameter: inspect.Parameter) -> Any:
        return self.hints.get(parameter.name, Any)

    # --- out -----------------------------------------------------------------------------

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool = True) -> tuple[Raw, Raw]:
        """The arguments as JSON; `TypeError` here rather than in the worker if they do not fit."""
        if kwargs or len(args) != len(self._positional) or not self._simple:
            try:
                bound = self._public.bind(*args, **kwargs)
            except TypeError as error:
                raise BadCall(f"{self.shown}: {error}") from None
            args, kwargs = bound.args, bound.kwargs
        encoded = Raw(_encoder.encode(args)) if args else NO_ARGS
        named = Raw(_encoder.encode(kwargs)) if kwargs else NO_KWARGS
        if check:
            try:
                self.decode(encoded, named)
            except BrokenPayload as error:
                raise TypeError(f"{self._function.__qualname__}: {error}") from error
        return encoded, named

    def encode_later(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, check: bool = True
    ) -> tuple[Raw, Raw]:
        """The same without the first argument, which will be known later."""
        try:
            bound = self._public.bind(None, *args, **kwargs)
        except TypeError as error:
            raise BadCall(f"{self.shown}, but for its first argument: {error}") from None
        encoded, named = _encoder.encode(bound.args[1:]), _encoder.encode(bound.kwargs)
        if check:
            self._check_later(bound)
        return Raw(encoded), Raw(named)

    def _check_later(self, bound: inspect.BoundArguments) -> None:
        for name, value in list(bound.arguments.items())[1:]:
            parameter = self._public.parameters[name]
            if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            try:
                self._decode_one(parameter, Raw(_encoder.encode(value)))
            except (msgspec.MsgspecError, ValueError) as error:
                raise TypeError(f"{self.shown}: {name}: {error}") from error

    # --- in ------------------------------------------------------------------------------

    def decode(self, args: Raw, kwargs: Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What to call the function with.  Whatever does not fit is a `BrokenPayload`."""
        try:
            if self._simple and self._accepts is None and (kwargs is NO_KWARGS or bytes(kwargs) == b"{}"):
                values = msgspec.structs.astuple(self._by_position.decode(args))
                return ((), dict(zip(self._names, values, strict=True))) if self.provided else (values, {})
            return self._decode_each(args, kwargs)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
            raise BrokenPayload(f"the arguments do not fit {self.shown}: {error}") from error

    def _decode_each(self, args: Raw, kwargs: Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = self._public.bind(
            *msgspec.json.decode(args, type=list[Raw]), **msgspec.json.decode(kwargs, type=dict[str, Raw])
        )
        for name, value in bound.arguments.items():
            try:
                bound.arguments[name] = self._decode_one(self._public.parameters[name], value)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from error
        if self._accepts is not None:
            self._accepts(*bound.args, **bound.kwargs)
        if self._simple and self.provided:  # their places in between must stay free
            return (), {**bound.arguments}
        return bound.args, bound.kwargs

    def _decode_one(self, parameter: inspect.Parameter, value: Any) -> Any:
        decoder = decoder_for(self._kind(parameter))
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(decoder.decode(each) for each in value)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return {name: decoder.decode(each) for name, each in value.items()}
        return decoder.decode(value)

    # --- for people ----------------------------------------------------------------------

    @property
    def shown(self) -> str:
        return f"{self._function.__qualname__}{self._public}"

    @property
    def positions(self) -> list[str]:
        """The names of the arguments that travel by position, in their order."""
        return self._names

    @cached_property
    def result_kind(self) -> Any:
        """What the function returns, verdicts aside; anything, where no JSON could be decoded as that."""
        kind = self.hints.get("return", Any)
        if get_origin(kind) in (typing.Union, types.UnionType):
            values = [
                one for one in get_args(kind) if not (isinstance(one, type) and issubclass(one, Verdict))
            ]
            kind = functools.reduce(operator.or_, values) if values else None
        try:
            decoder_for(kind)
        except TypeError:
            return Any
        return kind

    def check(self) -> None:
        """`BadSetting` for what cannot work, before the first job shows it."""
        kinds = [self._kind(parameter) for parameter in self._travelling]
        for kind in kinds:
            try:
                decoder_for(kind)
            except TypeError as error:
                raise BadSetting(f"{self.shown}: {error}") from error
        for name in self.provided:
            if self._signature.parameters[name].kind not in _KEYWORD:
                raise BadSetting(
                    f"{self._function.__qualname__}: {name!r} is provided, so it cannot be positional-only"
                )


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _source(hint: Any, default: Any) -> Depends | type[Provided] | None:
    """What a parameter asks the worker for, if anything."""
    if isinstance(default, Depends):
        return default
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            if isinstance(extra, Depends):
                return extra
        hint = get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, Provided):
        return hint
    return None

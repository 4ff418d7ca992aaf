"""Arguments on their way out and in."""

from __future__ import annotations

import dataclasses
import enum
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from propolis.app.context import Job
from propolis.app.signature import Depends, Signature, accepting, decoder_for, encode_value
from propolis.app.verdicts import Retry, Snooze
from propolis.errors import BadSetting, BrokenPayload


def connect() -> str:
    return ""


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Size(msgspec.Struct):
    width: int


class Order(pydantic.BaseModel):
    number: int
    placed: datetime


def there_and_back(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = Signature(function)
    return signature.decode(*signature.encode(args, kwargs))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, 5),
        (str, "ünïcode \U0001f41d"),
        (bytes, b"\x00\xff"),
        (datetime, datetime(2026, 1, 1, tzinfo=UTC)),
        (date, date(2026, 2, 28)),
        (timedelta, timedelta(minutes=5)),
        (uuid.UUID, uuid.UUID(int=7)),
        (Decimal, Decimal("1.10")),
        (Colour, Colour.RED),
        (Point, Point(1, 2)),
        (Size, Size(3)),
        (Order, Order(number=1, placed=datetime(2026, 1, 1, tzinfo=UTC))),
        (list[Order], [Order(number=1, placed=datetime(2026, 1, 1, tzinfo=UTC))]),
        (dict[str, Point], {"a": Point(1, 2)}),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "a")),
        (int | None, None),
        (Any, {"a": [1, None, True]}),
    ],
)
def test_values_of_many_kinds_arrive_as_they_were(kind: Any, value: Any) -> None:
    """As arguments and as results."""

    def function(thing):  # type: ignore[no-untyped-def]  # annotated below
        ...

    function.__annotations__ = {"thing": kind}
    assert there_and_back(function, value) == ((value,), {})
    assert decoder_for(kind).decode(encode_value(value)) == value


def test_every_way_to_pass_arguments_works() -> None:
    def function(a: int, /, b: int, c: int = 3, *more: int, d: int, e: int = 5, **others: int) -> None: ...

    args, kwargs = there_and_back(function, 1, 2, d=4)
    assert (args, kwargs) == ((1, 2), {"d": 4})
    args, kwargs = there_and_back(function, 1, 2, 3, 4, 5, d=6, z=7)
    assert (args, kwargs) == ((1, 2, 3, 4, 5), {"d": 6, "z": 7})
    args, kwargs = there_and_back(function, 1, b=2, d=4)
    assert (args, kwargs) == ((1, 2), {"d": 4})


def test_missing_arguments_get_the_defaults_of_the_code_that_runs() -> None:
    def function(a: int, b: list[int] = [7], c: str = "x") -> None:  # noqa: B006  # as users write
        ...

    assert bytes(Signature(function).encode((1,), {})[0]) == b"[1]"  # what is not given does not travel
    assert Signature(function).decode(msgspec.Raw(b"[1]"), msgspec.Raw(b"{}")) == ((1, [7], "x"), {})


def test_what_is_provided_does_not_travel_wherever_it_stands() -> None:
    def function(a: int, job: Job, b: int, db: Annotated[str, Depends(connect)], c: int = 3) -> None: ...

    signature = Signature(function)
    assert set(signature.provided) == {"job", "db"}
    args, kwargs = signature.encode((1, 2), {})
    assert bytes(args) == b"[1,2]"
    assert signature.decode(args, kwargs) == ((), {"a": 1, "b": 2, "c": 3})
    assert signature.decode(msgspec.Raw(b"[1]"), msgspec.Raw(b'{"b":2}')) == ((), {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (b"[]", b"{}"),
        (b'["x"]', b"{}"),
        (b"[1,2,3]", b"{}"),
        (b"{}", b"{}"),
        (b"[1]", b"[]"),
        (b"[1]", b'{"a":1}'),
        (b"[1]", b'{"z":1}'),
        (b"[1e999]", b"{}"),
        (b"[", b"{}"),
        (b'["\xff"]', b"{}"),
    ],
)
def test_what_does_not_fit_is_broken(args: bytes, kwargs: bytes) -> None:
    """S1.17: also what another program has put."""

    def function(a: int, b: int = 2) -> None: ...

    with pytest.raises(BrokenPayload, match="do not fit"):
        Signature(function).decode(msgspec.Raw(args), msgspec.Raw(kwargs))


def test_what_does_not_fit_is_named() -> None:
    def function(a: int, *, b: int) -> None: ...

    with pytest.raises(BrokenPayload, match="b: Expected `int`, got `str`"):
        Signature(function).decode(msgspec.Raw(b"[1]"), msgspec.Raw(b'{"b":"x"}'))


def test_a_function_may_accept_less_than_its_types() -> None:
    def small(a: int, b: int = 2) -> None:
        if a + b > 10:
            raise ValueError("too much")

    def function(a: int, job: Job, b: int = 2) -> None: ...

    signature = Signature(accepting(small, function))
    assert signature.decode(*signature.encode((1,), {})) == ((), {"a": 1})
    with pytest.raises(TypeError, match="too much"):
        signature.encode((9, 9), {})
    for args, kwargs in ((b"[9,9]", b"{}"), (b"[9]", b'{"b":9}')):
        with pytest.raises(BrokenPayload, match="too much"):
            signature.decode(msgspec.Raw(args), msgspec.Raw(kwargs))


def test_an_invalid_model_is_broken() -> None:
    def function(order: Order) -> None: ...

    with pytest.raises(BrokenPayload, match="number"):
        Signature(function).decode(msgspec.Raw(b'[{"number":"many"}]'), msgspec.Raw(b"{}"))


def test_an_annotation_that_is_not_there_at_run_time_is_a_clear_error() -> None:
    def function(a: int) -> None: ...

    function.__annotations__ = {"a": "Nowhere"}
    with pytest.raises(BadSetting, match="TYPE_CHECKING"):
        Signature(function).check()


def test_a_kind_that_cannot_travel_is_found_by_the_check() -> None:
    class Connection: ...

    def function(a: Connection) -> None: ...

    function.__annotations__ = {"a": Connection}
    Signature(function).check()  # a class of one's own may have hooks: it is told when used
    with pytest.raises(TypeError, match="no JSON form"):
        Signature(function).encode((Connection(),), {})
    with pytest.raises(BrokenPayload, match="no way to make"):
        Signature(function).decode(msgspec.Raw(b"[{}]"), msgspec.Raw(b"{}"))


def test_a_provided_parameter_must_have_a_name() -> None:
    def function(job: Job, /) -> None: ...

    with pytest.raises(BadSetting, match="positional-only"):
        Signature(function).check()


def test_an_impossible_kind_is_found_by_the_check() -> None:
    def function(a: int) -> None: ...

    function.__annotations__ = {"a": Point | Size}
    with pytest.raises(BadSetting, match="function"):
        Signature(function).check()


def test_the_check_of_arguments_can_be_left_out() -> None:
    """S3.24."""

    def function(a: int) -> None: ...

    assert bytes(Signature(function).encode(("x",), {}, check=False)[0]) == b'["x"]'


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (int, int),
        (int | Retry, int),
        (Retry | Snooze | None, None),
        (Retry | Snooze, None),
        (Point | Size, Any),
    ],
)
def test_the_kind_of_a_result_is_what_is_left_without_verdicts(annotation: Any, kind: Any) -> None:
    def function() -> None: ...

    function.__annotations__ = {"return": annotation}
    assert Signature(function).result_kind in (kind, type(kind))

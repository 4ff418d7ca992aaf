"""Options that nobody knows are refused where they are given, by name; all others change something."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from propolis import App, cron, every
from propolis.app.batch.plan import BatchOptions, plan_batch
from propolis.app.task import CallOptions, TaskOptions, call_fields, declared_options
from propolis.core.envelope import UniqueUntil
from propolis.strategies import archive, breaker, delete, limit
from propolis.values import BatchHandle

app = App("memory://")


@app.task
async def send(to: str) -> None: ...


CALLS: dict[str, Callable[..., Any]] = {
    "task()": app.task,
    "command()": lambda **options: app.command("ls", ["ls"], **options),
    "using()": send.using,
    "batch()": app.batch,
    "cron()": lambda **options: app.cron("@daily", **options),
    "every()": lambda **options: app.every("1h", **options),
}


@pytest.mark.parametrize("where", CALLS)
def test_an_unknown_option_is_refused_by_its_name(where: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[where](dealy="5m")
    assert str(caught.value).startswith(f"{where} has no option dealy: it has ")


def test_the_refusal_names_the_options_there_are() -> None:
    with pytest.raises(TypeError, match=r"it has jitter, misfire, misfire_after, misfire_limit, overlap$"):
        cron("@daily", skip=True)  # type: ignore[call-arg]  # refused


def test_of_several_unknown_options_all_are_named() -> None:
    with pytest.raises(TypeError, match="has no option one, two: "):
        every("1h", two=2, one=1)  # type: ignore[call-arg]  # refused


def test_a_nested_batch_has_its_parent_already() -> None:
    with pytest.raises(TypeError, match=r"batch\(\) has no option parent: "):
        BatchHandle(app.client, "outer").batch(parent="other")  # type: ignore[call-arg]  # refused


LATER = datetime(2026, 1, 1, tzinfo=UTC)

TASK_VALUES: dict[str, Any] = {
    "queue": "mail",
    "priority": 3,
    "timeout": "1s",
    "retries": 7,
    "on_success": archive,
    "on_error": delete,
    "on_timeout": delete,
    "result_ttl": "1h",
    "max_crashes": 9,
    "name": "other",
    "isolate": "process",
    "abandon": True,
    "memory_limit": 1_000_000,
    "max_timeout": "1h",
    "env": {"LANG": "C"},
    "key": "tenant:{to}",
    "unique": ("to",),
    "unique_until": UniqueUntil.STARTED,
    "limit": limit(3),
    "breaker": breaker(),
}
CALL_VALUES: dict[str, Any] = {
    "delay": "5m",
    "at": LATER,
    "expires": "5m",
    "queue": "mail",
    "priority": 3,
    "timeout": "1s",
    "result_ttl": "1h",
    "job_id": "mine",
    "unique": "one",
    "unique_until": UniqueUntil.STARTED,
    "key": "a",
    "batch": "b",
    "on_success": archive,
    "on_error": delete,
    "on_timeout": delete,
    "headers": {"a": "b"},
    "on_conflict": "refuse",
    "wait": "30s",
    "tx": object(),  # which no job knows of: a call keeps it
}
BATCH_VALUES: dict[str, Any] = {
    "callback": send.job("a"),
    "on_succeeded": send.job("a"),
    "on_failed": send.job("a"),
    "keep_for": "1h",
    "open_for": "1h",
    "delay": "5m",
    "at": LATER,
    "note": "a",
    "batch_id": "b",
}


def of_task(given: Any) -> object:
    return declared_options(given, check_arguments=True)


def of_call(given: Any) -> object:
    call = send.using(**given)
    return call_fields(given), call._tx, call._wait, call._refuses


def of_batch(given: Any) -> object:
    options: Any = {"batch_id": "a", **given}
    return plan_batch(options)


KINDS: list[tuple[Any, dict[str, Any], Callable[[Any], object]]] = [
    (TaskOptions, TASK_VALUES, of_task),
    (CallOptions, CALL_VALUES, of_call),
    (BatchOptions, BATCH_VALUES, of_batch),
]


@pytest.mark.parametrize(("kind", "values", "result_of"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_option_that_is_accepted_changes_something(
    kind: Any, values: dict[str, Any], result_of: Callable[[Any], object]
) -> None:
    assert values.keys() == kind.__optional_keys__, "an option is missing here"
    without = result_of({})
    assert [name for name, value in values.items() if result_of({name: value}) == without] == []

"""`@app.task(limit=limit(…))`: what workers bring to their engine when they start, on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.schedules.acting import app_on

from propolis import App
from propolis.app.operate import breakers, declared_limits
from propolis.app.operate.declared_limits import BY, sync
from propolis.core.protocols import UNBOUNDED, Engine, Rule, RuleKind, Scope, task_key
from propolis.errors import BadSetting
from propolis.strategies import Limit, limit
from propolis.testing.engines.steps import put_some, take
from propolis.worker import Settings, Worker

TASK = "tests.echo"
WHOLE, EACH_KEY = (Scope.TASK, TASK), (Scope.TASK_KEY, task_key(TASK, "*"))


def declaring(made: Limit | None, *, key: str | None = None, name: str = TASK) -> App:
    """An app with one task."""
    app = App("memory://")
    options: dict[str, Any] = {}
    if made is not None:
        options["limit"] = made
    if key is not None:
        options["key"] = key
    declare: Any = app.task(name=name, **options)

    async def echo(n: int = 0) -> None: ...

    declare(echo)
    return app


async def starts(engine: Engine, app: App) -> None:
    """What a worker of this app does about limits when it starts."""
    await sync(engine, app.tasks.values())


async def stored(engine: Engine) -> list[tuple[tuple[Scope, str], int, str]]:
    return [((rule.scope, rule.name), rule.n, rule.by) for rule in await engine.rules()]


class Counting:
    """An engine whose calls about rules are counted."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        for name in ("rules", "add_rule", "remove_rule"):
            monkeypatch.setattr(engine, name, self.counted(name, getattr(engine, name)))

    def counted(self, name: str, verb: Any) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return await verb(*args, **kwargs)

        return call

    def took(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


async def test_a_limit_is_put_by_the_worker_that_starts_and_obeyed(engine: Engine) -> None:
    await starts(engine, declaring(limit(2)))
    assert await stored(engine) == [(WHOLE, 2, "code")]
    await put_some(engine, 3)
    assert len(await take(engine)) == 2


async def test_what_is_so_already_takes_one_call_and_is_not_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, app = Counting(engine, monkeypatch), declaring(limit(2))
    await starts(engine, app)
    assert counting.took() == ["rules", "add_rule"]
    await starts(engine, app)
    assert counting.took() == ["rules"]
    await starts(engine, declaring(limit(3)))
    assert counting.took() == ["rules", "add_rule"]
    assert await stored(engine) == [(WHOLE, 3, "code")]


async def test_what_is_put_at_run_time_stands_above_the_code(engine: Engine) -> None:
    app = app_on(engine)
    await starts(engine, declaring(limit(2)))
    await app.limits.aput(task=TASK, at_once=50, by="anna")
    await starts(engine, declaring(limit(4)))
    assert await stored(engine) == [(WHOLE, 50, "anna")]
    await app.limits.aremove(task=TASK)
    await starts(engine, declaring(limit(4)))  # and comes back when nobody has put another one
    assert await stored(engine) == [(WHOLE, 4, "code")]


async def test_an_open_breaker_does_not_keep_a_limit_away(engine: Engine) -> None:
    """When it closes it removes its own limit, and then there would be none until another worker starts."""
    lasts = timedelta(minutes=1)
    await engine.add_rule(Rule(RuleKind.LIMIT, *WHOLE, 1, by=breakers.BY, lasts=lasts))
    await starts(engine, declaring(None))
    assert await stored(engine) == [(WHOLE, 1, "breaker")]
    await starts(engine, declaring(limit(2)))
    assert await stored(engine) == [(WHOLE, 2, "code")]


async def test_a_limit_that_the_code_declares_no_more_is_removed(engine: Engine) -> None:
    await starts(engine, declaring(limit(2)))
    await engine.add_rule(Rule(RuleKind.PAUSE, *WHOLE, by=BY))  # that is no limit
    await starts(engine, declaring(None, name="another"))  # whoever does not know the task
    assert await stored(engine) == [(WHOLE, 2, "code"), (WHOLE, 0, "code")]
    await starts(engine, declaring(None))
    assert await stored(engine) == [(WHOLE, 0, "code")]


async def test_where_there_are_many_limits_each_is_looked_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5."""
    for n in range(3):
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK, f"a.{n}", 1, by="anna"))
    await starts(engine, declaring(limit(2)))
    monkeypatch.setattr(declared_limits, "_PAGE", 2)
    await starts(engine, declaring(limit(2)))
    counting = Counting(engine, monkeypatch)
    await starts(engine, declaring(limit(2)))
    assert set(counting.took()) == {"rules"}
    await starts(engine, declaring(None))
    assert [name for (_, name), _, _ in await stored(engine)] == ["a.0", "a.1", "a.2"]


async def test_a_task_that_makes_keys_is_limited_for_each_of_them(engine: Engine) -> None:
    app = declaring(limit(1), key="tenant:{n}")
    await starts(engine, app)
    assert await stored(engine) == [(EACH_KEY, 1, "code")]
    for key in ("tenant:7", "tenant:7", "tenant:8"):
        await put_some(engine, 1, key=key)
    assert len(await take(engine)) == 2
    await starts(engine, declaring(limit(1)))  # the next version makes no keys
    assert await stored(engine) == [(WHOLE, 1, "code")]


async def test_a_rate_is_put_with_its_burst(engine: Engine) -> None:
    await starts(engine, declaring(limit(rate="100/min", burst=20)))
    [rule] = await engine.rules()
    assert (rule.n, rule.every, rule.burst) == (UNBOUNDED, timedelta(seconds=0.6), 20)
    await put_some(engine, 30)
    assert len(await take(engine)) == 20
    await starts(engine, declaring(limit(5, rate="100/min", burst=20)))
    [rule] = await engine.rules()
    assert (rule.n, rule.burst) == (5, 20)


# --- as users say it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        (((), {}), "what is the limit?"),
        (((0,), {}), "Give a whole number from 1"),
        (((True,), {}), "Give a whole number from 1"),
        (((), {"rate": "fast"}), "in which time"),
        (((), {"rate": "0/s"}), "in which time"),
        (((), {"rate": 10}), "in which time"),
        (((), {"rate": "10/soon"}), "in which time"),
        (((), {"rate": "1/1000d"}), "366 days"),
        (((3,), {"burst": 5}), "of which rate"),
        (((), {"rate": "1/s", "burst": 0}), "burst of 0 cannot be kept"),
    ],
)
def test_a_limit_that_makes_no_sense_cannot_be_made(
    terms: tuple[Sequence[Any], dict[str, Any]], words: str
) -> None:
    with pytest.raises(BadSetting) as refused:
        limit(*terms[0], **terms[1])
    assert words in str(refused.value)


def test_a_task_takes_no_other_value_as_its_limit() -> None:
    wrong: Any = 3
    with pytest.raises(BadSetting, match=r"limit=3: write limit\(…\)"):
        App("memory://").task(limit=wrong)


async def test_an_engine_that_keeps_no_rates_is_refused_when_it_is_opened() -> None:
    class Bare:
        async def open(self) -> None:
            raise AssertionError

    for app, needed in (
        (declaring(limit(rate="1/s")), "this app needs for the rate of tests.echo"),
        (declaring(limit(1), key="{n}"), "this app needs for each key of tests.echo"),
        (declaring(limit(1)), "this app needs to limit tests.echo"),
    ):
        bare: Any = Bare()
        app.client._engine = bare
        with pytest.raises(BadSetting, match=needed):
            await app.ready()


async def test_a_worker_that_starts_brings_the_limits_of_its_code() -> None:
    app = declaring(limit(2))
    worker = Worker(app, Settings(), driven=True)
    engine = await app.ready()
    assert await worker._declared_stored(engine)
    [rule] = await app.limits.alist()
    assert (rule.name, rule.n, rule.by, rule.why) == (TASK, 2, "code", "declared by the task")
    await app.aclose()

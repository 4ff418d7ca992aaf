"""Rates, and limits for each key, through `app.limits`; and what `explain` says of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.limits.test_limits import KEY, PLACES, TASK, every_limit, with_a_worker

from propolis import App
from propolis.app.operate import rules
from propolis.app.operate.limits import LimitUse
from propolis.app.operate.rules import rules_about
from propolis.core.duration import duration
from propolis.core.limits import every_of, rate_text
from propolis.core.protocols import (
    MAX_PREFIXES,
    UNBOUNDED,
    Engine,
    Rule,
    RuleKind,
    Scope,
    task_key,
)
from propolis.engines.memory import MemoryEngine
from propolis.errors import BadSetting
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import put_one, put_some, take

EACH_KEY = task_key(TASK, "*")


async def use_of(app: App, *args: Any, **place: Any) -> LimitUse:
    use = await app.limits.aget(*args, **place)
    assert use is not None
    return use


@every_limit
async def test_a_rate_is_put_shown_used_and_removed(
    app: App, engine: Engine, clock: FakeClock, scope: Scope
) -> None:
    place = PLACES[scope]
    await put_some(engine, 5, key=KEY)
    assert await app.limits.aput(**place, rate="100/min", burst=2, by="anna") is True
    assert len(await take(engine)) == 2

    use = await use_of(app, **place)
    assert (use.rule.n, use.rule.burst, use.waiting, use.has_room) == (UNBOUNDED, 2, 3, False)
    assert str(use) == (f"{scope.value} {use.rule.name!r} has used its rate of 100/min: next turn in 0.6 s")
    clock.advance("0.6s")
    assert len(await take(engine)) == 1
    assert await app.limits.aput(**place, at_once=4, rate="10/s") is False
    assert (await use_of(app, **place)).rule.n == 4
    assert await app.limits.aremove(**place) is True
    assert len(await take(engine)) == 2


async def test_number_and_rate_are_shown_beside_each_other(
    app: App, engine: Engine, clock: FakeClock
) -> None:
    await app.limits.aput(KEY, at_once=3, rate="1/10s", burst=2)
    await put_some(engine, 2, key=KEY)
    [lease] = await take(engine, limit=1)
    assert str(await use_of(app, KEY)) == (
        f"key '{KEY}' runs 1 of 3: job {lease.id} and may start 1 at once at its rate of 6/min"
    )
    assert (await use_of(app, KEY)).has_room
    clock.advance("10s")
    tokens = (await use_of(app, KEY)).tokens
    assert tokens is not None
    assert tokens.free == 2


async def test_of_a_key_the_limit_that_holds_is_shown(app: App, engine: Engine) -> None:
    await app.limits.aput(KEY, at_once=1, until="1h")
    for name, n in (("tenant:*", 2), ("*", 3)):
        await app.limits.aput(name, at_once=n)
    await app.limits.aput("*", task=TASK, at_once=4)
    for n, key in ((1, KEY), (2, "tenant:8"), (3, "other")):
        use = await use_of(app, key)
        assert (use.rule.n, use.key) == (n, key)
        assert (await use_of(app, key, task=TASK)).rule.n == n

    await app.limits.aremove("*")
    assert await app.limits.aget("other") is None
    use = await use_of(app, "other", task=TASK)
    assert (use.rule.n, use.rule.name) == (4, EACH_KEY)
    assert await app.limits.aget("other", task="tests.other") is None
    assert (await use_of(app, "tenant:*")).rule.name == "tenant:*"
    assert (await use_of(app, "*", task=TASK)).rule.name == EACH_KEY
    assert [rule.name for rule in await app.limits.alist()] == ["tenant:*", KEY, EACH_KEY]
    assert await app.limits.aremove("*", task=TASK) is True


async def test_a_limit_for_many_keys_is_used_by_each(app: App, engine: Engine) -> None:
    await with_a_worker(engine)
    await app.limits.aput("tenant:*", at_once=2, rate="1/h", by="anna")
    [waits, *_] = (await put_some(engine, 3, key="tenant:8"))[1:]
    other = (await put_one(engine, key=KEY)).id
    await put_one(engine, key="another")
    running = {lease.id for lease in await take(engine)}

    use = await use_of(app, "tenant:8")
    assert (len(use.running), use.waiting, use.has_room) == (1, 2, False)
    [reason] = await app.jobs.aexplain(waits)
    assert reason == (
        f"key 'tenant:8', by the limit on key 'tenant:*', runs 1 of 2: job {use.running[0]} and has used its "
        f"rate of 1/h: next turn in 1 h; limited by anna since 00:00Z"
    )
    of_all = await use_of(app, "tenant:*")
    assert set(of_all.running) == {*use.running, other} < running
    assert (of_all.waiting, of_all.key, of_all.tokens) == (2, None, None)
    assert await app.queues.astate(key="tenant:9") == "limited"
    assert await app.queues.astate(key="else") == "open"


async def test_where_there_are_many_rules_the_limit_of_a_key_is_looked_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: the answer is the same as where all are read, and few calls give it."""
    others = [f"tenant:{n}" for n in range(60)] + ["\U0001f600*", "tenant:70*", "tenant:!", "t"]
    for name in others:
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, name, 1))
    await engine.add_rule(Rule(RuleKind.LIMIT, Scope.TASK_KEY, EACH_KEY, 9))
    steps = ["*", "ten*", "tenant:*", "tenant:7*", "tenant:77"]
    found: list[list[str]] = [[], []]
    calls = 0
    ask = engine.rules

    async def counted(**which: Any) -> list[Rule]:
        nonlocal calls
        calls += 1
        return await ask(**which)

    monkeypatch.setattr(engine, "rules", counted)
    for n, page in enumerate((1000, 5)):
        monkeypatch.setattr(rules, "_PAGE", page)
        found[n] = [rule.name for rule in await rules_about(engine, None, TASK, "tenant:77")]
        for name in steps:
            await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, name, 2))
            calls = 0
            found[n] += [rule.name for rule in await rules_about(engine, None, TASK, "tenant:77")]
            assert calls <= 20
        for name in steps:
            await engine.remove_rule(RuleKind.LIMIT, Scope.KEY, name)

    assert found == [[EACH_KEY, *steps], [EACH_KEY, *steps]]


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({}, "at_once=, or a rate="),
        ({"burst": 5, "at_once": 1}, "of which rate"),
        ({"rate": "100"}, "how many in which time"),
        ({"rate": 5}, "how many in which time"),
        ({"rate": "0/s"}, "how many in which time"),
        ({"rate": "1/999d"}, "366 days"),
        ({"rate": "1/s", "burst": 0}, "a burst of 0"),
        ({"rate": "1/s", "burst": 2.5}, "a burst of 2.5"),
        ({"rate": "1/s", "burst": 10_000_000}, "a burst of 10000000"),
        ({"rate": "1/d", "burst": 900_000}, "100 years"),
        ({"rate": "1/s", "at_once": 0}, "at once"),
    ],
)
async def test_what_is_no_limit_is_refused(terms: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        await App("memory://").limits.aput("k", **terms)


@pytest.mark.parametrize(
    "rate", ["5/fortnight", "5/h/", "5/-1s", f"{'9' * 5000}/s", f"0.{'0' * 40}1/s", "0.0/s"]
)
async def test_a_rate_that_means_nothing_is_named_as_it_was_written(rate: str) -> None:
    with pytest.raises(BadSetting) as refused:
        await App("memory://").limits.aput("k", rate=rate)
    assert str(refused.value).startswith(f"a rate of {rate!r}?  Write how many in which time")


async def test_a_prefix_of_tasks_is_refused() -> None:
    with pytest.raises(BadSetting, match=r"begin with 'mail\.'.*only keys have prefixes"):
        await App("memory://").limits.aput(task="mail.*", at_once=1)


@pytest.mark.parametrize("name", ["k*", "*"])
async def test_what_is_for_many_keys_is_limited_and_not_paused(name: str) -> None:
    app = App("memory://")
    with pytest.raises(BadSetting, match="name the exact keys, or the task"):
        await app.queues.apause(key=name)
    with pytest.raises(BadSetting, match="name the exact keys, or the task"):
        await app.queues.ablock(key=name, task=TASK)
    for key in ("k", "k*"):
        with pytest.raises(BadSetting, match=r'what is limited.*or "\*" and a task='):
            await app.limits.aput(key, task=TASK, at_once=1)


async def test_of_prefixes_there_is_a_number_at_most() -> None:
    app = App("memory://")
    for number in range(MAX_PREFIXES):
        await app.limits.aput(f"{number}:*", at_once=1)
    with pytest.raises(BadSetting, match="beside 100 others"):
        await app.limits.aput("more:*", at_once=1)


@pytest.mark.parametrize("terms", [{"key": "k", "rate": "1/s"}, {"key": "k*", "at_once": 1}])
async def test_an_engine_without_rates_is_named(
    terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the limit is not misread as another one."""
    monkeypatch.delattr("propolis.engines.shared.book.engine.BookEngine.tokens")
    app = App("memory://")
    with pytest.raises(BadSetting, match="MemoryEngine, the engine of memory://, lacks the piece Rates"):
        await app.limits.aput(**terms)
    assert await app.limits.alist() == []
    assert isinstance(await app.client.ready(), MemoryEngine)


@pytest.mark.parametrize(
    ("rate", "every", "shown"),
    [
        ("100/min", "0.6s", "100/min"),
        ("10/s", "0.1s", "10/s"),
        (" 0.5 / s ", "2s", "30/min"),
        ("1/10s", "10s", "6/min"),
        ("5/2h", "24m", "60/d"),
        ("3/s", 0.333334, "3/s"),  # not a moment too early
        ("7/day", 86_400 / 7, "7/d"),
        ("1/7d", "7d", "1/604800s"),
    ],
)
def test_a_rate_is_read_and_written_as_people_do(rate: str, every: str | float, shown: str) -> None:
    found = every_of(rate)
    assert 0 <= (found - duration(every)).total_seconds() <= 1e-6
    assert rate_text(found) == shown
    assert every_of(rate_text(found)) == found

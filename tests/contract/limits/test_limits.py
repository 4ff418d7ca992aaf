"""`app.limits` and what `explain` says of limits, on every engine."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from propolis import App
from propolis.app.operate import rules
from propolis.app.operate.rules import rule_at, rules_about
from propolis.app.operate.workers import Presence, WorkerCard, WorkerState
from propolis.core.job import Done
from propolis.core.protocols import LIMIT_SCOPES, Engine, Rule, RuleKind, Scope, task_key
from propolis.errors import BadCall, BadSetting
from propolis.testing.clock import FakeClock
from propolis.testing.engines.steps import counts, put_one, put_some, settle_one, take

QUEUE, TASK, KEY = "default", "tests.echo", "tenant:7"
PLACES: dict[Scope, dict[str, Any]] = {
    Scope.QUEUE: {"queue": QUEUE},
    Scope.TASK: {"task": TASK},
    Scope.KEY: {"key": KEY},
}
every_limit = pytest.mark.parametrize("scope", sorted(LIMIT_SCOPES), ids=str)


async def with_a_worker(engine: Engine) -> None:
    """One that would run all jobs of these tests: so `explain` says nothing of that."""
    card = WorkerCard(queues=(QUEUE, "other"), tasks=(TASK,), state=WorkerState.WORKING)
    await Presence(engine, "worker-1", lambda: card, clock=lambda: 0.0, lasts=True).beat()


@every_limit
async def test_a_limit_lets_so_many_run_and_is_replaced_and_removed(
    app: App, engine: Engine, scope: Scope
) -> None:
    await put_some(engine, 5, key=KEY)
    place = PLACES[scope]
    assert await app.limits.aget(**place) is None
    assert await app.limits.aput(**place, at_once=1, by="anna") is True
    assert len(await take(engine)) == 1
    assert await app.limits.aput(**place, at_once=3, by="ben", why="paid more") is False
    assert len(await take(engine)) == 2
    [rule] = await app.limits.alist()
    assert (rule.scope, rule.n, rule.by, rule.why) == (scope, 3, "ben", "paid more")
    assert [await app.limits.aremove(**place), await app.limits.aremove(**place)] == [True, False]
    assert len(await take(engine)) == 2


async def test_a_key_may_stand_alone_and_a_limit_ends_by_itself(
    app: App, engine: Engine, clock: FakeClock
) -> None:
    await app.limits.aput(KEY, at_once=1, until="1h")
    use = await app.limits.aget(KEY)
    assert use is not None
    assert (use.rule.name, use.rule.until) == (KEY, clock.now + timedelta(hours=1))
    assert await app.queues.astate(key=KEY) == "limited"
    clock.advance("1h")
    assert await app.limits.aget(KEY) is None
    assert await app.limits.alist() == []


@every_limit
async def test_a_limit_tells_what_runs_under_it_and_how_many_wait(
    app: App, engine: Engine, scope: Scope
) -> None:
    await put_one(engine, queue="other", task="tests.other", key="another")
    ids = [(await put_one(engine, key=KEY)).id for _ in range(4)]
    await put_one(engine, key=KEY, delay_ms=60_000)  # it is not due: it waits for something else
    await app.limits.aput(**PLACES[scope], at_once=2, by="anna")
    assert {lease.id for lease in await take(engine)} == set(ids[:2])
    use = await app.limits.aget(**PLACES[scope])
    assert use is not None
    assert (sorted(use.running), use.waiting, use.more, use.has_room) == (sorted(ids[:2]), 2, False, False)


@every_limit
async def test_explain_names_the_limit_its_owner_and_its_use(app: App, engine: Engine, scope: Scope) -> None:
    await with_a_worker(engine)
    for _ in range(3):
        await put_one(engine, key=KEY)
    waits = (await put_one(engine, key=KEY)).id
    await app.limits.aput(**PLACES[scope], at_once=3, by="anna", why="as agreed")
    running = [lease.id for lease in await take(engine)]
    [reason] = await app.jobs.aexplain(waits)
    use, _, owner = reason.partition("; ")
    head, _, ids = use.partition(": jobs ")
    assert head == f"{scope.value} {PLACES[scope][scope.value]!r} runs 3 of 3"
    assert sorted(ids.split(", ")) == sorted(running)
    assert owner == "limited by anna since 00:00Z: as agreed"


async def test_explain_tells_of_a_limit_with_room_beside_what_really_keeps_it(
    app: App, engine: Engine
) -> None:
    await with_a_worker(engine)
    await app.limits.aput(KEY, at_once=2, by="anna")
    waits = (await put_one(engine, key=KEY)).id
    assert await app.jobs.aexplain(waits) == [
        "it is ready, behind 0 others of queue 'default'",
        f"key '{KEY}' runs 0 of 2; limited by anna since 00:00Z",
    ]
    await app.queues.apause(task=TASK, by="ben")
    paused, limited = await app.jobs.aexplain(waits)
    assert paused.startswith(f"task '{TASK}' is paused by ben")
    assert limited.startswith(f"key '{KEY}' runs 0 of 2")


async def test_explain_tells_of_each_of_several_limits(app: App, engine: Engine) -> None:
    await with_a_worker(engine)
    await app.limits.aput(KEY, at_once=1, by="anna")
    await app.limits.aput(task=TASK, at_once=1, by="ben")
    running, waits = [(await put_one(engine, key=KEY)).id for _ in range(2)]
    [lease] = await take(engine)
    of_key, of_task = sorted(await app.jobs.aexplain(waits))
    assert of_key.startswith(f"key '{KEY}' runs 1 of 1: job {running}; limited by anna")
    assert of_task.startswith(f"task '{TASK}' runs 1 of 1: job {running}; limited by ben")
    await settle_one(engine, lease, Done())
    assert (await app.jobs.aexplain(waits))[0].startswith("it is ready")


async def test_limits_are_listed_page_by_page_and_other_rules_are_not(app: App, engine: Engine) -> None:
    await app.queues.ablock(key="b")
    await app.queues.apause(key="a")
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "mail", 5))
    for key in ("z", "tenant:10", "tenant:9", "\U0001f600", "é"):
        await app.limits.aput(key, at_once=1)
    await app.limits.aput(task=TASK, at_once=1)
    await app.limits.aput(queue="mail", at_once=1)
    names: list[str] = []
    page = await app.limits.alist(limit=3)
    while page:
        names += [rule.name for rule in page]
        page = await app.limits.alist(limit=3, after=page[-1])
    assert names == ["tenant:10", "tenant:9", "z", "é", "\U0001f600", "mail", TASK]


AWKWARD = [
    "a",
    "aa",
    "a\x01",
    "\x01",
    "\x7f",
    "\ue000",
    "\ud7ff\U0010ffff",
    "tenant:7",
    "tenant:70",
    "x" * 512,
]


async def test_one_rule_is_found_among_others_whatever_its_name(engine: Engine) -> None:
    """L5: by a page that begins just before it."""
    for name in AWKWARD:
        await engine.add_rule(Rule(RuleKind.LIMIT, Scope.KEY, name, 1))
        await engine.add_rule(Rule(RuleKind.PAUSE, Scope.TASK_KEY, task_key(TASK, name)))
    for name in AWKWARD:
        limit = await rule_at(engine, RuleKind.LIMIT, Scope.KEY, name)
        pause = await rule_at(engine, RuleKind.PAUSE, Scope.TASK_KEY, task_key(TASK, name))
        assert limit is not None
        assert pause is not None
        assert (limit.name, pause.name) == (name, task_key(TASK, name))
        assert await rule_at(engine, RuleKind.BLOCK, Scope.KEY, name) is None
    assert await rule_at(engine, RuleKind.LIMIT, Scope.KEY, "tenant:8") is None


async def test_where_there_are_many_rules_those_of_one_job_are_looked_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: the answer is the same as where all are read."""
    wanted = [
        Rule(RuleKind.BLOCK, Scope.QUEUE, QUEUE),
        Rule(RuleKind.LIMIT, Scope.KEY, KEY, 3),
        Rule(RuleKind.LIMIT, Scope.TASK, TASK, 4),
        Rule(RuleKind.PAUSE, Scope.TASK_KEY, task_key(TASK, KEY)),
    ]
    others = [Rule(RuleKind.LIMIT, Scope.KEY, f"tenant:{n}", 1) for n in (6, 8, 70)]
    for rule in (*wanted, *others, Rule(RuleKind.CAP, Scope.QUEUE, QUEUE, 9)):
        await engine.add_rule(rule)
    everything = await rules_about(engine, QUEUE, TASK, KEY)
    monkeypatch.setattr(rules, "_PAGE", 5)
    looked_up = await rules_about(engine, QUEUE, TASK, KEY)
    assert sorted(rule.name for rule in everything) == sorted(rule.name for rule in wanted)
    assert looked_up == everything
    assert (await counts(engine)).running == 0


@pytest.mark.parametrize(
    "wrong", [{}, {"key": "k", "task": "t"}, {"task": "t", "queue": "q"}, {"queue": "a b"}, {"key": ""}]
)
async def test_a_limit_is_for_one_key_one_task_or_one_queue(wrong: dict[str, Any]) -> None:
    app = App("memory://")
    with pytest.raises(BadSetting):
        await app.limits.aput(at_once=1, **wrong)
    with pytest.raises(BadSetting):
        await app.limits.aremove(**wrong)


@pytest.mark.parametrize("n", [0, -1, True, 2.5, "3"])
async def test_a_limit_lets_at_least_one_run(n: Any) -> None:
    with pytest.raises(BadSetting, match="Give a whole number from 1; to let none run, pause them"):
        await App("memory://").limits.aput("k", at_once=n)


async def test_what_is_no_term_of_a_limit_is_refused() -> None:
    app = App("memory://")
    terms: Any = {"share": 2}
    with pytest.raises(BadCall, match="has no option share"):
        await app.limits.aput("tenant:7", at_once=3, **terms)
    assert await app.limits.alist() == []


def test_synchronous_code_has_the_same_verbs() -> None:
    app = App("memory://", actor="anna")
    assert app.limits.put("tenant:7", at_once=3) is True
    use = app.limits.get(key="tenant:7")
    assert use is not None
    assert (use.rule.n, use.rule.by, str(use)) == (3, "anna", "key 'tenant:7' runs 0 of 3")
    assert [rule.name for rule in app.limits.list()] == ["tenant:7"]
    assert app.limits.remove("tenant:7") is True
    app.close()

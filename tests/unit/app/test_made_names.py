"""Keys and unique keys that a task makes of the arguments of its calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from enum import Enum
from typing import Any
from uuid import UUID

import pytest

from propolis import App, Depends, Job, cron
from propolis.app.context import Job as Context
from propolis.core.envelope import Envelope
from propolis.errors import BadName, BadSetting, FlowFailed
from propolis.flows import each, start
from propolis.strategies import dead
from propolis.values import Filter, State, UniqueUntil

ID = UUID("0197f3a2-72f0-7c2c-b4cb-03d3abf4949d")


class Plan(Enum):
    FREE = "free"


class Shop:
    """Tasks whose jobs have keys."""

    def __init__(self) -> None:
        self.app = app = App("memory://")
        self.keys: list[str | None] = []

        @app.task(name="export", key="tenant:{tenant}", result_ttl="1h", on_error=dead)
        async def export(job: Job, tenant: Any, report: str = "all") -> str:
            self.keys.append(job.envelope.key)
            return report

        @app.task(name="bill", unique=("customer", "month"))
        async def bill(customer: Any, month: str = "may", note: str = "") -> None: ...

        @app.task(name="both", key="{tenant}/{day}", unique=("day",), unique_until=UniqueUntil.STARTED)
        def both(tenant: str, *, day: date = date(2026, 1, 31)) -> None: ...

        @app.task(name="tenants")
        async def tenants(count: int) -> list[str]:
            return [f"t{number}" for number in range(count)]

        @app.task(name="total", key="for:{name}", result_ttl="1h")
        async def total(job: Job, results: Any, name: str) -> list[str]:
            self.keys.append(job.envelope.key)
            return list(results)

        self.export, self.bill, self.both, self.tenants, self.total = export, bill, both, tenants, total


@pytest.fixture
def shop() -> Shop:
    return Shop()


# --- keys --------------------------------------------------------------------------------


def test_a_key_is_made_of_an_argument_however_that_is_given(shop: Shop) -> None:
    assert shop.export.job("7", "may").key == "tenant:7"
    assert shop.export.job(tenant="7").key == "tenant:7"
    assert shop.export.using(queue="slow").job("8").key == "tenant:8"
    assert shop.both.job("a").key == "a/2026-01-31"  # by default
    assert shop.both.job("a", day=date(2026, 2, 1)).key == "a/2026-02-01"


@pytest.mark.parametrize(
    ("value", "text"),
    [("ä b", "ä b"), (7, "7"), (-1, "-1"), (2.5, "2.5"), (1.0, "1"), (ID, str(ID)), (Plan.FREE, "free")],
)
def test_a_key_has_a_value_as_it_travels(shop: Shop, value: object, text: str) -> None:
    assert shop.export.job(value).key == f"tenant:{text}"


@pytest.mark.parametrize("value", [None, True, [1], {"a": 1}])
def test_what_is_neither_text_nor_a_number_is_refused_at_the_call(shop: Shop, value: object) -> None:
    with pytest.raises(
        BadSetting, match=r"export: no key can be made of tenant=.*using\(key=None\) for none"
    ):
        shop.export.job(value)


def test_what_one_call_says_wins(shop: Shop) -> None:
    assert shop.export.using(key="vip").job("7").key == "vip"
    assert shop.export.using(key=None).job(None).key is None
    both = shop.both.using(key=None).job("a")
    assert (both.key, both.unique) == (None, 'both ["2026-01-31"]')
    assert shop.both.using(unique=None).job("a").unique is None


def test_a_key_is_bounded_as_all_keys_are(shop: Shop) -> None:
    assert len(shop.export.job("x" * 505).key or "") == 512
    with pytest.raises(BadName, match="cannot be a key: 1 to 512 characters"):
        shop.export.job("x" * 506)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": "t:{tenent}"}, "key= names 'tenent', which is no parameter of it: it has tenant, more"),
        ({"unique": ("tenent",)}, "unique= names 'tenent', which is no parameter"),
        ({"key": "t:{others}"}, "which is no parameter"),
        ({"key": "t:{tenant.id}"}, "cannot be the name of a place"),
        ({"key": "t:{}"}, "cannot be the name of a place"),
        ({"key": "t:{tenant:any}"}, "write the name of a parameter into braces"),
        ({"key": "t:{tenant"}, "a brace"),
        ({"key": ""}, "write the name of a parameter into braces"),
        ({"key": 7}, "is no text"),
        ({"unique": "tenant"}, "give the names of parameters as a tuple"),
        ({"unique": (7,)}, "give the names of parameters as a tuple"),
    ],
)
def test_what_names_no_parameter_is_refused_at_the_declaration(options: Any, words: str) -> None:
    app = App("memory://")
    with pytest.raises(BadSetting) as caught:

        @app.task(name="t", **options)
        async def t(tenant: str, more: int = 0, *others: str) -> None: ...

    assert words in str(caught.value)
    assert app.tasks == {}


def test_what_the_worker_gives_is_in_no_key() -> None:
    app = App("memory://")

    @app.task(name="t", key="{job}")
    async def t(job: Context, n: int) -> None: ...

    @app.task(name="u", unique=("tenant",))
    async def u(tenant: str = Depends(lambda: "x")) -> None: ...  # type: ignore[assignment]  # a marker

    wrong: list[Callable[[], object]] = [t.check, u.check, lambda: t.job(1), u.job]
    for each_one in wrong:
        with pytest.raises(BadSetting, match="is given by the worker, and no call has it"):
            each_one()


def test_jobs_of_many_of_batches_and_of_schedules_have_their_keys(shop: Shop) -> None:
    many = shop.export.many([("a", "may"), "b"])
    assert [job.key for job in many] == ["tenant:a", "tenant:b"]
    assert [job.key for job in shop.export.using(priority=1).many(iter("ab"))] == ["tenant:a", "tenant:b"]
    app = shop.app
    batch = app.batch(shop.export.many("ab"), callback=shop.total.job(results=(), name="x")).enqueue()
    keys = {info.key for info in app.jobs.find(Filter(batch=batch.id))}
    assert keys == {"tenant:a", "tenant:b"}
    app.schedules.put("nightly", cron("@daily"), shop.export, "c")
    stored = app.schedules.get("nightly")
    assert stored is not None
    assert stored.schedule.job.key == "tenant:c"
    app.close()


async def test_what_a_job_emits_and_its_next_turn_have_their_keys(shop: Shop) -> None:
    keys: list[str | None] = []

    @shop.app.task(name="again", key="chain:{n}")
    async def again(job: Job, n: int) -> None:
        keys.append(job.envelope.key)
        if len(keys) == 1:
            job.emit(shop.export, "emitted")
            job.again(after="1s")

    async with shop.app.test() as t:
        await again.aenqueue(5)
        await t.advance("5s")
    assert keys == ["chain:5", "chain:5"]
    assert shop.keys == ["tenant:emitted"]


def test_a_command_makes_keys_of_its_places() -> None:
    app = App("memory://")
    resize = app.command("resize", ["convert", "{source}"], key="file:{source}", unique=("source",))
    job = resize.job(source="a.png")
    assert (job.key, job.unique) == ("file:a.png", 'resize ["a.png"]')
    with pytest.raises(BadSetting, match="which is no parameter of it: it has _job, source"):
        app.command("shrink", ["convert", "{source}"], key="file:{target}")


async def test_a_step_makes_its_key_of_the_result_before_it(shop: Shop) -> None:
    async with shop.app.test() as t:
        run = await (shop.tenants.step(2) | each(shop.export.step())).aenqueue()
        await t.drain()
        assert sorted(map(str, shop.keys)) == ["tenant:t0", "tenant:t1"]
        assert await run.aresult(timeout="1s") == ["all", "all"]
        shop.keys.clear()
        run = await (start([7, 8]) | each(shop.export.step()) | shop.total.step("x")).aenqueue()
        await t.drain()
        assert await run.aresult(timeout="1s") == ["all", "all"]
        assert sorted(map(str, shop.keys)) == ["for:x", "tenant:7", "tenant:8"]


async def test_the_header_of_a_step_does_not_travel(shop: Shop) -> None:
    await (start([7]) | each(shop.export.step())).aenqueue()
    [info] = await shop.app.jobs.afind()
    assert info.key == "tenant:7"
    job = await shop.app.jobs.aget(info.id)
    assert job is not None
    assert b"propolis-key" not in bytes(job.body)


async def test_a_flow_whose_result_makes_no_key_fails(shop: Shop) -> None:
    async with shop.app.test() as t:
        run = await (shop.tenants.step(2) | shop.export.step()).aenqueue()  # a list is no key
        await t.drain()
        with pytest.raises(FlowFailed):
            await run.aresult(timeout="1s")
    with pytest.raises(BadSetting, match="no key can be made of"):
        await (start([1, None]) | each(shop.export.step())).aenqueue()


def test_what_a_flow_could_not_make_is_refused_when_it_is_composed(shop: Shop) -> None:
    later: Any = shop.bill.step("may")
    with pytest.raises(BadSetting, match=r"which only the step before it knows: .*bill\.using\(unique=…\)"):
        shop.tenants.step(1) | later
    gathering: Any = shop.export.step()
    with pytest.raises(BadSetting, match=r"the list of all results before it: say export\.using\(key=…\)"):
        (start([1]) | each(shop.tenants.step()) | gathering).enqueue()
    free: Any = shop.bill.using(unique=None).step("may")
    assert shop.tenants.step(1) | free


# --- unique keys -------------------------------------------------------------------------


def test_a_unique_key_is_made_of_the_arguments_that_are_named(shop: Shop) -> None:
    assert shop.bill.job("ann", "may").unique == 'bill ["ann","may"]'
    assert shop.bill.job(customer="ann", note="x").unique == 'bill ["ann","may"]'
    assert shop.bill.job("ann", "june").unique == 'bill ["ann","june"]'
    assert shop.bill.using(unique=("customer",)).job("ann").unique == 'bill ["ann"]'
    assert shop.bill.using(unique=()).job("ann").unique == "bill []"
    assert shop.export.using(unique=("report",)).job(1).unique == 'export ["all"]'
    assert shop.bill.using(unique="mine").job("ann").unique == "mine"


def test_equal_values_make_one_key_however_they_are_written(shop: Shop) -> None:
    one, other = {"b": 1.0, "a": None}, {"a": None, "b": 1}
    assert shop.bill.job(one).unique == shop.bill.job(other).unique == 'bill [{"a":null,"b":1},"may"]'
    assert shop.bill.job("1").unique != shop.bill.job(1).unique


def test_a_long_unique_key_is_a_hash_of_its_arguments(shop: Shop) -> None:
    long, other = shop.bill.job("x" * 5000).unique, shop.bill.job("x" * 4999 + "y").unique
    assert long is not None
    assert other is not None
    assert long.startswith("bill sha256:")
    assert len(long) == len("bill sha256:") + 64
    assert long != other
    assert shop.bill.job("x" * 5000).unique == long


def test_until_when_it_is_held_is_declared_as_well(shop: Shop) -> None:
    assert shop.both.job("a").unique_until is UniqueUntil.STARTED
    assert shop.both.using(unique="k").job("a").unique_until is UniqueUntil.STARTED
    assert shop.both.using(unique_until=UniqueUntil.ENDED).job("a").unique_until is UniqueUntil.ENDED
    assert shop.bill.job("a").unique_until is UniqueUntil.ENDED


async def test_a_second_job_of_these_arguments_is_the_first_one_until_that_has_ended(shop: Shop) -> None:
    first = await shop.bill.aenqueue("ann", "may")
    second = await shop.bill.aenqueue("ann", month="may", note="again")
    third = await shop.bill.aenqueue("bob", "may")
    assert (second.created, second.id, third.created) == (False, first.id, True)
    handles = await shop.bill.many([("ann", "may"), ("cid", "may"), ("cid", "may")]).aenqueue()
    assert [handle.created for handle in handles] == [False, True, False]
    await shop.app.jobs.acancel(first.id)
    assert (await shop.bill.aenqueue("ann", "may")).created
    states = {info.state for info in await shop.app.jobs.afind(Filter(task="bill"))}
    assert states == {State.READY, State.CANCELLED}


# --- what it costs -----------------------------------------------------------------------


def test_a_task_that_makes_no_names_has_nothing_to_do_for_it(shop: Shop) -> None:
    assert shop.tenants.made_names is None
    assert shop.tenants.using(priority=3)._names is None
    assert shop.tenants.using(key="k")._names is None
    assert shop.export.using(priority=3)._names is shop.export.made_names  # compiled once
    job = shop.tenants.job(1)
    assert (job.key, job.unique, isinstance(job, Envelope)) == (None, None, True)

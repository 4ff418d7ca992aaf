"""`on_conflict="refuse"`: a call whose unique key is held, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from propolis import App
from propolis.core.protocols import Engine
from propolis.errors import BadSetting, DuplicateJob
from propolis.testing.engines.steps import counts


def bill_of(app: App) -> Any:
    @app.task(name="bill", unique=("customer",))
    async def bill(customer: str, month: str) -> None: ...

    return bill


async def test_a_call_is_refused_with_the_job_that_is_there(app: App, engine: Engine) -> None:
    bill = bill_of(app)
    refusing = bill.using(on_conflict="refuse")
    first = await refusing.aenqueue("ann", "may")
    with pytest.raises(DuplicateJob) as refused:
        await refusing.aenqueue("ann", "june")
    assert (refused.value.job_id, refused.value.unique) == (first.id, 'bill ["ann"]')
    kept = await bill.using(on_conflict="keep").aenqueue("ann", "june")
    assert (kept.id, kept.created) == (first.id, False)
    assert (await refusing.aenqueue("bob", "may")).created
    assert (await counts(engine)).put == 2
    await app.jobs.acancel(first.id)
    assert (await refusing.aenqueue("ann", "june")).created


async def test_a_put_of_a_chosen_id_may_be_repeated_and_is_no_conflict(app: App, engine: Engine) -> None:
    call = bill_of(app).using(on_conflict="refuse", job_id="bill-1")
    assert (await call.aenqueue("ann", "may")).created
    again = await call.aenqueue("ann", "may")
    assert (again.id, again.created) == ("bill-1", False)


def test_among_many_nothing_could_be_refused_alone() -> None:
    bill = bill_of(App("memory://"))
    refusing = bill.using(on_conflict="refuse")
    wrong: list[Callable[[], object]] = [
        lambda: refusing.many([("a", "b")]),
        lambda: refusing.job("a", "b"),
        lambda: refusing.step(),
    ]
    for call in wrong:
        with pytest.raises(BadSetting, match="on_conflict="):
            call()
    with pytest.raises(BadSetting, match='write "keep" or "refuse"'):
        bill.using(on_conflict="replace")


def test_without_a_unique_key_there_is_no_conflict_to_refuse() -> None:
    app = App("memory://")

    @app.task
    def send() -> None: ...

    with pytest.raises(BadSetting, match="Give unique= as well"):
        send.using(on_conflict="refuse").enqueue()
    send.using(on_conflict="refuse", unique="one").enqueue()
    app.close()


def test_synchronous_code_is_refused_as_well() -> None:
    app = App("memory://")
    refusing = bill_of(app).using(on_conflict="refuse")
    first = refusing.enqueue("ann", "may")
    with pytest.raises(DuplicateJob, match=f"bill: job {first.id} with the unique key"):
        refusing.enqueue("ann", "june")
    app.close()

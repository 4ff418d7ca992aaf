"""Waiting: a hint wakes those who wait, and one that is lost costs them only their patience.

These are the only tests in which time passes: the patience of `wait` is the waiter's own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from propolis.core.job import Dead, Done, Lease, Outcome, Released, Retried
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import Another, a_dead_job, order, put_one, settle_one, take, take_one

LONG = 60.0
SHORT = 0.01
ROUNDS = 200

Nudge = Callable[[], Awaitable[object]]


async def woken_by(nudge: Nudge, engine: Engine, queues: list[str]) -> bool:
    """Whether one who found nothing to lease, and waits, returns early.

    A hint may be lost, for example while the waiter is still on its way, so it is given again and again.
    """
    assert await engine.lease(dict.fromkeys(queues, 1), span=SPAN, holder=HOLDER) == []
    waiter = asyncio.create_task(engine.wait(queues, LONG))
    for _ in range(ROUNDS):
        await nudge()
        await asyncio.wait({waiter}, timeout=0.05)
        if waiter.done():
            return waiter.result()
    waiter.cancel()
    return False


def settling(engine: Engine, lease: Lease, outcome: Outcome) -> Nudge:
    """Settle the lease, and lease and settle its job again each time."""
    held = [lease]

    async def nudge() -> None:
        await settle_one(engine, held.pop() if held else await take_one(engine), outcome)

    return nudge


class WaitingPromise:
    async def test_a_put_by_another_handle_ends_the_wait(self, engine: Engine, another: Another) -> None:
        """L1."""
        other = await another()

        assert await woken_by(lambda: other.put([a_job()]), engine, ["mail", "default"])

    async def test_a_put_by_the_same_handle_ends_the_wait(self, engine: Engine) -> None:
        """L1."""
        assert await woken_by(lambda: engine.put([a_job()]), engine, ["default"])

    @pytest.mark.parametrize("outcome", [Released(), Retried()], ids=["release", "retry"])
    async def test_a_job_that_comes_back_ends_the_wait(
        self, engine: Engine, another: Another, outcome: Outcome
    ) -> None:
        """T5, T7, L1."""
        other = await another()
        await put_one(engine)
        lease = await take_one(other)

        assert await woken_by(settling(other, lease, outcome), engine, ["default"])

    async def test_an_emission_ends_the_wait(self, engine: Engine, another: Another) -> None:
        """T4, L1."""
        other = await another()

        async def nudge() -> None:
            await put_one(other)
            await settle_one(other, await take_one(other), Done(emit=(a_job(queue="next"),)))

        assert await woken_by(nudge, engine, ["next"])

    async def test_a_resumed_queue_ends_the_wait(self, engine: Engine, another: Another) -> None:
        """L1."""
        other = await another()
        rule = Rule(RuleKind.PAUSE, Scope.QUEUE, "default")
        await other.add_rule(rule)
        await put_one(other)

        async def nudge() -> None:
            await other.add_rule(rule)
            await other.remove_rule(rule.kind, rule.scope, rule.name)

        assert await woken_by(nudge, engine, ["default"])

    async def test_a_replay_ends_the_wait(self, engine: Engine, another: Another) -> None:
        """T13, L1."""
        other = await another()
        job = await a_dead_job(other)

        async def nudge() -> None:
            for lease in await take(other):
                await settle_one(other, lease, Dead())
            await other.replay([job.id])

        assert await woken_by(nudge, engine, ["default"])

    async def test_everyone_who_waits_is_woken(self, engine: Engine, another: Another) -> None:
        """L1: two waiters on one handle do not steal each other's hints."""
        other = await another()
        waiters = [asyncio.create_task(engine.wait(["default"], LONG)) for _ in range(3)]

        for _ in range(ROUNDS):
            await other.put([a_job()])
            _, asleep = await asyncio.wait(waiters, timeout=0.05)
            if not asleep:
                break

        assert [waiter.done() and waiter.result() for waiter in waiters] == [True, True, True]

    async def test_one_who_waits_in_vain_is_told_so(self, engine: Engine) -> None:
        """L1."""
        assert await engine.wait(["default"], SHORT) is False
        assert await engine.wait(["default"], 0) is False
        assert await engine.wait([], SHORT) is False

    async def test_a_lost_hint_loses_no_job(self, engine: Engine, another: Another) -> None:
        """L1: the storage is the truth."""
        other = await another()
        job = await put_one(other)  # while nobody was waiting

        await engine.wait(["default"], SHORT)

        assert await order(engine) == [job.id]

    async def test_one_who_no_longer_wants_to_wait_leaves_no_trace(
        self, engine: Engine, another: Another
    ) -> None:
        """L4."""
        other = await another()
        waiter = asyncio.create_task(engine.wait(["default"], LONG))
        await asyncio.wait({waiter}, timeout=SHORT)
        waiter.cancel()
        await asyncio.wait({waiter})

        job = await put_one(other)

        assert waiter.cancelled()
        assert await order(engine) == [job.id]

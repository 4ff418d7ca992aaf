"""Hints of our own engines are lost only where a connection is."""

from __future__ import annotations

from datetime import timedelta

import pytest

from propolis.core.job import Done
from propolis.core.protocols import Engine, Remote, Rule, RuleKind, Scope
from propolis.testing.engines.samples import a_job
from propolis.testing.engines.steps import put_one, settle_one, take, take_one

PATIENCE = 10.0


async def test_a_look_into_one_queue_takes_no_hint_for_another(handles: list[Engine]) -> None:
    """L1: a worker looks into its lanes one after the other, and may settle without a look."""
    engine = handles[0]
    while await engine.wait(["mail", "busy"], 0.1):  # until it listens, and has nothing more to hear
        assert await take(engine, "mail") == await take(engine, "busy") == []
    for putting in handles:
        await put_one(engine, queue="busy")
        lease = await take_one(engine, "busy")
        assert await take(engine, "mail") == []
        await put_one(putting, queue="mail")
        assert await putting.wait(["mail"], PATIENCE)  # as others hear it too
        await settle_one(engine, lease, Done())
        assert await take(engine, "busy") == []
        assert await engine.wait(["mail", "busy"], PATIENCE)
        assert len(await take(engine, "mail")) == 1


@pytest.mark.parametrize("scope", [Scope.KEY, Scope.QUEUE])
async def test_whom_a_limit_keeps_back_is_looked_for_again_soon(handles: list[Engine], scope: Scope) -> None:
    """L1: the run that makes room may end in another queue, or by somebody who leases nothing more."""
    engine, other = handles
    there = "mail" if scope is Scope.KEY else "busy"
    await engine.add_rule(Rule(RuleKind.LIMIT, scope, "busy", 1))
    await engine.put([a_job(queue="busy", key="busy"), a_job(queue=there, key="busy")])
    while not (leases := await take(other, "busy")):
        pass  # shards share a limit out when they know of it
    while await engine.wait([there], 0.1):  # until it listens, and has nothing more to hear
        assert await take(engine, there) == []
    assert await take(engine, there) == []
    assert await take(engine, "another-lane") == []
    await settle_one(other, leases[0], Done())
    assert not engine.hears or await engine.wait([there], PATIENCE)
    assert len(await take(engine, there)) == 1


@pytest.mark.parametrize("scope", [Scope.KEY, Scope.QUEUE])
async def test_those_who_wait_hear_when_a_rule_is_over(handles: list[Engine], scope: Scope) -> None:
    """L1: also where nobody sweeps; who polls a file sweeps by itself, and then hears of it."""
    engine, other = handles
    while await engine.wait(["mail"], 0.1):  # until it listens, and has nothing more to hear
        assert await take(engine, "mail") == []
    await other.add_rule(Rule(RuleKind.PAUSE, scope, "mail", lasts=timedelta(seconds=1)))
    await put_one(other, queue="mail", key="mail")

    while not (leases := await take(engine, "mail")):
        left = None if isinstance(engine, Remote) else (await engine.sweep()).next_in
        assert await engine.wait(["mail"], PATIENCE if left is None else left.total_seconds()) or left

    assert len(leases) == 1

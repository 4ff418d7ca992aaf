"""The model of the contract, and what the machine tells of a difference."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
from msgspec.structs import replace

from propolis.core.batch import Batch, BatchState
from propolis.core.clock import to_us
from propolis.core.job import Dead, Done, Lease, Outcome, Released, Retried, State
from propolis.core.protocols import Engine, Rule, RuleKind, Scope
from propolis.engines.memory import MemoryEngine
from propolis.engines.sqlite.engine import SQLiteEngine
from propolis.errors import BatchSealed, QueueFull
from propolis.testing.clock import FakeClock
from propolis.testing.engines.machine import Difference, EngineMachine, check_engine
from propolis.testing.engines.model import entries as entries_file
from propolis.testing.engines.model import limits as limits_file
from propolis.testing.engines.model import model as model_file
from propolis.testing.engines.model.entries import Refused
from propolis.testing.engines.model.model import Model
from propolis.testing.engines.mutants.order import LastInFirstOut
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.small_world import QUEUES, SHORT, TASKS, Draft


@pytest.fixture
def model() -> Model:
    return Model(FakeClock())


def lease(model: Model, limit: int = 10) -> list[Lease]:
    """With fences as an engine would give them."""
    last = {entry.job.id: entry.fence for entry in model.jobs}
    leases = model.lease({"default": limit}, span=SPAN, holder=HOLDER)
    fenced = [replace(lease, fence=max(last[lease.id] + 1, to_us(model.now))) for lease in leases]
    assert model.learn(fenced)
    return fenced


def line(model: Model) -> list[str]:
    return [lease.id for lease in model.lease({"default": 10}, span=SPAN, holder=HOLDER)]


@pytest.mark.parametrize("module", [model_file, entries_file, limits_file])
def test_the_model_shares_no_code_with_the_engines(module: ModuleType) -> None:
    source = ast.parse(Path(module.__file__ or "").read_text("utf-8"))
    imported = [node.module or "" for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]

    decisions = ("propolis.core.transitions", "propolis.core.limits", "propolis.engines")
    assert [module for module in imported if module.startswith(decisions)] == []


def test_jobs_are_leased_by_priority_and_then_in_the_order_of_their_puts(model: Model) -> None:
    model.put([a_job(id="a"), a_job(id="b"), a_job(id="low", priority=-1), a_job(id="high", priority=1)])

    assert line(model) == ["high", "a", "b", "low"]


@pytest.mark.parametrize(
    ("outcome", "expected"), [(Retried(), ["c", "a", "b"]), (Released(), ["a", "b", "c"])]
)
def test_a_retry_goes_to_the_back_and_a_release_to_the_front(
    model: Model, outcome: Outcome, expected: list[str]
) -> None:
    model.put([a_job(id="a"), a_job(id="b"), a_job(id="c")])
    model.settle([(lease, outcome) for lease in lease(model, limit=2)])

    assert line(model) == expected


def test_a_job_that_becomes_due_joins_the_back_when_somebody_leases(model: Model) -> None:
    model.put([a_job(id="late", delay_ms=2000), a_job(id="early", delay_ms=1000)])
    model.clock.advance("2s")
    model.put([a_job(id="new")])

    assert model.position("early") == 1
    assert line(model) == ["new", "early", "late"]


def test_a_lost_lease_counts_as_a_loss_and_settles_nothing(model: Model) -> None:
    model.put([a_job(id="a")])
    [first] = lease(model)
    model.clock.advance(SPAN)
    model.sweep()
    lease(model)

    assert model.settle([(first, Done())]) == [first]
    [info] = model.infos()
    assert (info.state, info.attempts, info.losses) == (State.RUNNING, 2, 1)


def test_a_fence_that_has_not_grown_is_told(model: Model) -> None:
    model.put([a_job(id="a")])
    [first] = lease(model)
    model.settle([(first, Released())])
    [second] = model.lease({"default": 1}, span=SPAN, holder=HOLDER)

    assert not model.learn([replace(second, fence=first.fence)])


def test_a_refusal_names_every_error_that_would_be_right(model: Model) -> None:
    model.put_batch(Batch(id="batch"), [a_job(batch="batch")])
    model.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    with pytest.raises(Refused) as refused:
        model.put([a_job(batch="batch")])

    assert refused.value.reasons == {BatchSealed, QueueFull}
    assert len(model.jobs) == 1


def test_a_batch_puts_its_callbacks_when_its_members_end(model: Model) -> None:
    batch = Batch(id="batch", on_failed=a_job(id="failed"), on_finished=a_job(id="finished"))
    model.put_batch(batch, [a_job(batch="batch"), a_job(batch="batch")])
    one, two = lease(model)

    model.settle([(one, Dead())])
    assert model.entry("failed") is not None
    assert model.entry("finished") is None

    model.settle([(two, Done())])
    assert model.entry("finished") is not None
    assert [status.state for status in model.batches()] == [BatchState.PARTIAL_SUCCESS]


def last_in_first_out(clock: FakeClock) -> Engine:
    return cast(Engine, LastInFirstOut(MemoryEngine(clock=clock), clock))


def test_a_difference_tells_what_differs_and_the_calls_that_show_it() -> None:
    with pytest.raises(Difference) as difference:
        check_engine(last_in_first_out, examples=8)

    text = str(difference.value)
    assert "the answer to lease must be\n    [Lease(" in text
    assert "    put([Envelope(id='job-1', task='tests.add'" in text
    assert text.splitlines()[-1].startswith("    lease(")


def test_a_seed_repeats_the_same_lives() -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(Difference) as difference:
            check_engine(last_in_first_out, examples=8, seed=7, shrink=False)
        texts.append(str(difference.value))

    assert texts[0] == texts[1]


def test_a_job_that_comes_back_held_and_expired_may_wait_for_the_next_sweep(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whether a lease ends it that takes nothing from its queue, the contract does not say."""
    machine = EngineMachine(lambda clock: SQLiteEngine(tmp_path / "jobs.db", clock=clock))
    request.addfinalizer(machine.teardown)
    queue = QUEUES[0]
    machine.put([Draft(queue, TASKS[0], 0, {}, {"expires_in_ms": 5_000})], None)
    machine.lease({queue: 1}, 2 * SHORT, None, ())
    machine.add_rule(Rule(RuleKind.PAUSE, Scope.QUEUE, queue), keep=True)
    machine.clock.advance(SHORT)

    machine.exchange([(0, Released())], {queue: 1}, SHORT, None, ())

    machine.same()

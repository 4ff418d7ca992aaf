"""Flows as users write them, on the real worker."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies
from msgspec import Struct

from propolis import App, Job
from propolis.app.flow import FlowRun, shape
from propolis.app.flow.run import StepStatus
from propolis.app.loading import load_app
from propolis.app.registry import Registry
from propolis.errors import BadSetting, FlowBroken, FlowFailed, UnknownFlow, WaitsForever
from propolis.flows import Flow, FlowState, FlowStatus, each, fork, start
from propolis.strategies import dead, fixed, repeat
from propolis.values import State
from propolis.worker import Mode, Settings, Worker


class Mill:
    """An app whose steps count their runs."""

    def __init__(self) -> None:
        self.app = app = App("memory://")
        self.runs: Counter[str] = Counter()

        @app.task(name="numbers")
        async def numbers(count: int) -> list[int]:
            self.runs["numbers"] += 1
            return list(range(count))

        @app.task(name="square", on_error=repeat(1, fixed("1m")).then(dead))
        async def square(n: int, plus: int = 0) -> int:
            self.runs["square"] += 1
            if n == 13:
                raise ValueError("bad luck")
            return n * n + plus

        @app.task(name="half", on_error=dead)
        def half(n: int) -> float:
            self.runs["half"] += 1
            return n / 2

        @app.task(name="text")
        async def text(n: Any) -> str:
            self.runs["text"] += 1
            return str(n)

        @app.task(name="total")
        async def total(ns: list[int]) -> int:
            self.runs["total"] += 1
            return sum(ns)

        @app.task(name="parts")
        async def parts(ns: list[int | None]) -> list[int | None]:
            self.runs["parts"] += 1
            return ns

        @app.task(name="pair", on_error=dead)
        async def pair(two: tuple[int, str]) -> str:
            return f"{two[0]} and {two[1]!r}"

        self.numbers, self.square, self.half, self.text = numbers, square, half, text
        self.total = total
        self.parts: Any = parts  # takes what mypy would not let it have
        self.pair: Any = pair


@pytest.fixture
def mill() -> Mill:
    return Mill()


def untyped(flow: Flow[Any, Any]) -> Any:
    """What mypy would not let pass."""
    return flow


async def status_of(run: FlowRun[Any]) -> FlowStatus:
    status = await run.astatus()
    assert status is not None
    return status


# --- what flows do -----------------------------------------------------------------------


async def test_each_step_of_a_chain_gets_what_the_one_before_returned(mill: Mill) -> None:
    """S0.43: with arguments of its own besides."""
    async with mill.app.test() as t:
        run = await (mill.square.step(3) | mill.square.step(plus=1) | mill.text.step()).aenqueue()
        assert await t.drain() == 3
        assert await run.aresult("1s") == "82"
        assert (await status_of(run)).state is FlowState.SUCCESS


async def test_results_are_reduced_in_the_order_of_the_elements(mill: Mill) -> None:
    """S0.40: no table, no polling, and nothing is left behind but the batches, while they are kept."""
    async with mill.app.test() as t:
        run = await (mill.numbers.step(5) | each(mill.square.step()) | mill.parts.step()).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == [0, 1, 4, 9, 16]
        assert mill.runs == {"numbers": 1, "square": 5, "parts": 1}
        assert await mill.app.jobs.afind() == []
        await t.advance("8d")
        assert await mill.app.batches.afind() == []
        with pytest.raises(UnknownFlow):
            await run.aresult("1s")


async def test_a_chain_may_run_once_for_each_element(mill: Mill) -> None:
    async with mill.app.test() as t:
        chain = mill.square.step() | mill.square.step(plus=1) | mill.text.step()
        run = await (mill.numbers.step(3) | each(chain)).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == ["1", "2", "17"]


async def test_nothing_to_do_for_each_is_an_empty_list(mill: Mill) -> None:
    async with mill.app.test() as t:
        run = await (mill.numbers.step(0) | each(mill.square.step()) | mill.total.step()).aenqueue()
        ends = await (mill.numbers.step(0) | each(mill.square.step())).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == 0
        assert await ends.aresult("1s") == []
        assert (await status_of(ends)).state is FlowState.SUCCESS


async def test_branches_get_the_same_and_are_joined(mill: Mill) -> None:
    async with mill.app.test() as t:
        branches = fork(mill.square.step(), mill.half.step() | mill.text.step())
        run = await (mill.square.step(3) | branches | mill.pair.step()).aenqueue()
        last = await (mill.square.step(3) | branches).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == "81 and '4.5'"
        assert await last.aresult("1s") == (81, "4.5")


async def test_a_flow_may_begin_with_a_value(mill: Mill) -> None:
    async with mill.app.test() as t:
        mapped = await (start([3, 4]) | each(mill.square.step()) | mill.total.step()).aenqueue()
        forked = await (start(4) | fork(mill.square.step(), mill.text.step()) | mill.pair.step()).aenqueue()
        chained = await (start(2) | mill.square.step() | mill.text.step()).aenqueue()
        none = await (start([]) | each(mill.square.step()) | mill.total.step()).aenqueue()
        await t.drain()
        assert await mapped.aresult("1s") == 25
        assert await forked.aresult("1s") == "16 and '4'"
        assert await chained.aresult("1s") == "4"
        assert await none.aresult("1s") == 0
        assert [step.name for step in (await status_of(chained)).steps] == ["[given]", "square", "text"]


async def test_fan_outs_follow_one_another(mill: Mill) -> None:
    """Each in a batch around the one before it."""
    async with mill.app.test() as t:
        flow = mill.numbers.step(3) | each(mill.square.step()) | mill.total.step() | mill.numbers.step()
        run = await (flow | each(mill.square.step(plus=1)) | mill.parts.step() | mill.total.step()).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == sum(n * n + 1 for n in range(5))
        assert {step.name: step.total for step in (await status_of(run)).steps} == {
            "numbers": 1,
            "each ( square )": 5,
            "total": 1,
            "parts": 1,
        }


async def test_steps_have_circumstances_of_their_own(mill: Mill) -> None:
    async with mill.app.test() as t:
        later = mill.text.using(queue="slow", delay="1h")
        run = await (mill.square.step(3) | later.step()).aenqueue()
        await t.advance("59m")
        assert (await status_of(run)).state is FlowState.IN_PROGRESS
        await t.advance("1m")
        assert await run.aresult("1s") == "9"
        t.assert_enqueued(mill.text, queue="slow", delay="1h")


def test_flows_from_plain_code(mill: Mill) -> None:
    with mill.app.test() as t:
        run = (mill.numbers.step(4) | each(mill.square.step()) | mill.total.step()).enqueue()
        t.drain()
        assert run.result(timeout="1s") == 14
        status = run.status()
        assert status is not None
        assert status.state is FlowState.SUCCESS
        assert not run.cancel()
        assert run.delete()
        assert not run.delete()
    assert repr(run) == f"<FlowRun {run.id}>"


async def test_a_flow_with_a_chosen_id_is_started_once(mill: Mill) -> None:
    """I1."""
    flow = mill.numbers.step(3) | each(mill.square.step()) | mill.total.step()
    async with mill.app.test() as t:
        for _ in range(2):
            await flow.aenqueue(flow_id="nightly")
        await t.drain()
        run = await flow.aenqueue(flow_id="nightly")
        await t.drain()
        assert await run.aresult("1s") == 5
        assert await mill.app.flow("nightly").aresult("1s") == 5
    assert mill.runs == {"numbers": 1, "square": 3, "total": 1}


async def test_steps_run_in_threads_and_in_processes(isolated: Registry) -> None:
    tasks: Any = isolated.tasks
    flow = tasks["spread"].step(3) | each(tasks["double_apart"].step()) | tasks["add_apart"].step(100)
    run = await flow.aenqueue()
    await Worker(isolated, Settings(mode=Mode.UNTIL_EMPTY)).run()
    assert await run.aresult("1s") == 106


@pytest.fixture
def isolated(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return load_app("isolated_flow:app")


# --- when something dies -----------------------------------------------------------------


async def test_a_dead_step_ends_its_chain(mill: Mill) -> None:
    """S0.41: never a hang."""
    async with mill.app.test() as t:
        run = await (mill.square.step(13) | mill.text.step()).aenqueue()
        await t.advance("1h")
        status = await status_of(run)
        assert (status.state, [str(step) for step in status.steps]) == (FlowState.DEAD, ["dead", "not yet"])
        with pytest.raises(FlowFailed, match="square") as failure:
            await run.aresult("1s")
        assert (failure.value.flow, failure.value.state) == (run.id, "dead")


async def test_a_dead_element_ends_the_flow_when_all_have_ended(mill: Mill) -> None:
    """S0.41: the step that would have gathered says why."""
    async with mill.app.test() as t:
        run = await (mill.numbers.step(15) | each(mill.square.step()) | mill.total.step()).aenqueue()
        ends = await (mill.numbers.step(15) | each(mill.square.step())).aenqueue()
        await t.advance("1h")
        assert [(await status_of(one)).state for one in (run, ends)] == [FlowState.DEAD] * 2
        [record] = t.jobs(task=mill.total)
        assert record.state is State.DEAD
        assert record.error is not None
        assert "1 of 15 before it did not succeed: job" in record.error.message
        for one in (run, ends):
            with pytest.raises(FlowFailed, match=r"each \( square \) \(15: 14 done, 1 dead\)"):
                await one.aresult("1s")
    assert mill.runs["total"] == 0


async def test_where_a_part_is_enough_the_dead_element_is_none(mill: Mill) -> None:
    """S0.41, S3.6: and its flow is a partial success."""
    inner = mill.square.step() | mill.square.step()
    async with mill.app.test() as t:
        flow = mill.numbers.step(15) | each(inner, partial=True)
        run = await (flow | mill.parts.step()).aenqueue()
        ends = await flow.aenqueue()
        twice = await (flow | mill.parts.step() | each(mill.text.step()) | mill.parts.step()).aenqueue()
        await t.advance("1h")
        expected = [n**4 if n != 13 else None for n in range(15)]
        assert await run.aresult("1s") == await ends.aresult("1s") == expected
        states = [(await status_of(one)).state for one in (run, ends, twice)]
        assert states == [FlowState.PARTIAL_SUCCESS, FlowState.PARTIAL_SUCCESS, FlowState.DEAD]
        [shown] = [step for step in (await status_of(run)).steps if step.fan]
        assert str(shown) == "29: 28 done, 1 dead"


async def test_a_part_is_not_enough_if_there_was_nothing_to_spread(mill: Mill) -> None:
    """The step before the fan-out is dead: there is no part at all."""
    async with mill.app.test() as t:
        flow = mill.square.step(13) | fork(mill.square.step(), mill.text.step(), partial=True)
        run = await flow.aenqueue()
        other = await (flow | mill.pair.step()).aenqueue()
        await t.advance("1h")
        assert (await status_of(run)).state is FlowState.DEAD
        assert (await status_of(other)).state is FlowState.DEAD


async def test_a_branch_that_died_is_none_where_a_part_is_enough(mill: Mill) -> None:
    async with mill.app.test() as t:
        branches = fork(mill.square.step(), mill.text.step(), partial=True)
        run = await (start(13) | branches).aenqueue()
        await t.advance("1h")
        assert await run.aresult("1s") == (None, "13")


async def test_a_result_that_fits_nowhere_is_dead_with_its_reason(mill: Mill) -> None:
    app = mill.app

    @app.task(on_error=dead)
    async def large() -> str:
        return "x" * 300_000

    @app.task(on_error=dead)
    async def strange() -> object:
        return object()

    async with app.test() as t:
        flows = {
            large.step() | mill.text.step(): "cannot be handed on: the size of the job",
            strange.step() | mill.text.step(): "cannot be kept: object has no JSON form",
            mill.square.step(1) | untyped(each(mill.text.step())): "has returned no list, and each",
        }
        runs = {await flow.aenqueue(): why for flow, why in flows.items()}
        wrong = await (mill.numbers.step(2) | each(mill.text.step()) | mill.pair.step()).aenqueue()
        await t.drain()
        errors = [record.error.message for record in t.jobs(state=State.DEAD) if record.error]
        for run, why in runs.items():
            assert (await status_of(run)).state is FlowState.DEAD
            assert [error for error in errors if why in error]
        assert (await status_of(wrong)).state is FlowState.DEAD
        [broken] = t.jobs(task=mill.pair)
        assert (broken.state, broken.reason) == (State.DEAD, "broken")  # replayable, once the code fits


async def test_a_job_that_does_not_say_what_follows_is_broken(mill: Mill) -> None:
    async with mill.app.test() as t:
        handle = await mill.square.using(headers={"propolis-flow": "{"}).aenqueue(1)
        await t.drain()
        record = t.job(handle)
    assert (record.state, record.reason) == (State.DEAD, "broken")


async def test_a_step_emits_besides(mill: Mill) -> None:
    app, seen = mill.app, list[str]()

    @app.task
    async def emitted(what: str) -> None:
        seen.append(what)

    @app.task
    async def step(job: Job, n: int) -> int:
        job.emit(emitted, f"step {n}")
        return n + 1

    async with app.test() as t:
        run = await (step.step(1) | step.step()).aenqueue()
        await t.drain()
        assert await run.aresult("1s") == 3
    assert seen == ["step 1", "step 2"]


# --- when workers die --------------------------------------------------------------------


@pytest.mark.parametrize("during", ["numbers", "square", "text", "total"])
async def test_a_flow_goes_on_after_a_crash_at_any_step(mill: Mill, during: str) -> None:
    """S0.43, S3.7: only what was running then runs again; everything that follows is put once."""
    square_all = each(mill.square.step() | mill.square.step())
    flow = mill.numbers.step(4) | square_all | mill.total.step() | mill.text.step()
    async with mill.app.test() as t:
        whole = flow | fork(mill.text.step(), mill.text.step() | mill.text.step())
        run = await whole.aenqueue()
        await t.kill_worker(during=during)
        await t.advance("15s")
        assert await run.aresult("1s") == ("98", "98")
        put = Counter(record.task for record in t.jobs())
        assert put == {"numbers": 1, "square": 8, "total": 1, "text": 4}
        assert {record.task for record in t.jobs() if record.losses} == {during}


class Crooked(Struct):
    """A flow of any shape, what it gives, and where its worker is killed on the way."""

    flow: Any
    value: Any
    kills: list[str]


@strategies.composite
def crooked_flows(draw: strategies.DrawFn, mill: Mill = Mill()) -> Crooked:  # noqa: B008
    count = draw(strategies.integers(0, 4))
    flow, value = mill.numbers.step(count), list(range(count))
    for kind in draw(strategies.lists(strategies.sampled_from(["each", "fork", "chain"]), max_size=4)):
        plus = draw(strategies.integers(0, 9))
        match kind:
            case "each":
                length = draw(strategies.integers(1, 2))
                inner = mill.square.step(plus=plus)
                for _ in range(length - 1):
                    inner = inner | mill.square.step(plus=plus)
                flow = flow | each(untyped(inner)) | mill.parts.step()
                for _ in range(length):
                    assume(13 not in value)
                    value = [n * n + plus for n in value]
            case "fork":
                flow = flow | untyped(fork(mill.total.step(), mill.total.step() | mill.square.step()))
                flow = flow | mill.parts.step()
                assume(sum(value) != 13)
                value = [sum(value), sum(value) ** 2]
            case "chain":
                flow = flow | mill.total.step() | mill.numbers.step()
                value = list(range(sum(value)))
        assume(len(value) < 20 and all(n < 10**9 for n in value))
    victims = strategies.sampled_from(["numbers", "square", "total", "parts"])
    kills = draw(strategies.lists(victims, max_size=3))
    return Crooked((mill, flow), value, kills)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(crooked=crooked_flows())
def test_a_flow_of_any_shape_gives_what_its_functions_give(crooked: Crooked) -> None:
    """S0.40, S0.43: whoever is killed on the way, and every step is put once."""
    mill, flow = crooked.flow

    async def play() -> None:
        async with mill.app.test() as t:
            run = await flow.aenqueue()
            for task in crooked.kills:
                with suppress(AssertionError):  # there may be none to kill just now
                    await t.kill_worker(during=task)
            await t.advance("2m")
            assert await run.aresult("1s") == crooked.value
            put = len(t.jobs())
            steps = (await status_of(run)).steps
            assert put == sum(step.total for step in steps)

    asyncio.run(play())


async def test_a_late_outcome_of_a_step_puts_nothing_a_second_time(mill: Mill) -> None:
    """I5, S3.8."""
    async with mill.app.test() as t:
        run = await (mill.numbers.step(3) | each(mill.square.step()) | mill.total.step()).aenqueue()
        [first] = t.jobs()
        await t.lose_lease(first.id)
        await t.drain()
        assert await run.aresult("1s") == 5
        assert mill.runs["numbers"] == 2
        assert len(t.jobs(task=mill.square)) == 3


async def test_a_start_that_broke_off_leaves_batches_that_are_forgotten(mill: Mill) -> None:
    """Whatever call of it was the last one to be answered."""
    app = mill.app
    flow = mill.numbers.step(3) | each(mill.square.step()) | mill.total.step() | mill.numbers.step()
    whole = flow | each(mill.square.step()) | mill.total.step()
    for calls in range(6):
        async with app.test() as t:
            left = calls

            async def breaking(*args: Any, real: Any, **options: Any) -> Any:
                nonlocal left
                if not left:
                    raise ConnectionError
                left -= 1
                return await real(*args, **options)

            engine: Any = t.engine
            for name in ("put_batch", "seal"):
                real = getattr(engine, name)
                setattr(
                    engine, name, lambda *args, _real=real, **options: breaking(*args, real=_real, **options)
                )
            with pytest.raises(ConnectionError):
                await whole.aenqueue(flow_id="f")
            await t.advance("25h")
            assert [batch.state for batch in await app.batches.afind() if not batch.finished_at] == []
            await t.advance("8d")
            assert await app.batches.afind() == []
    assert mill.runs == {}


# --- operating ---------------------------------------------------------------------------


async def test_a_cancelled_flow_puts_nothing_more(mill: Mill) -> None:
    async with mill.app.test() as t:
        later = mill.square.using(delay="1h")
        run = await (mill.numbers.step(3) | each(later.step()) | mill.total.step()).aenqueue()
        await t.drain()
        assert await run.acancel()
        assert not await run.acancel()
        await t.advance("2h")
        assert mill.runs == {"numbers": 1}
        status = await status_of(run)
        assert status.state is FlowState.CANCELLED
        with pytest.raises(FlowFailed):
            await run.aresult("1s")
        chain = await (later.step(1) | mill.text.step()).aenqueue()
        assert await chain.acancel()
        assert (await status_of(chain)).state is FlowState.CANCELLED
        assert not await mill.app.flow("nobody").acancel()


async def test_a_step_that_does_not_stop_is_reported(mill: Mill) -> None:
    app = mill.app
    go_on = asyncio.Event()

    @app.task
    async def deaf() -> int:
        await go_on.wait()
        return 1

    async with app.test() as t:
        run = await (deaf.step() | mill.text.step()).aenqueue()
        await t.advance("1s")
        with pytest.raises(TimeoutError, match="asked to stop"):
            await run.acancel(timeout="30ms")
        with pytest.raises(TimeoutError, match="has not ended"):
            await run.aresult(timeout="30ms")
        go_on.set()
        await t.drain()


async def test_a_deleted_flow_leaves_nothing(mill: Mill) -> None:
    async with mill.app.test() as t:
        later = mill.square.using(delay="1h")
        run = await (mill.numbers.step(3) | each(later.step())).aenqueue()
        await t.drain()
        assert await run.adelete()
        assert await mill.app.batches.afind() == []
        await t.advance("2h")
    assert mill.runs == {"numbers": 1}


async def test_a_flow_tells_how_far_it_is_and_draws_it(mill: Mill) -> None:
    async with mill.app.test() as t:
        slow = mill.square.using(delay="1h")
        flow = mill.numbers.step(3) | each(slow.step()) | mill.total.step()
        run = await flow.aenqueue()
        assert (await status_of(run)).draw() == (
            "├─ numbers    waiting\n├─ each       not yet\n│  └─ square\n└─ total      not yet"
        )
        await t.drain()
        status = await status_of(run)
        assert status.draw().splitlines()[1] == "├─ each       3: 3 waiting"
        assert status.mermaid() == (
            "flowchart LR\n"
            '    s0_0_0["numbers<br/>done"]\n'
            '    s1_0_0["square<br/>3: 3 waiting"]\n'
            "    s0_0_0 -->|each| s1_0_0\n"
            '    s2_0_0["total<br/>not yet"]\n'
            "    s1_0_0 -->|all| s2_0_0"
        )
    assert flow.draw() == "├─ numbers\n├─ each\n│  └─ square\n└─ total"
    assert "fork" not in flow.mermaid()
    assert repr(flow) == "<Flow numbers | each ( square ) | total>"


async def test_inner_parts_may_be_forgotten_before_their_flow(mill: Mill) -> None:
    async with mill.app.test() as t:
        late = mill.text.using(delay="2h")
        flow = mill.numbers.step(3) | each(mill.square.step()) | mill.total.step() | late.step()
        run = await flow.aenqueue(keep_for="1h")
        await t.advance("150m")
        status = await status_of(run)
        assert [str(step) for step in status.steps] == ["forgotten", "forgotten", "done", "done"]
        assert status.state is FlowState.SUCCESS


# --- waiting -----------------------------------------------------------------------------


async def test_a_job_cannot_wait_forever_for_another_one(mill: Mill) -> None:
    """S0.46: with one slot that would be a deadlock; the same as a flow is none."""
    app = mill.app
    errors: list[BaseException] = []

    @app.task(on_error=dead)
    async def parent(job: Job) -> None:
        waits = [
            (await mill.square.aenqueue(1)).aresult(),
            (await app.batch(mill.square.many([1]))).afinished(),
            (await mill.square.step(1).aenqueue()).aresult(),
        ]
        for wait in waits:
            with pytest.raises(WaitsForever) as error:
                await wait
            errors.append(error.value)
        with pytest.raises(TimeoutError):
            await (await mill.square.aenqueue(1)).aresult(timeout="10ms")

    @app.task(on_error=dead)
    def plain_parent() -> None:
        with pytest.raises(WaitsForever) as error:
            mill.square.enqueue(1).result()
        errors.append(error.value)

    async with app.test(slots=1) as t:
        await parent.aenqueue()
        await plain_parent.aenqueue()
        run = await (mill.numbers.step(3) | each(mill.square.step()) | mill.total.step()).aenqueue()
        await t.drain()
        assert t.errors == []
        assert await run.aresult() == 5
    assert len(errors) == 4
    assert "give a timeout=" in str(errors[0])


async def test_what_a_flow_has_ended_without_is_not_awaited_any_more(mill: Mill) -> None:
    """Of an empty list nothing is spread, and behind a dead step nothing comes: "not yet" would be a lie."""
    async with mill.app.test() as t:
        empty = await (mill.numbers.step(0) | each(mill.square.step()) | mill.total.step()).aenqueue()
        failed = await (mill.square.step(13) | mill.text.step()).aenqueue()
        await t.advance("1h")
        assert (await status_of(empty)).draw() == (
            "├─ numbers    done\n├─ each       none\n│  └─ square\n└─ total      done"
        )
        assert (await status_of(failed)).draw() == "├─ square  dead\n└─ text    none"
        with pytest.raises(FlowFailed, match=r"square \(dead\)"):
            await failed.aresult("1s")


# --- what cannot be ----------------------------------------------------------------------


def test_what_cannot_work_is_refused_when_it_is_written(mill: Mill) -> None:
    numbers, square, text, total = mill.numbers, mill.square, mill.text, mill.total
    loose: Any = square
    wrong: list[Any] = [
        lambda: square.step(1) | loose.step(1, 2),
        lambda: square.step(1) | loose.step(minus=1),
        lambda: square.step(1) | loose.step(plus="x"),
        lambda: (numbers.step(2) | each(loose.step(1, 2))).draw(),
        lambda: square.step(1) | 5,  # type: ignore[operator]
        lambda: square.step(1) | start(1),
        lambda: numbers.step(1) | each(square.step() | untyped(each(text.step()))),
        lambda: fork(),
        lambda: text.using(job_id="mine").step(),
        lambda: text.using(batch="mine").step(),
        lambda: numbers.step(1) | each(square.step()) | each(text.step()),
        lambda: square.step(1).enqueue(flow_id=""),
        lambda: loose.step().enqueue(),
        lambda: untyped(each(square.step())).enqueue(),
        lambda: start(1).enqueue(),
        lambda: start(1)._result_kind(),
        lambda: (start(object()) | total.step()).enqueue(),  # type: ignore[operator]
    ]
    for flow in wrong:
        with pytest.raises((BadSetting, TypeError)):
            flow()
    mill.app.close()


def test_a_task_in_the_place_of_a_step_is_told_from_one(mill: Mill) -> None:
    task: Any = mill.square
    for wrong in (lambda: task.step(1) | task, lambda: each(task), lambda: fork(task.step(), task)):
        with pytest.raises(TypeError, match=r"takes steps, and <Task square> is none: write task\.step\(\)"):
            wrong()


def test_the_value_that_a_flow_starts_with_must_fit_its_first_steps(mill: Mill) -> None:
    """As the arguments of a first step: here, and not in the worker."""
    square, text, half = untyped(mill.square.step()), mill.text.step(), untyped(mill.half.step())
    for flow in (start("x") | square, start([1, "x"]) | each(square), start("x") | fork(text, half)):
        with pytest.raises(TypeError, match="the arguments do not fit"):
            untyped(flow).enqueue()
    with pytest.raises(TypeError, match=r"start\(5\) \| each\(…\) needs a list"):
        (start(5) | untyped(each(square))).enqueue()
    assert mill.app.batches.find() == []
    mill.app.close()


def test_a_unique_key_is_refused_where_it_would_drop_elements(mill: Mill) -> None:
    """All elements would share it: only the first one would be put, and the others be missing unnoticed."""
    keyed = mill.square.using(unique="k")
    for inner in (keyed.step(), mill.square.step() | keyed.step()):
        with pytest.raises(BadSetting, match="one key for all the elements"):
            each(inner)


async def test_a_batch_that_is_no_flow_is_not_taken_for_one(mill: Mill) -> None:
    batch = await mill.app.batch(mill.square.many([1]))
    with pytest.raises(FlowBroken, match="is no flow"):
        await mill.app.flow(batch.id).astatus()


@pytest.mark.parametrize(
    "line",
    [
        "a",
        "a | b",
        "[given] | each ( a | b ) | c",
        "a | fork? ( b , c | d ) | each ( e )",
        "each | fork | a",
    ],
)
def test_the_line_of_a_flow_is_read_as_it_was_written(line: str) -> None:
    assert shape.as_line(shape.parse(f"{shape.PREFIX}{line}")) == f"{shape.PREFIX}{line}"


def test_a_drawing_holds_no_quotes_that_end_a_label() -> None:
    assert '["a#quot;b"]' in shape.mermaid([shape.One('a"b')])
    assert msgspec.json.decode(msgspec.json.encode(StepStatus(name="a"))) == {"name": "a"}

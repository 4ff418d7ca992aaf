"""What mypy must say about tasks.

This file is checked by `mypy --strict` with unused ignores as errors: every `type: ignore` below is therefore
an assertion that the line *is* an error, and every other line one that it is not.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable
from typing import Annotated, Any, assert_type

from propolis import App, BatchReport, Depends, Handle, Job, Transaction, cron, every
from propolis.app.task import SyncTask
from propolis.core.envelope import Envelope
from propolis.core.schedule import Schedule
from propolis.flows import Flow, FlowRun, each, fork, start
from propolis.strategies import breaker, dead, limit
from propolis.values import BatchHandle, Filter, JobInfo, Member, State

app = App("memory://")


@app.task(queue="mail")
async def send(to: str, subject: str = "hi") -> int:
    return len(to) + len(subject)


@app.task
def resize(path: str, *, width: int) -> bytes:
    return path.encode() * width


@app.task
async def report(job: Job, day: int) -> str:
    return f"{job.id} {day}"


@app.task
async def book(tx: Transaction, order: int) -> None: ...


@app.task(queue="books")
async def book_and_tell(job: Job, tx: Transaction, order: int) -> str:
    return f"{job.id} {tx} {order}"


def connect() -> str:
    return "connection"


@app.task
def query(sql: str, db: str = Depends(connect)) -> str:  # type: ignore[assignment]  # the marker is no str
    return db + sql


@app.task
def query_too(sql: str, db: Annotated[str, Depends(connect)] = "") -> str:
    return db + sql


@app.task
async def summary(job: Job, report: BatchReport, whom: str = "") -> None: ...


@app.task
def anything(thing: object) -> None: ...


@app.task
def whatever(thing: Any) -> None: ...


async def right_calls() -> None:
    assert_type(await book.aenqueue(7), Handle[None])
    assert_type(await book_and_tell.using(delay="5m").aenqueue(7), Handle[str])
    assert_type(await send.aenqueue("bob"), Handle[int])
    assert_type(send.enqueue("bob", subject="x"), Handle[int])
    assert_type(send.using(delay="5m").enqueue("bob", "x"), Handle[int])
    assert_type(await send.using(queue="slow").aenqueue("bob"), Handle[int])
    assert_type(await (await send.aenqueue("bob")).aresult(), int)
    assert_type(resize.enqueue("a.png", width=3).result(timeout="1s"), bytes)
    coroutine: Coroutine[Any, Any, int] = send("bob")
    assert_type(await coroutine, int)
    assert_type(resize("a.png", width=2), bytes)
    assert_type(await report.aenqueue(5), Handle[str])
    assert_type(query_too.enqueue("select"), Handle[str])
    assert_type(send.job("bob"), Envelope)
    assert_type(anything.enqueue(5), Handle[None])
    whatever.enqueue(5)
    assert_type(await app.batch(send.many(["bob"]), callback=summary), BatchHandle)
    assert_type(app.batch(callback=send.using(queue="slow").job("bob")).enqueue(), BatchHandle)
    async with app.batch(on_failed=summary.using(delay="1m")) as b:
        assert_type(await b.add(send, "bob"), str)
        b.add(resize.using(priority=3), "a.png", width=3)


async def wrong_calls(job: Job) -> None:
    await send.aenqueue()  # type: ignore[call-arg]  # `to` is missing
    await send.aenqueue(5)  # type: ignore[arg-type]  # not a str
    send.enqueue("bob", "x", "y")  # type: ignore[call-arg]  # one too many
    send.enqueue("bob", topic="x")  # type: ignore[call-arg]  # no such parameter
    resize.enqueue("a.png")  # type: ignore[call-arg]  # `width` is missing
    resize.enqueue("a.png", width="3")  # type: ignore[arg-type]  # not an int
    send.using(delay="5m").enqueue(5)  # type: ignore[arg-type]  # checked through `using`
    send.using(dealy="5m")  # type: ignore[call-arg]  # a misspelt circumstance
    send.using(priority="high")  # type: ignore[arg-type]  # not an int
    await report.aenqueue(job, 5)  # type: ignore[call-arg, arg-type]  # the job is the worker's to give
    job.emit(send, 5)  # type: ignore[arg-type]  # checked through `emit`
    app.batch(callback=send)  # type: ignore[arg-type]  # it needs an argument: send.job("bob")
    async with app.batch() as b:
        b.add(send, 5)  # type: ignore[arg-type]  # checked through `add`
    app.task(queue=5)  # type: ignore[call-overload]  # not a str
    app.task(qeue="mail")  # type: ignore[call-overload]  # a misspelt option
    app.task(retries="5")  # type: ignore[call-overload]  # not an int
    send.using(retries=5)  # type: ignore[call-arg]  # of a task, not of a call: on_error=repeat(5)
    app.task(isolate="thread")  # type: ignore[call-overload]  # no such kind
    app.command("ls", ["ls"], isolate="process")  # type: ignore[call-arg]  # a program is one already
    send.using(on_error={ValueError: dead})  # type: ignore[arg-type]  # code cannot travel with a job
    app.batch(send.many(["bob"]), keep_fro="7d")  # type: ignore[call-arg]  # a misspelt option
    app.batch(note=5)  # type: ignore[arg-type]  # not a str
    b.batch(parent="x")  # type: ignore[call-arg]  # it is this one
    app.cron("@daily", missfire="once")  # type: ignore[call-arg]  # a misspelt policy
    app.every("1h", tz="UTC")  # type: ignore[call-arg]  # periods know no time zone
    every("1h", overlap="never")  # type: ignore[arg-type]  # no such policy


@app.task
async def fetch(url: str) -> bytes:
    return url.encode()


@app.task
def words(page: bytes, least: int = 0) -> list[str]:
    return [word for word in page.decode().split() if len(word) > least]


@app.task
async def length(job: Job, word: str) -> int:
    return len(word)


@app.task
def total(lengths: list[int]) -> int:
    return sum(lengths)


@app.task
def known(lengths: list[int | None]) -> int:
    return len([length for length in lengths if length is not None])


@app.task
def both(two: tuple[int, str]) -> None: ...


async def right_flows() -> None:
    flow = fetch.step("https://a") | words.step(least=3) | each(length.step()) | total.step()
    assert_type(flow, Flow[Any, int])
    assert_type(await flow.aenqueue(), FlowRun[int])
    assert_type((await flow.aenqueue()).result(timeout="1s"), int)
    assert_type(fetch.using(queue="slow").step("https://a").enqueue(), FlowRun[bytes])
    assert_type(words.step(), Flow[bytes, list[str]])
    assert_type(each(length.step()), Flow[Iterable[str], list[int]])
    assert_type(words.step() | each(length.step()), Flow[bytes, list[int]])
    (fetch.step("https://a") | words.step() | each(length.step(), partial=True) | known.step()).enqueue()
    (start(["a", "b"]) | each(length.step()) | total.step()).enqueue()
    (start("a") | fork(length.step(), report_length.step()) | both.step()).enqueue()


@app.task
def report_length(word: str) -> str:
    return word


def wrong_flows() -> None:
    fetch.step("https://a") | total.step()  # type: ignore[operator]  # bytes are no list of numbers
    fetch.step("https://a") | each(length.step())  # type: ignore[arg-type]  # of numbers, not of words
    fetch.step(5)  # type: ignore[call-overload]  # not a str
    words.step(least="x")  # type: ignore[call-overload]  # not an int
    words.step().enqueue()  # type: ignore[misc]  # nobody gives it a page
    each(length.step(), partial=True) | total.step()  # type: ignore[operator]  # some may be None
    start("a") | fork(length.step(), length.step()) | both.step()  # type: ignore[operator]  # two numbers


def test_the_assertions_above_are_mypys() -> None:
    """They run in the type check; here we see only that the module is sound."""
    assert {send.name, resize.name} <= set(app.tasks)


# --- schedules ---------------------------------------------------------------------------


@app.cron("@daily", args=("x",))
@app.task(queue="mail")
async def digest(to: str) -> int:
    return len(to)


@app.every("15m")
def tidy(job: Job) -> str:
    return job.id


@app.every("15m")
async def poll(depth: int = 1) -> bytes:
    return bytes(depth)


async def schedules_are_typed_like_calls() -> None:
    assert_type(await digest("x"), int)
    assert_type(tidy, SyncTask[[], str])
    assert_type(await poll(3), bytes)
    assert_type(await app.every("1h", name="slow")(digest.using(queue="slow")).aenqueue("x"), Handle[int])
    await app.schedules.aput("a", cron("@daily"), digest, "x")
    await app.schedules.aput("a", every("1h"), digest.using(priority=1), to="x")
    await app.schedules.aput("a", cron("@daily"), digest, 5)  # type: ignore[arg-type]
    await app.schedules.aput("a", cron("@daily"), digest)  # type: ignore[call-arg]
    app.schedules.put("a", cron("@daily"), digest, wrong="x")  # type: ignore[call-arg]
    app.cron("@daily", misfire="twice")  # type: ignore[arg-type]


# --- twins -------------------------------------------------------------------------------


async def twins_are_typed_like_the_asynchronous_verbs(run: FlowRun[int], handle: BatchHandle) -> None:
    assert_type(app.jobs.get("x"), JobInfo | None)
    assert_type(app.jobs.purge(Filter(), limit=3), int)
    assert_type(app.batches.members("x", after=3), list[Member])
    assert_type(run.result(timeout="1s"), int)
    assert_type(handle.members(), list[Member])
    assert_type(app.schedules.put("a", cron("@daily"), digest, "x"), Schedule)
    app.jobs.get(5)  # type: ignore[arg-type]  # not a str
    app.jobs.purge(Filter(), most=3)  # type: ignore[call-arg]  # no such option
    run.result("1s", 2)  # type: ignore[call-arg]  # one too many


@app.task(key="to:{to}", unique=("to",), limit=limit(3, rate="100/min", burst=20), breaker=breaker(per="key"))
async def keyed(to: str) -> int:
    return len(to)


def what_is_made_of_arguments_changes_no_types() -> None:
    call = keyed.using(wait="30s", on_conflict="refuse", unique=("to",), key=None)
    assert_type(call.enqueue("a"), Handle[int])
    call.enqueue(5)  # type: ignore[arg-type]
    keyed.using(on_conflict="replace")  # type: ignore[arg-type]
    app.task(unique="to")  # type: ignore[call-overload]
    app.task(limit=3)  # type: ignore[call-overload]
    breaker(per="queue")  # type: ignore[arg-type]
    assert_type(app.jobs.count(key="to:a"), dict[State, int])
    assert_type(app.queues.cap("mail", 3), bool)

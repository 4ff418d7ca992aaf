"""Errors say what to do next, carry their details, and survive the way between processes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from propolis import errors
from propolis.errors import (
    AppNotFound,
    BadCall,
    BadDuration,
    BadName,
    BadSetting,
    BatchSealed,
    BrokenPayload,
    Busy,
    CheckpointTooLarge,
    ChildNotStarted,
    CommandFailed,
    DriverMissing,
    DuplicateJob,
    DurabilityTooLow,
    EngineClosed,
    EngineError,
    EngineUnavailable,
    FlowBroken,
    FlowFailed,
    ForkedEngine,
    JobFailed,
    LeaseLost,
    MemoryFull,
    Misuse,
    NewerVersion,
    NoProcess,
    NoTransactions,
    OutcomeTooLarge,
    OutcomeUnknown,
    PayloadTooLarge,
    PropolisError,
    QueueFull,
    RecordTooLarge,
    ResultNotKept,
    SchemaDrifted,
    SchemaTooNew,
    SchemaTooOld,
    StorageBroken,
    StorageFull,
    StorageNotReady,
    UnknownBatch,
    UnknownEngine,
    UnknownFlow,
    UnknownTask,
    UnsafeStorage,
    WaitsForever,
    WorkerFailed,
)

# One of each: the error, words of advice in its message, and its attributes.
EXAMPLES: list[tuple[PropolisError, str, dict[str, object]]] = [
    (PropolisError("anything"), "anything", {}),
    (WorkerFailed("50 jobs do not stop"), "50 jobs do not stop", {}),
    (BadSetting("no"), "no", {}),
    (Misuse("await it"), "await it", {}),
    (BadCall("it takes no n"), "it takes no n", {}),
    (BadDuration("soon"), 'write "90s"', {"value": "soon"}),
    (BadName("queue", "a b", "letters only"), "'a b' cannot be a queue: letters only", {"name": "a b"}),
    (NoTransactions("pay", "memory://"), "lends none", {"task": "pay"}),
    (AppNotFound("mail:app", "there is no module 'mail'"), "there is no module", {"path": "mail:app"}),
    (UnknownTask("mail.send"), "does the worker import its module?", {"name": "mail.send"}),
    (BrokenPayload("not JSON"), "not JSON", {}),
    (RecordTooLarge("the value", 2000, 1000), "store a reference", {"size": 2000, "limit": 1000}),
    (OutcomeTooLarge(2000, 1000), "stream a batch", {"size": 2000, "limit": 1000}),
    (PayloadTooLarge("the size", 2000, 1000), "pass a reference", {"size": 2000, "limit": 1000}),
    (NewerVersion(2, 1), "upgrade the worker, then replay the job", {"version": 2, "known": 1}),
    (
        QueueFull("mail", 10, 12),
        "raise its cap",
        {"queue": "mail", "limit": 10, "would_hold": 12, "bound": "jobs"},
    ),
    (QueueFull("mail", 10), "a cap of 10 waiting jobs: try again", {"would_hold": None}),
    (
        DuplicateJob("bill", "k", "j"),
        "leave out on_conflict=",
        {"task": "bill", "unique": "k", "job_id": "j"},
    ),
    (UnknownBatch("b"), "never opened", {"batch": "b"}),
    (BatchSealed("b"), "by emitting", {"batch": "b"}),
    (FlowBroken("this batch is no flow"), "no flow", {}),
    (FlowFailed("f", "dead", "total (dead)"), "ended as dead: total", {"flow": "f", "state": "dead"}),
    (UnknownFlow("f"), "time is over", {"flow": "f"}),
    (WaitsForever(), "give a timeout=", {}),
    (EngineError("no"), "no", {}),
    (UnknownEngine("x://", ["memory://", "sqlite://"]), "one of memory://, sqlite://", {"url": "x://"}),
    (DriverMissing("redis://", "hiredis", "redis"), "install propolis[redis]", {}),
    (EngineUnavailable("no answer"), "no answer", {}),
    (
        Busy("here", {7: "session 7 (billing)"}),
        "try again",
        {"pids": (7,), "holders": ("session 7 (billing)",)},
    ),
    (OutcomeUnknown("the answer was lost"), "the answer was lost", {}),
    (EngineClosed(), "call open() first", {}),
    (ForkedEngine(1, 2), "open a new engine after the fork", {"opened_by": 1, "used_by": 2}),
    (
        MemoryFull("mail", "jobs at redis://here"),
        "give the server more memory",
        {"queue": "mail", "limit": 0, "where": "jobs at redis://here"},
    ),
    (StorageFull("jobs.db"), "free some space", {"where": "jobs.db"}),
    (StorageBroken("I/O error"), "I/O error", {}),
    (UnsafeStorage("nfs"), "nfs", {}),
    (SchemaTooNew(9, 3), "upgrade propolis", {"found": 9, "known": 3}),
    (SchemaTooOld("jobs", "its tables lack 2"), "run `propolis init`", {"where": "jobs"}),
    (SchemaDrifted("jobs.db", "migration 1 was left out"), "from a backup", {"where": "jobs.db"}),
    (StorageNotReady("jobs.db", "there is no such file"), "run `propolis init`", {"where": "jobs.db"}),
    (LeaseLost("a"), "stop here", {"job_id": "a"}),
    (CheckpointTooLarge(2000, 1000), "save where the job is", {"size": 2000, "limit": 1000}),
    (ChildNotStarted("it died: SIGSEGV"), "it died: SIGSEGV", {}),
    (NoProcess("none is left"), "none is left", {}),
    (CommandFailed("exit code 3", 3, "no such file"), "exit code 3: no such file", {"code": 3}),
    (JobFailed("a", "dead", "failed", "ValueError: boom"), "ValueError: boom", {"state": "dead"}),
    (JobFailed("a", "cancelled", "cancelled", None), "ended as cancelled", {"error": None}),
    (ResultNotKept("a"), 'result_ttl="1h"', {"job_id": "a"}),
    (DurabilityTooLow("process", "power", "sync"), "sync", {"found": "process", "floor": "power"}),
]

every_error = pytest.mark.parametrize(
    ("error", "advice", "attributes"), EXAMPLES, ids=[type(error).__name__ for error, _, _ in EXAMPLES]
)


def test_every_error_has_an_example_here() -> None:
    ours = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    assert ours == {type(error) for error, _, _ in EXAMPLES}


@every_error
def test_an_error_says_what_to_do_and_carries_its_details(
    error: PropolisError, advice: str, attributes: dict[str, object]
) -> None:
    assert isinstance(error, PropolisError)
    assert advice in str(error)
    assert {name: getattr(error, name) for name in attributes} == attributes


@every_error
def test_an_error_survives_a_process_pool_and_a_copy(
    error: PropolisError, advice: str, attributes: dict[str, object]
) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (BadSetting, ValueError),
        (BadDuration, BadSetting),
        (BadName, BadSetting),
        (PayloadTooLarge, BrokenPayload),
        (NewerVersion, BrokenPayload),
        (UnknownEngine, ValueError),
        (DriverMissing, ImportError),
        (OutcomeUnknown, EngineError),
        (EngineUnavailable, EngineError),
    ],
)
def test_an_error_is_caught_by_its_wider_name(narrow: type[Exception], wide: type[Exception]) -> None:
    assert issubclass(narrow, wide)


@pytest.mark.parametrize("error", [BadDuration("9" * 100_000), BadName("queue", "x" * 100_000, "too long")])
def test_a_strangers_value_is_cut_in_the_message(error: PropolisError) -> None:
    assert len(str(error)) < 300
    assert "..." in str(error)

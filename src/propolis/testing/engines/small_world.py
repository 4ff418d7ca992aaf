"""The small world in which everything meets everything: what the machine draws from."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import strategies as st

from propolis.core.batch import Batch
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.job import (
    Broken,
    Cancelled,
    Crashed,
    Dead,
    Done,
    Error,
    Outcome,
    Released,
    Retried,
    Snoozed,
    State,
    Unknown,
)
from propolis.core.protocols import (
    UNBOUNDED,
    Filter,
    Rule,
    RuleKind,
    Scope,
    task_key,
)
from propolis.testing.clock import START
from propolis.testing.engines.model.model import NOW

QUEUES = ("a", "b")
CALLBACK_QUEUE = "c"  # its own: may a lease take a callback that was put on its way?  The contract is silent
TASKS = ("tests.add", "tests.mul")
PRIORITIES = (0, 0, 0, 0, 100, -100)
PAYLOADS = (b"[]", b"[1, 2.50, 1e2]", b'["\\u00e9", "\xc3\xa9"]', b'[{"a" : null}]')
TOKENS = (None, None, "token-1", "token-2", "token-3")
SHORT, LONG = timedelta(seconds=5), timedelta(seconds=10)
SPANS = (SHORT, SHORT, LONG)
STEPS = (timedelta(seconds=1), SHORT, SHORT, LONG)
AGES = (timedelta(days=1), timedelta(days=7), timedelta(days=90))
FOR_EVER_MS = 10 * 365 * 86_400_000
ALL = 1000
CALLBACKS = ("on_finished", "on_succeeded", "on_failed")

NAMES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"id": "chosen-1", "chosen": True},
    {"id": "chosen-2", "chosen": True},
    {"id": "given-1"},
    {"unique": "u1"},
    {"unique": "u2", "unique_until": UniqueUntil.STARTED},
    {"key": "k"},
    {"key": "k", "max_crashes": 1},
    {"key": "k:1"},
    {"max_crashes": 2},
)
TIMES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {},
    {"delay_ms": 5_000},
    {"delay_ms": 10_000},
    {"due_at": START + LONG},
    {"expires_in_ms": 5_000},
    {"expires_in_ms": 10_000},
    {"expires_at": START + LONG},
)

RULES = (
    Rule(RuleKind.PAUSE, Scope.QUEUE, "a"),
    Rule(RuleKind.PAUSE, Scope.TASK, TASKS[0]),
    Rule(RuleKind.PAUSE, Scope.KEY, "k"),
    Rule(RuleKind.PAUSE, Scope.TASK_KEY, task_key(TASKS[0], "k")),
    Rule(RuleKind.BLOCK, Scope.QUEUE, "a", by="anna", why="deploy", lasts=SHORT),
    Rule(RuleKind.BLOCK, Scope.TASK_KEY, task_key(TASKS[1], "k"), until=START + LONG),
    Rule(RuleKind.PAUSE, Scope.TASK, TASKS[0], lasts=LONG),
    Rule(RuleKind.BLOCK, Scope.TASK, TASKS[1]),
    Rule(RuleKind.LIMIT, Scope.QUEUE, "b", 1),
    Rule(RuleKind.LIMIT, Scope.QUEUE, "b", 2),
    Rule(RuleKind.LIMIT, Scope.TASK, TASKS[0], 1),
    Rule(RuleKind.LIMIT, Scope.KEY, "k", 1),
    Rule(RuleKind.LIMIT, Scope.KEY, "k", 1, by="ben", lasts=SHORT),
    Rule(RuleKind.CAP, Scope.QUEUE, "b", 1),
    Rule(RuleKind.CAP, Scope.QUEUE, "b", 3),
)

# Whichever of them holds: a bucket is full after the same time.
ONCE: dict[str, Any] = {"every": timedelta(seconds=6)}
TWICE: dict[str, Any] = {"every": timedelta(seconds=3), "burst": 2}
THRICE: dict[str, Any] = {"every": timedelta(seconds=2), "burst": 3}
RATES = (
    Rule(RuleKind.LIMIT, Scope.QUEUE, "b", UNBOUNDED, **ONCE),
    Rule(RuleKind.LIMIT, Scope.TASK, TASKS[0], 2, **TWICE),
    Rule(RuleKind.LIMIT, Scope.KEY, "k", UNBOUNDED, **ONCE),
    Rule(RuleKind.LIMIT, Scope.KEY, "k", 2, **THRICE),
    Rule(RuleKind.LIMIT, Scope.KEY, "k*", 1),
    Rule(RuleKind.LIMIT, Scope.KEY, "k*", UNBOUNDED, **TWICE),
    Rule(RuleKind.LIMIT, Scope.KEY, "k:*", 2, **ONCE),
    Rule(RuleKind.LIMIT, Scope.KEY, "*", 1, lasts=LONG),
    Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key(TASKS[0], "*"), 1),
    Rule(RuleKind.LIMIT, Scope.TASK_KEY, task_key(TASKS[1], "*"), 2, **TWICE),
)
KEYS: tuple[dict[str, Any], ...] = ({"key": "k"}, {"key": "k:1"}) * 4

EVERYTHING = {"b": 99, "a": 99, "c": 99}
WANTS = ({"a": 1}, {"b": 1}, {"a": 2}, {"b": 2}, {"c": 2}, {"a": 2, "b": 2}, EVERYTHING)

FILTERS = (
    *(Filter(state=state) for state in State),
    Filter(queue="a", task=TASKS[0]),
    Filter(queue="b", scheduled=False),
    Filter(state=State.DEAD, reason="crashed"),
    Filter(state=State.DEAD, reason="lost"),
    Filter(scheduled=True),
    Filter(batch="batch-1"),
)


class Draft(NamedTuple):
    """A job to be: the machine gives it an id, unless a facet does."""

    queue: str
    task: str
    priority: int
    name: Mapping[str, Any] = MappingProxyType({})
    time: Mapping[str, Any] = MappingProxyType({})


class BatchShape(NamedTuple):
    """A batch to be."""

    callbacks: tuple[str, ...]
    keep_for_ms: int
    open_for_ms: int


class Emits(NamedTuple):
    """A `Done`, or a `Dead`, to be, with these jobs to put, perhaps into a batch that it opens."""

    drafts: tuple[Draft, ...]
    dead: bool = False
    opens: BatchShape | None = None


class Put(NamedTuple):
    """A call of `put`, or with a batch of `put_batch`, to be made and perhaps to be repeated."""

    jobs: list[Envelope]
    token: str | None = None
    batch: Batch | None = None
    seal: bool = True


OUTCOMES: tuple[Outcome | Emits, ...] = (
    Done(),
    Done(),
    Done(result=b"1", keep=LONG),
    Emits((Draft("a", TASKS[0], 0), Draft("b", TASKS[1], 0))),
    Emits((Draft("a", TASKS[1], 100, {"unique": "u1"}), Draft("a", TASKS[0], 0, {}, {"delay_ms": 5_000}))),
    Emits((Draft("b", TASKS[0], 0, {"id": "chosen-1"}),)),
    Emits((Draft("a", TASKS[0], 0), Draft("b", TASKS[1], 0, {"unique": "u1"})), dead=True),
    Emits((), opens=BatchShape(CALLBACKS, 5_000, FOR_EVER_MS)),
    Emits((Draft("a", TASKS[0], 0), Draft("b", TASKS[1], 0)), opens=BatchShape(CALLBACKS, 0, FOR_EVER_MS)),
    Emits((Draft("b", TASKS[0], 0),), dead=True, opens=BatchShape(CALLBACKS[:1], 5_000, 5_000)),
    Retried(),
    Retried(),
    Retried(SHORT, Error("ValueError", "no")),
    Retried(queue="b"),
    Dead(),
    Dead("bad", Error("ValueError"), SHORT),
    Dead(keep=NOW),
    Snoozed(NOW),
    Snoozed(SHORT),
    Snoozed(SHORT, asked=False),
    Released(),
    Released(),
    Crashed(),
    Crashed(Error("SIGSEGV", "it died")),
    Crashed(blameless=True),
    Crashed(blameless=True),
    Unknown(),
    Unknown(),
    Unknown(),
    Cancelled(),
    Cancelled(),
    Broken(Error("BrokenPayload")),
)

DRAFT = st.builds(
    Draft,
    st.sampled_from(QUEUES),
    st.sampled_from(TASKS),
    st.sampled_from(PRIORITIES),
    st.sampled_from(NAMES),
    st.sampled_from(TIMES),
)
DRAFTS = st.lists(DRAFT, min_size=1, max_size=3)
SHAPE = st.builds(
    BatchShape,
    st.sampled_from([CALLBACKS, CALLBACKS, CALLBACKS[:1], CALLBACKS[1:], ()]),
    st.sampled_from([0, 5_000, 7 * 86_400_000]),
    st.sampled_from([FOR_EVER_MS, FOR_EVER_MS, 5_000]),
)
PICK = st.integers(0, 255)
TURNS = st.lists(st.tuples(PICK, st.sampled_from(OUTCOMES)), min_size=1, max_size=3)
LIMIT = st.sampled_from([None, None, 1, 3])
KNOWN_TASKS = st.sampled_from([(), (), (), TASKS[:1], TASKS, TASKS[::-1]])

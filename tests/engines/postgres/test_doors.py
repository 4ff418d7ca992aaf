"""The door for any language: `SELECT propolis.enqueue(...)`, from psql, from triggers, from any client."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from propolis import App
from propolis.core import wire
from propolis.core.batch import Batch
from propolis.core.envelope import Envelope, UniqueUntil
from propolis.core.job import JobInfo, Lease
from propolis.core.protocols import Rule, RuleKind, Scope
from propolis.engines.postgres.engine import PostgresEngine
from propolis.engines.postgres.schema import dropped
from propolis.engines.shared.statements import load_functions
from propolis.strategies import archive, dead
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.servers.binaries import candidates
from propolis.values import State
from propolis.worker import Lane, Mode, Settings, Worker

Ask = Callable[..., Any]


@pytest_asyncio.fixture
async def ask(engine: PostgresEngine, connection: asyncpg.Connection, schema: str) -> Ask:
    """`SELECT propolis.enqueue(<these words>)`, in the schema of the test."""

    async def enqueue(words: str, *args: object) -> Any:
        return await connection.fetchval(f'SELECT "{schema}".enqueue({words})', *args)

    return enqueue


async def take(engine: PostgresEngine, queue: str = "default") -> list[Lease]:
    return await engine.lease({queue: 10}, span=SPAN, holder=HOLDER)


async def info_of(engine: PostgresEngine, job_id: str) -> JobInfo:
    info = await engine.get(job_id)
    assert info is not None
    return info


async def test_a_task_and_its_arguments_are_enough(engine: PostgresEngine, ask: Ask) -> None:
    """An array is the arguments; an object has them by its fields."""
    ids = [
        await ask("""'mail.send', '["a@b.c", {"x": [1, 1.50, 123456789012345678901234567890]}]'"""),
        await ask("""'mail.send', '{"args": ["a@b.c"], "kwargs": {"subject": "é %s $1 :p"}}'"""),
        await ask("'mail.send', '[]'"),
        await ask("'mail.send', '{}'"),
    ]

    leases = await take(engine)
    jobs = [wire.decode(lease.body) for lease in leases]
    assert [lease.id for lease in leases] == [job.id for job in jobs] == ids
    assert [wire.decode_args(job.args) for job in jobs] == [
        ["a@b.c", {"x": [1, 1.5, 123456789012345678901234567890]}],
        ["a@b.c"],
        [],
        [],
    ]
    assert wire.decode_args(jobs[1].kwargs) == {"subject": "é %s $1 :p"}
    assert all(job.task == "mail.send" and not job.chosen for job in jobs)


async def test_ids_are_uuids_of_version_7_that_grow(ask: Ask) -> None:
    ids = [await ask("'t', '[]'") for _ in range(3)]

    assert [each[14] for each in ids] == ["7", "7", "7"]
    assert all(each[19] in "89ab" for each in ids)
    assert [each[:13] for each in ids] == sorted(each[:13] for each in ids)


async def test_everything_that_python_can_say_can_be_said_by_name(engine: PostgresEngine, ask: Ask) -> None:
    await engine.put_batch(Batch(id="b"), seal=False)
    moment = datetime(2100, 1, 31, 9, 0, 0, 250000, tzinfo=UTC)
    job_id = await ask(
        """
        'mail.send', '{"args": [1], "priority": 1, "on_error": {"do": "dead"}, "member": 3}',
        '{"queue": "mail", "due_at": "2100-01-31 10:00:00.25+01", "priority": -7, "job_id": "mine",
          "unique_key": "u", "unique_until": "started", "limit_key": "k", "expires_in": "80 years",
          "expires_at": "2100-02-01 00:00:00+00", "timeout": "1.5 seconds", "result_ttl": "1 hour",
          "max_crashes": 9, "batch": "b", "headers": {"traceparent": "00-x"}}'"""
    )

    assert job_id == "mine"
    info = await info_of(engine, "mine")
    job = wire.decode(info.body)
    assert job == Envelope(
        id="mine",
        task="mail.send",
        queue="mail",
        args=job.args,
        priority=-7,
        due_at=moment,
        chosen=True,
        unique="u",
        unique_until=UniqueUntil.STARTED,
        key="k",
        expires_in_ms=job.expires_in_ms,
        expires_at=datetime(2100, 2, 1, tzinfo=UTC),
        timeout_ms=1500,
        result_ttl_ms=3_600_000,
        max_crashes=9,
        batch="b",
        member=3,
        on_error=dead,
        headers={"traceparent": "00-x"},
    )
    assert (info.due_at, info.queue, info.priority) == (moment, "mail", -7)
    assert (info.unique, info.key, info.batch, info.member) == ("u", "k", "b", 3)
    assert info.expires_at == datetime(2100, 2, 1, tzinfo=UTC)


async def test_a_delay_is_measured_by_the_server(engine: PostgresEngine, ask: Ask) -> None:
    """S2.18, S2.29: also one of a year and more."""
    info = await info_of(engine, await ask("'t', '[]', jsonb_build_object('delay', '1 year 1 day')"))

    assert info.due_at - info.put_at == timedelta(days=365.25 + 1)
    assert await take(engine) == []


async def test_a_second_put_gives_the_job_that_is_there(engine: PostgresEngine, ask: Ask) -> None:
    first = await ask("'t', '[1]', jsonb_build_object('unique_key', 'u')")
    assert await ask("'t', '[2]', jsonb_build_object('unique_key', 'u')") == first
    assert await ask("'t', '[3]', jsonb_build_object('job_id', 'mine')") == "mine"
    assert await ask("'t', '[4]', jsonb_build_object('job_id', 'mine')") == "mine"
    assert len(await take(engine)) == 2
    assert await ask("'t', '[5]', jsonb_build_object('job_id', 'mine')") == "mine"
    assert await take(engine) == []


WRONG = [
    ("'mail.send', '{\"arg\": [1]}'", 'unknown field "arg"', "kwargs"),
    ("'mail.send', '[1'", "invalid input syntax for type json", ""),
    ("'mail.send', '7'", "needs a task and a payload", ""),
    ("'mail.send', NULL", "needs a task and a payload", ""),
    ("NULL, '[]'", "needs a task and a payload", ""),
    ("'mail send', '[]'", '"task"', "white space"),
    ("'', '[]'", '"task"', ""),
    ("'t', '[]', jsonb_build_object('queue', 'a b')", '"queue"', "letters"),
    ("'t', '[]', jsonb_build_object('job_id', 'a b')", '"id"', "visible"),
    ("'t', '[]', jsonb_build_object('priority', 101)", '"priority"', "-100 to 100"),
    ("'t', '{\"priority\": 1.5}'", '"priority"', "whole"),
    ("'t', '{\"args\": {}}'", '"args"', "array"),
    ("'t', '{\"kwargs\": []}'", '"kwargs"', "object"),
    ("'t', '[]', jsonb_build_object('headers', '{\"a\": 1}'::jsonb)", '"headers"', "strings"),
    ("'t', '[]', jsonb_build_object('headers', '[]'::jsonb)", '"headers"', "object"),
    ("'t', '[]', jsonb_build_object('delay', '-1 second')", '"delay_ms"', "100 years"),
    ("'t', '[]', jsonb_build_object('timeout', '101 years')", '"timeout_ms"', "100 years"),
    ("'t', '[]', jsonb_build_object('delay', '1 s', 'due_at', now())", "both a delay and a time", ""),
    ("'t', '{\"due_at\": \"tomorrow\"}'", '"due_at"', "offset"),
    ("'t', '[]', jsonb_build_object('due_at', 'infinity')", '"due_at"', "offset"),
    ("'t', '[]', jsonb_build_object('unique_key', '')", '"unique"', "512"),
    (
        "'t', '[]', jsonb_build_object('unique_key', 'u', 'unique_until', 'never')",
        '"unique_until"',
        "started",
    ),
    ("'t', '[]', jsonb_build_object('max_crashes', 0)", '"max_crashes"', "from 1"),
    ("'t', '[]', jsonb_build_object('max_crashes', 32768)", '"max_crashes"', "to 32767"),
    ("'t', '{\"on_error\": \"dead\"}'", '"on_error"', "object"),
    ("'t', '{\"v\": 2}'", '"v"', "version 1"),
    ("'t', '[]', jsonb_build_object('batch', 'nobody')", "unknown batch", ""),
    ("'t', '[]', '{\"colour\": 1}'", 'no option "colour"', "unique_key"),
    ("'t', '[]', '[]'", "options are no object", "queue"),
    ("'t', jsonb_build_array(repeat('x', 300000))", "262144 is the limit", "reference"),
    ("'not json'", "not JSON", "enqueue"),
    ('\'{"id": "x"}\'', "names no task", ""),
    ("'[]'", "names no task", ""),
    ("NULL", "names no task", ""),
]


@pytest.mark.parametrize(("words", "message", "hint"), WRONG)
async def test_what_is_wrong_is_told_and_nothing_is_put(
    engine: PostgresEngine, ask: Ask, words: str, message: str, hint: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await ask(words)

    assert message in str(raised.value)
    assert hint in (raised.value.hint or "")
    assert await engine.queues() == {}


async def test_a_full_queue_refuses(engine: PostgresEngine, ask: Ask) -> None:
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
    await ask("'t', '[]'")
    with pytest.raises(asyncpg.PostgresError, match="queue full"):
        await ask("'t', '[]'")


async def test_an_envelope_is_kept_byte_for_byte_and_gets_an_id_if_it_has_none(
    engine: PostgresEngine, ask: Ask
) -> None:
    """I14; a field that nobody knows yet is kept too."""
    whole = '{ "task":"t",   "id":"mine", "args":[1e2, 1.0], "from_the_future": [] }'
    assert await ask("$1", whole) == "mine"
    made = await ask("$1", '{"task": "t", "args": ["no id"]}')

    first, second = await take(engine)
    assert (first.body, first.id) == (whole.encode(), "mine")
    job = wire.decode(second.body)
    assert (job.id, wire.decode_args(job.args)) == (made, ["no id"])


async def test_a_worker_runs_what_sql_put_by_the_tasks_own_rules(
    engine: PostgresEngine, ask: Ask, postgres_url: str, schema: str
) -> None:
    """The queue, the priority and max_crashes are the caller's; timeout, result and strategies the task's."""
    app = App(f"{postgres_url}?schema={schema}")
    seen: list[object] = []

    @app.task(name="mail.send", queue="mail", on_success=archive, result_ttl="1h")
    async def send(to: str, *, subject: str = "none") -> str:
        seen.append((to, subject))
        return subject

    @app.task(name="mail.fail", on_error=dead)
    async def fail() -> None:
        raise ValueError

    declared = await ask(
        """'mail.send', '{"args": ["a@b.c"], "kwargs": {"subject": "hi"}}', '{"queue": "mail"}'"""
    )
    unsaid = await ask("""'mail.send', '["d@e.f"]'""")  # in "default", and not where the task is declared
    failed = await ask("'mail.fail', '[]'")
    stranger = await ask("'mail.unknown', '[]'")
    unfit = await ask("""'mail.send', '{"args": [1]}'""")
    lanes = [Lane({"default": 1, "mail": 1}, 2)]
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=lanes)).run()

    assert sorted(seen, key=str) == [("a@b.c", "hi"), ("d@e.f", "none")]
    for job_id, result in ((declared, b'"hi"'), (unsaid, b'"none"')):
        info = await info_of(engine, job_id)
        assert (info.state, info.result) == (State.DONE, result)
    assert (await info_of(engine, failed)).reason == "failed"
    assert (await info_of(engine, stranger)).parked
    assert (await info_of(engine, unfit)).reason == "broken"
    await app.aclose()


async def test_a_trigger_puts_a_job_with_the_row(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """Whoever inserts, in whatever search_path; the job is there if and only if the row is."""
    await connection.execute(
        f"""
        CREATE TABLE "{schema}".orders (id bigint PRIMARY KEY, email text);
        CREATE FUNCTION "{schema}".order_placed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM "{schema}".enqueue('orders.confirm', jsonb_build_array(NEW.id, NEW.email),
                jsonb_build_object('unique_key', 'confirm:' || NEW.id, 'delay', interval '1 ms'));
            RETURN NEW;
        END $$;
        CREATE TRIGGER order_placed AFTER INSERT ON "{schema}".orders
            FOR EACH ROW EXECUTE FUNCTION "{schema}".order_placed();
        """
    )
    insert = f'INSERT INTO "{schema}".orders SELECT n, $1 FROM generate_series($2::bigint, $3::bigint) AS n'
    await connection.execute("SET search_path TO pg_catalog")
    await connection.execute(insert, "O'Hara % <é>", 1, 3)
    undone = connection.transaction()
    await undone.start()
    await connection.execute(insert, "lost", 4, 5)
    await undone.rollback()

    found: list[Lease] = []
    async with asyncio.timeout(10):
        while len(found) < 3:
            found += await take(engine)
    jobs = [wire.decode(lease.body) for lease in found]
    assert [wire.decode_args(job.args) for job in jobs] == [[n, "O'Hara % <é>"] for n in (1, 2, 3)]
    assert [job.unique for job in jobs] == ["confirm:1", "confirm:2", "confirm:3"]


async def test_workers_are_woken_only_if_that_is_asked_for(
    ask: Ask, connection: asyncpg.Connection, schema: str
) -> None:
    heard: list[str] = []
    await connection.add_listener(f"propolis:{schema}", lambda *arguments: heard.append(arguments[-1]))

    await ask("'t', '[]', jsonb_build_object('queue', 'silent')")
    await ask("'t', '[]', jsonb_build_object('queue', 'loud', 'notify', true)")

    async with asyncio.timeout(10):
        while not heard:
            await connection.fetchval("SELECT 1")
    assert heard == ["loud"]


async def test_a_role_needs_these_rights_and_no_more(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """Those that docs/postgres.md names; the function does not lend its owner's."""
    role = f"r{schema}"
    put = f"SELECT \"{schema}\".enqueue('t', '[]', jsonb_build_object('job_id', 'mine', 'unique_key', 'u'))"
    await connection.execute(f'CREATE ROLE "{role}"')
    try:
        await connection.execute(f'GRANT USAGE ON SCHEMA "{schema}" TO "{role}"')
        await connection.execute(f'SET ROLE "{role}"')
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(put)
        await connection.execute("RESET ROLE")
        await connection.execute(
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{schema}" TO "{role}";'
            f'GRANT USAGE ON ALL SEQUENCES IN SCHEMA "{schema}" TO "{role}"; SET ROLE "{role}"'
        )
        assert await connection.fetchval(put) == "mine"
        assert [lease.id for lease in await take(engine)] == ["mine"]
    finally:
        await connection.execute(f'RESET ROLE; DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.parametrize("name", ["jobs of mine", "Größe%s"])
async def test_psql_can_put_jobs(postgres_url: str, connection: asyncpg.Connection, name: str) -> None:
    """The real binary, in a schema of any name: two ways to say it, and an error that a person can read."""
    psql = next(path.parent / "psql" for path in candidates("postgres") if path.is_file())
    engine = await PostgresEngine(postgres_url, schema=name).open()

    async def psql_run(*lines: str) -> subprocess.CompletedProcess[str]:
        command = [
            str(psql),
            postgres_url,
            "-X",
            "-A",
            "-t",
            "-v",
            "ON_ERROR_STOP=1",
            "-v",
            f"propolis={name}",
        ]
        text = "\n".join(lines)
        return await asyncio.to_thread(
            lambda: subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        )

    try:
        put = await psql_run(
            """SELECT :"propolis".enqueue('mail.send', '{"args": ["a@b.c"]}', '{"queue": "mail", """
            """"delay": "0"}');""",
            "BEGIN;",
            """SELECT :"propolis".enqueue('mail.send', '["lost"]', '{"queue": "mail"}');""",
            "ROLLBACK;",
            """SELECT :"propolis".enqueue('{"task": "mail.send", "queue": "mail", "args": ["raw"]}');""",
        )
        refused = await psql_run("""SELECT :"propolis".enqueue('mail.send', '{"to": "a@b.c"}');""")
        leases = await take(engine, "mail")
        assert put.returncode == 0, put.stderr
        first, _, _, _, last = put.stdout.split()
        assert [lease.id for lease in leases] == [first, last]
        assert [wire.decode_args(wire.decode(lease.body).args) for lease in leases] == [["a@b.c"], ["raw"]]
        assert refused.returncode == 3
        assert 'the payload has an unknown field "to"' in refused.stderr
        assert 'HINT:  arguments belong into "args"' in refused.stderr
    finally:
        await engine.close()
        await connection.execute(dropped(name))


async def test_the_server_knows_the_fields_of_the_wire_format(engine: PostgresEngine, ask: Ask) -> None:
    """What is new in Python must not be a stranger here: every job of Python's comes through both doors."""
    full = a_job(
        1,
        id="full",
        queue="q",
        priority=3,
        delay_ms=1,
        due_at=datetime(2099, 1, 1, tzinfo=UTC),
        expires_in_ms=5,
        expires_at=datetime(2099, 1, 2, tzinfo=UTC),
        timeout_ms=7,
        chosen=True,
        unique="u",
        unique_until=UniqueUntil.STARTED,
        key="k",
        max_crashes=4,
        result_ttl_ms=9,
        on_success=archive,
        on_error=dead,
        on_timeout=dead,
        headers={"a": "b"},
        kwargs=msgspec.Raw(b'{"a":1}'),
    )
    body = json.loads(wire.encode(full))
    left_out = {"batch", "member", "unknown", *body}
    assert {field.name for field in msgspec.structs.fields(Envelope)} <= left_out

    assert await ask("$1", json.dumps(body)) == "full"
    fields = {name: value for name, value in body.items() if name not in ("task", "id", "unique")}
    again = await ask("$1, $2, jsonb_build_object('job_id', 'again')", full.task, json.dumps(fields))
    stored = json.loads((await info_of(engine, again)).body)
    assert {**stored, "id": "full", "unique": "u"} == {**body, "v": 1}


def test_the_documentation_of_the_door_names_every_option() -> None:
    page = (Path(__file__).parents[3] / "docs" / "postgres.md").read_text(encoding="utf-8")
    offered = re.search(r"offered text\[\] := '{(.*?)}'", load_functions("postgres"), re.DOTALL)
    assert offered is not None
    names = [name.strip() for name in offered[1].split(",")]
    assert len(names) == 16
    assert [name for name in names if f"`{name}`" not in page] == []


async def test_the_doors_have_the_parameters_that_they_have_forever(
    engine: PostgresEngine, connection: asyncpg.Connection, schema: str
) -> None:
    """A further one, even with a default, would make every call of today ambiguous."""
    rows = await connection.fetch(
        "SELECT pg_get_function_arguments(oid) FROM pg_proc WHERE pronamespace = $1::regnamespace", schema
    )
    assert sorted(row[0] for row in rows) == [
        "envelope text",
        "task text, payload jsonb, options jsonb DEFAULT '{}'::jsonb",
    ]


@pytest.mark.parametrize("field", ["due_at", "expires_at"])
@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
async def test_times_that_no_client_can_show_are_refused(
    engine: PostgresEngine, ask: Ask, field: str, moment: str
) -> None:
    """S2.29: one such job would make every page of jobs that it is on unreadable."""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="beyond what clients can show"):
        await ask("$1", json.dumps({"task": "t", field: moment}))

    assert await take(engine) == []


@pytest.mark.parametrize("value", [["x"], [], {}, 1, None])
async def test_headers_are_strings_and_not_lists_of_them(ask: Ask, value: object) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="headers"):
        await ask("'t', '[]', jsonb_build_object('headers', $1::jsonb)", json.dumps({"a": value}))


async def test_a_job_that_is_there_already_is_named_also_where_the_queue_is_too_full(
    engine: PostgresEngine, ask: Ask
) -> None:
    """I12: a cap binds what would be added."""
    first = await ask("'t', '[]', jsonb_build_object('unique_key', 'k')")
    await ask("'t', '[]'")
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    assert await ask("'t', '[]', jsonb_build_object('unique_key', 'k')") == first

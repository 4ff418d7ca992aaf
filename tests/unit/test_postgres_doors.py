"""The door for any language: `SELECT skep.enqueue(...)`, from psql, from triggers, from any client."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from skep import App, State, archive, dead, wire
from skep.batch import Batch
from skep.broker import Rule, RuleKind, Scope
from skep.brokers.postgres import PostgresBroker
from skep.job import Job, Lease, Record, UniqueUntil
from skep.testing.binaries import candidates
from skep.testing.make import HOLDER, SPAN, a_job
from skep.worker import Lane, Mode, Settings, Worker

Ask = Callable[..., Any]


@pytest_asyncio.fixture
async def engine(postgres_url: str, schema: str) -> AsyncIterator[PostgresBroker]:
    handle = await PostgresBroker(postgres_url, schema=schema).open()
    yield handle
    await handle.close()


@pytest_asyncio.fixture
async def connection(postgres_url: str) -> AsyncIterator[asyncpg.Connection]:
    opened = await asyncpg.connect(postgres_url)
    yield opened
    await opened.close()


@pytest_asyncio.fixture
async def ask(engine: PostgresBroker, connection: asyncpg.Connection, schema: str) -> Ask:
    """`SELECT skep.enqueue(<these words>)`, in the schema of the test."""

    async def enqueue(words: str, *args: object) -> Any:
        return await connection.fetchval(f'SELECT "{schema}".enqueue({words})', *args)

    return enqueue


async def take(engine: PostgresBroker, queue: str = "default") -> list[Lease]:
    return await engine.lease({queue: 10}, span=SPAN, holder=HOLDER)


async def record_of(engine: PostgresBroker, job_id: str) -> Record:
    record = await engine.get(job_id)
    assert record is not None
    return record


async def test_a_task_and_its_arguments_are_enough(engine: PostgresBroker, ask: Ask) -> None:
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


async def test_everything_that_python_can_say_can_be_said_by_name(engine: PostgresBroker, ask: Ask) -> None:
    await engine.put_batch(Batch(id="b"), seal=False)
    moment = datetime(2100, 1, 31, 9, 0, 0, 250000, tzinfo=UTC)
    job_id = await ask(
        """
        'mail.send', '{"args": [1], "priority": 1, "on_error": {"do": "dead"}, "member": 3}',
        queue => 'mail', due_at => '2100-01-31 10:00:00.25+01', priority => -7, job_id => 'mine',
        unique_key => 'u', unique_until => 'started', limit_key => 'k', expires_in => '80 years',
        expires_at => '2100-02-01 00:00:00+00', timeout => '1.5 seconds', result_ttl => '1 hour',
        max_crashes => 9, batch => 'b', headers => '{"traceparent": "00-x"}'"""
    )

    assert job_id == "mine"
    record = await record_of(engine, "mine")
    job = wire.decode(record.body)
    assert job == Job(
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
    assert (record.due_at, record.queue, record.priority) == (moment, "mail", -7)
    assert (record.unique, record.key, record.batch, record.member) == ("u", "k", "b", 3)
    assert record.expires_at == datetime(2100, 2, 1, tzinfo=UTC)


async def test_a_delay_is_measured_by_the_server(engine: PostgresBroker, ask: Ask) -> None:
    """S2.18, S2.29: also one of a year and more."""
    record = await record_of(engine, await ask("'t', '[]', delay => '1 year 1 day'"))

    assert record.due_at - record.put_at == timedelta(days=365.25 + 1)
    assert await take(engine) == []


async def test_a_second_put_gives_the_job_that_is_there(engine: PostgresBroker, ask: Ask) -> None:
    first = await ask("'t', '[1]', unique_key => 'u'")
    assert await ask("'t', '[2]', unique_key => 'u'") == first
    assert await ask("'t', '[3]', job_id => 'mine'") == "mine"
    assert await ask("'t', '[4]', job_id => 'mine'") == "mine"
    assert len(await take(engine)) == 2
    assert await ask("'t', '[5]', job_id => 'mine'") == "mine"
    assert await take(engine) == []


WRONG = [
    ("'mail.send', '{\"arg\": [1]}'", 'unknown field "arg"', "kwargs"),
    ("'mail.send', '[1'", "invalid input syntax for type json", ""),
    ("'mail.send', '7'", "needs a task and a payload", ""),
    ("'mail.send', NULL", "needs a task and a payload", ""),
    ("NULL, '[]'", "needs a task and a payload", ""),
    ("'mail send', '[]'", '"task"', "white space"),
    ("'', '[]'", '"task"', ""),
    ("'t', '[]', queue => 'a b'", '"queue"', "letters"),
    ("'t', '[]', job_id => 'a b'", '"id"', "visible"),
    ("'t', '[]', priority => 101", '"priority"', "-100 to 100"),
    ("'t', '{\"priority\": 1.5}'", '"priority"', "whole"),
    ("'t', '{\"args\": {}}'", '"args"', "array"),
    ("'t', '{\"kwargs\": []}'", '"kwargs"', "object"),
    ("'t', '[]', headers => '{\"a\": 1}'", '"headers"', "strings"),
    ("'t', '[]', headers => '[]'", '"headers"', "object"),
    ("'t', '[]', delay => '-1 second'", '"delay_ms"', "100 years"),
    ("'t', '[]', timeout => '101 years'", '"timeout_ms"', "100 years"),
    ("'t', '[]', delay => '1 s', due_at => now()", "both a delay and a time", ""),
    ("'t', '{\"due_at\": \"tomorrow\"}'", '"due_at"', "offset"),
    ("'t', '[]', due_at => 'infinity'", '"due_at"', "offset"),
    ("'t', '[]', unique_key => ''", '"unique"', "512"),
    ("'t', '[]', unique_key => 'u', unique_until => 'never'", '"unique_until"', "started"),
    ("'t', '[]', max_crashes => 0", '"max_crashes"', "from 1"),
    ("'t', '[]', max_crashes => 32768", '"max_crashes"', "to 32767"),
    ("'t', '{\"on_error\": \"dead\"}'", '"on_error"', "object"),
    ("'t', '{\"v\": 2}'", '"v"', "version 1"),
    ("'t', '[]', batch => 'nobody'", "unknown batch", ""),
    ("'t', jsonb_build_array(repeat('x', 300000))", "262144 is the limit", "reference"),
    ("'not json'", "not JSON", "enqueue"),
    ('\'{"id": "x"}\'', "names no task", ""),
    ("'[]'", "names no task", ""),
    ("NULL", "names no task", ""),
]


@pytest.mark.parametrize(("words", "message", "hint"), WRONG)
async def test_what_is_wrong_is_told_and_nothing_is_put(
    engine: PostgresBroker, ask: Ask, words: str, message: str, hint: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as raised:
        await ask(words)

    assert message in str(raised.value)
    assert hint in (raised.value.hint or "")
    assert await engine.queues() == {}


async def test_a_full_queue_refuses(engine: PostgresBroker, ask: Ask) -> None:
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))
    await ask("'t', '[]'")
    with pytest.raises(asyncpg.PostgresError, match="queue full"):
        await ask("'t', '[]'")


async def test_an_envelope_is_kept_byte_for_byte_and_gets_an_id_if_it_has_none(
    engine: PostgresBroker, ask: Ask
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
    engine: PostgresBroker, ask: Ask, postgres_url: str, schema: str
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
        """'mail.send', '{"args": ["a@b.c"], "kwargs": {"subject": "hi"}}', queue => 'mail'"""
    )
    unsaid = await ask("""'mail.send', '["d@e.f"]'""")  # in "default", and not where the task is declared
    failed = await ask("'mail.fail', '[]'")
    stranger = await ask("'mail.unknown', '[]'")
    unfit = await ask("""'mail.send', '{"args": [1]}'""")
    lanes = [Lane({"default": 1, "mail": 1}, 2)]
    await Worker(app, Settings(mode=Mode.UNTIL_EMPTY, lanes=lanes)).run()

    assert sorted(seen, key=str) == [("a@b.c", "hi"), ("d@e.f", "none")]
    for job_id, result in ((declared, b'"hi"'), (unsaid, b'"none"')):
        record = await record_of(engine, job_id)
        assert (record.state, record.result) == (State.DONE, result)
    assert (await record_of(engine, failed)).reason == "failed"
    assert (await record_of(engine, stranger)).reason == "broken"
    assert (await record_of(engine, unfit)).reason == "broken"
    await app.aclose()


async def test_a_trigger_puts_a_job_with_the_row(
    engine: PostgresBroker, connection: asyncpg.Connection, schema: str
) -> None:
    """Whoever inserts, in whatever search_path; the job is there if and only if the row is."""
    await connection.execute(
        f"""
        CREATE TABLE "{schema}".orders (id bigint PRIMARY KEY, email text);
        CREATE FUNCTION "{schema}".order_placed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM "{schema}".enqueue('orders.confirm', jsonb_build_array(NEW.id, NEW.email),
                                       unique_key => 'confirm:' || NEW.id, delay => interval '1 ms');
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
    await connection.add_listener(f"skep:{schema}", lambda *facts: heard.append(facts[-1]))

    await ask("'t', '[]', queue => 'silent'")
    await ask("'t', '[]', queue => 'loud', notify => true")

    async with asyncio.timeout(10):
        while not heard:
            await connection.fetchval("SELECT 1")
    assert heard == ["loud"]


async def test_a_role_needs_these_rights_and_no_more(
    engine: PostgresBroker, connection: asyncpg.Connection, schema: str
) -> None:
    """Those that docs/postgres.md names; the function does not lend its owner's."""
    role = f"r{schema}"
    put = f"SELECT \"{schema}\".enqueue('t', '[]', job_id => 'mine', unique_key => 'u')"
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
    engine = await PostgresBroker(postgres_url, schema=name).open()

    async def told(*lines: str) -> subprocess.CompletedProcess[str]:
        command = [str(psql), postgres_url, "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-v", f"skep={name}"]
        text = "\n".join(lines)
        return await asyncio.to_thread(
            lambda: subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        )

    try:
        put = await told(
            """SELECT :"skep".enqueue('mail.send', '{"args": ["a@b.c"]}', queue => 'mail', delay => '0');""",
            "BEGIN;",
            """SELECT :"skep".enqueue('mail.send', '["lost"]', 'mail');""",
            "ROLLBACK;",
            """SELECT :"skep".enqueue('{"task": "mail.send", "queue": "mail", "args": ["raw"]}');""",
        )
        refused = await told("""SELECT :"skep".enqueue('mail.send', '{"to": "a@b.c"}');""")
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
        await connection.execute(f'DROP SCHEMA "{name}" CASCADE')


async def test_the_server_knows_the_fields_of_the_wire_format(engine: PostgresBroker, ask: Ask) -> None:
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
    assert {field.name for field in msgspec.structs.fields(Job)} <= left_out

    assert await ask("$1", json.dumps(body)) == "full"
    fields = {name: value for name, value in body.items() if name not in ("task", "id", "unique")}
    again = await ask("$1, $2, job_id => 'again'", full.task, json.dumps(fields))
    stored = json.loads((await record_of(engine, again)).body)
    assert {**stored, "id": "full", "unique": "u"} == {**body, "v": 1}


def test_the_documentation_of_the_door_names_every_parameter() -> None:
    root = Path(__file__).parents[2]
    script = (root / "src/skep/brokers/sql/postgres/0003_doors.sql").read_text(encoding="utf-8")
    page = (root / "docs" / "postgres.md").read_text(encoding="utf-8")
    head = script.partition("CREATE FUNCTION enqueue(\n")[2].partition(") RETURNS")[0]
    names = [line.split()[0] for line in head.strip().splitlines()]
    assert len(names) == 18
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("field", ["due_at", "expires_at"])
@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
async def test_times_that_no_client_can_show_are_refused(
    engine: PostgresBroker, ask: Ask, field: str, moment: str
) -> None:
    """S2.29: one such job would make every page of jobs that it is on unreadable."""
    with pytest.raises(asyncpg.InvalidParameterValueError, match="beyond what clients can show"):
        await ask("$1", json.dumps({"task": "t", field: moment}))

    assert await take(engine) == []


@pytest.mark.parametrize("value", [["x"], [], {}, 1, None])
async def test_headers_are_strings_and_not_lists_of_them(ask: Ask, value: object) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="headers"):
        await ask("'t', '[]', headers => $1", json.dumps({"a": value}))


async def test_a_job_that_is_there_already_is_named_also_where_the_queue_is_too_full(
    engine: PostgresBroker, ask: Ask
) -> None:
    """I12: a cap binds what would be added."""
    first = await ask("'t', '[]', unique_key => 'k'")
    await ask("'t', '[]'")
    await engine.add_rule(Rule(RuleKind.CAP, Scope.QUEUE, "default", 1))

    assert await ask("'t', '[]', unique_key => 'k'") == first

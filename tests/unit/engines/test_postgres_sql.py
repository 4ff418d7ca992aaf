"""The SQL of the PostgreSQL engine, as text."""

from __future__ import annotations

import re

import pytest

from propolis.engines.shared.statements import load_functions, load_migrations, load_statements

TEXTS = {
    **{file: text for _, file, text in load_migrations("postgres")},
    "functions": load_functions("postgres"),
    **load_statements("postgres"),
}
# A released migration is never changed.  What it lacks comes in the next one, whose checksum is added here.
FROZEN = {
    "0001_tables.sql": "df8877ce85a270989e7db35255d8f062c1dfc024319e2788bd1c6bac59a3afc6",
    "0002_limits.sql": "1b51a4b1f184f19de5c4ae883b2359049927ccd392d9e11c02ed9237ec0a1599",
    "0003_places.sql": "f3c98e5948f7edcbe38b81d5a866baa5e742a2fcf96e16cc600a6da61c4ceffa",
}
# What came with 15, 16, 17 and 18, as far as one could be tempted.
TOO_NEW = re.compile(
    r"\b(MERGE\s+INTO|NULLS\s+NOT\s+DISTINCT|security_invoker|regexp_(?:count|instr|like|substr)|any_value|"
    r"array_(?:shuffle|sample|reverse|sort)|random_normal|JSON_(?:TABLE|EXISTS|QUERY|VALUE|OBJECT|ARRAY|SCALAR)|"
    r"IS\s+JSON|merge_action|RETURNING\s+WITH|uuidv[47]|casefold|transaction_timeout|VIRTUAL|"
    r"WITHOUT\s+OVERLAPS)\b|0x[0-9a-f]+|\d_\d",
    re.IGNORECASE,
)
SESSION_STATE = re.compile(
    r"\b(pg_(?:try_)?advisory\w*|PREPARE\b(?!D)|CREATE\s+TEMP|DECLARE\s+\w+\s+CURSOR)", re.IGNORECASE
)

SCANLESS = re.compile(r"enable_(?:seqscan|nestloop) = off(?!.*jit = off)")
FUNCTION = re.compile(r"CREATE FUNCTION.*?\$\$.*?\$\$", re.DOTALL)
MEMBERS_JOINED = re.compile(
    r"(?:WITH\s+ORDINALITY\s+AS\s+m\s*\([^)]*\)|members_of\(\w+\)\s+AS\s+\w+),\s*unnest\("
)
# A star over a function of the set is no star over a table: those are of one text.
STAR = re.compile(r"(?:\bSELECT|\bRETURNING|\bDISTINCT ON \([^)]*\)|,)\s*\*(?! FROM \w+\()|\b[a-z_]\w*\.\*")
POSITIONAL = re.compile(r"INSERT\s+INTO\s+[\w.]+(?:\s+AS\s+\w+)?\s+(?!\(|AS\b)\w+")


def without_comments(text: str) -> str:
    return re.sub(r"--.*", "", text)


def test_migrations_stay_as_they_are() -> None:
    assert {each.file: each.checksum for each in load_migrations("postgres")} == FROZEN


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_used_that_postgresql_14_does_not_have(name: str) -> None:
    assert TOO_NEW.findall(without_comments(TEXTS[name])) == []


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_depends_on_a_session(name: str) -> None:
    """F30: no advisory lock, no named statement, no temporary table, no cursor: a pooler breaks them."""
    assert SESSION_STATE.findall(without_comments(TEXTS[name])) == []


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_forbidden_to_scan_is_forbidden_to_be_compiled(name: str) -> None:
    """What has to be made all the same costs ten thousand millions, and is compiled anew at each call."""
    assert [line for line in TEXTS[name].splitlines() if SCANLESS.search(line)] == []


def nameless(text: str) -> list[str]:
    plain = re.sub(r"--.*|'[^']*'", "", text)
    return STAR.findall(plain) + POSITIONAL.findall(plain) + row_variables(plain)


def row_variables(text: str) -> list[str]:
    """Variables as wide as a table."""
    tables = {
        name for _, _, each in load_migrations("postgres") for name in re.findall(r"CREATE TABLE (\w+)", each)
    }
    return [
        name
        for name in re.findall(r"^ +(?!RETURN)\w+ (\w+)(?: :=.*)?;$", text, re.MULTILINE)
        if name in tables
    ]


@pytest.mark.parametrize("name", ["functions", *load_statements("postgres")])
def test_columns_of_tables_are_named(name: str) -> None:
    """Functions of an older set go on when a migration adds a column."""
    assert nameless(TEXTS[name]) == []


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM ready",
        "SELECT j.* FROM ready AS j",
        "DELETE FROM ready RETURNING * INTO j;",
        "SELECT a, * FROM ready",
        "INSERT INTO tally VALUES (1)",
        "INSERT INTO tally\nSELECT 1",
        "INSERT INTO records AS r VALUES (1)",
        "DECLARE\n    b batch;\nBEGIN",
    ],
)
def test_columns_without_names_are_found(text: str) -> None:
    assert nameless(text)


@pytest.mark.parametrize(
    "text", ["SELECT count(*), 2 * n FROM t", "INSERT INTO t (a) VALUES (1)", "SELECT * FROM answer_rows(q)"]
)
def test_columns_with_names_are_let_pass(text: str) -> None:
    assert nameless(text) == []


def test_what_clients_call_carries_its_search_path() -> None:
    """Nobody else's tables and functions are taken for ours, whatever a session has set."""
    called = set(re.findall(r"\bpropolis_f\.(\w+)", "".join(load_statements("postgres").values())))
    assert len(called) > 20
    heads = dict(re.findall(r"CREATE FUNCTION (\w+)\((.*?)\$\$", TEXTS["functions"], re.DOTALL))
    assert [name for name in called if "SET search_path FROM CURRENT" not in heads[name]] == ["moment"]


def looping(text: str) -> list[str]:
    joining = [each for each in FUNCTION.findall(text) if MEMBERS_JOINED.search(each)]
    return [each for each in joining if "enable_nestloop = off" not in each]


@pytest.mark.parametrize("name", TEXTS)
def test_members_of_a_chunk_are_not_joined_by_a_loop_in_a_loop(name: str) -> None:
    """Nobody tells the planner how many there are: a thousand were renewed in 65 ms, and are in 5."""
    assert looping(TEXTS[name]) == []


def test_these_tests_can_fail() -> None:
    joined = "FROM chunk, members_of(chunk) AS m, unnest(numbers) AS n $$"
    assert looping("CREATE FUNCTION f() AS $$ SELECT " + joined)
    assert not looping("CREATE FUNCTION f() SET enable_nestloop = off AS $$ SELECT " + joined)
    assert SCANLESS.search("SET enable_seqscan = off AS $$")
    assert TOO_NEW.search("MERGE INTO t USING s")
    assert SESSION_STATE.search("SELECT pg_advisory_xact_lock(1)")
    assert not SESSION_STATE.search("SELECT gid FROM pg_prepared_xacts")

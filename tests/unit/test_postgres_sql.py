"""The SQL of the PostgreSQL engine, as text."""

from __future__ import annotations

import re

import pytest

from skep.brokers.statements import load_migrations, load_statements

TEXTS = {
    **{file: text for _, file, text in load_migrations("postgres")},
    **load_statements("postgres"),
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


def without_comments(text: str) -> str:
    return re.sub(r"--.*", "", text)


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

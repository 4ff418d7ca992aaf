"""What a command may declare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from propolis.app.commands.template import Template
from propolis.errors import BadSetting

values = st.text() | st.integers() | st.floats(allow_nan=False)


@pytest.mark.parametrize("program", [["{program}"], ["/bin/{program}", "x"], ["{p:any}"], [""]])
def test_a_place_for_the_program_is_a_bad_setting(program: list[str]) -> None:
    with pytest.raises(BadSetting, match="never the program"):
        Template("t", program)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "}",
        "{}",
        "{0}",
        "{a b}",
        "{a.b}",
        "{a[0]}",
        "{a!r}",
        "{a:>5}",
        "{a:{b}}",
        "{class}",
        "{_job}",
        "{self}",
    ],
)
def test_what_is_no_place_is_a_bad_setting(text: str) -> None:
    for program, stdin in ((["true", text], None), (["true"], text)):
        with pytest.raises(BadSetting, match=r"a place is written \{name\}"):
            Template("t", program, stdin)


def test_a_line_or_nothing_is_no_program() -> None:
    nothing: list[str] = []
    for program in ("ls -l", nothing):
        with pytest.raises(BadSetting, match="as a list"):
            Template("t", program)
    with pytest.raises(BadSetting, match="as a string"):
        Template("t", ["sleep", 5])  # type: ignore[list-item]  # what mypy would find
    with pytest.raises(BadSetting, match="NUL"):
        Template("t", ["echo", "{a}\0"])


@pytest.mark.parametrize(
    "program",
    [
        ["sh", "-c", "wc -l {file}"],
        ["/bin/bash", "-lc", "{script}"],
        ["bash", "-o", "pipefail", "-c", "{script}"],
        ["bash", "-c", "-e", "{script}"],
        ["bash", "--rcfile", "{file}", "-c", "true"],
        ["sh", "{file}"],
        ["sh", "-c"],
        ["sh", "-s"],
        ["nice", "sh", "-c", "wc -l {file}"],
        ["env", "A={file}", "zsh", "-c", "{script}"],
    ],
)
def test_a_shell_is_not_given_a_script_by_a_job(program: list[str]) -> None:
    with pytest.raises(BadSetting, match="keep its script fixed"):
        Template("t", program, "{text}")


@pytest.mark.parametrize(
    "program",
    [
        ["sh", "-c", 'wc -l "$1"', "sh", "{file}"],
        ["bash", "-o", "pipefail", "-ec", 'wc -l "$1"', "bash", "{file}"],
        ["sh", "fixed.sh"],
        ["grep", "-r", "-esh", "{file}"],  # as two words, sh could be run
        ["env", "A={file}", "sh", "-c", "echo $A"],
    ],
)
def test_a_fixed_script_takes_values_behind_it(program: list[str]) -> None:
    Template("t", program)


def test_a_place_may_come_again() -> None:
    template = Template("t", ["cp", "{a}", "{b}/{a}"], "{c}{a}")
    assert template.names == ["a", "b", "c"]
    assert template.argv({"a": "x", "b": "y"}) == ["cp", "x", "y/x"]


@pytest.mark.parametrize("program", [["t", "{a}{b}"], ["t", "{a}-{b}"]])
def test_an_empty_value_does_not_let_an_option_begin_behind_it(program: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\{a:any\}"):
        Template("t", program).argv({"a": "", "b": "-x"})


@given(st.lists(values, min_size=3, max_size=3))
def test_argv_is_as_long_as_declared_and_begins_with_the_program(given: list[str | int | float]) -> None:
    template = Template("t", ["program", "{a}", "--b={b}", "{c:any}"])
    found = dict(zip("abc", given, strict=True))
    try:
        argv = template.argv(found)
    except ValueError:
        assert any("\0" in str(value) for value in given) or str(given[0]).startswith("-")
    else:
        assert argv == ["program", str(given[0]), f"--b={given[1]}", str(given[2])]
        assert not argv[1].startswith("-")

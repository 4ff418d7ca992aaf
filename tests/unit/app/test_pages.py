"""The pages on keys, full queues and breakers work as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"


def run_program_of(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(program, page, "exec"), {"__name__": "page"})


def test_keys_are_made_as_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run_program_of("keys.md")

    assert capsys.readouterr().out.splitlines() == [
        "tenant:7 vip None",
        "False True True",
        'bill ["ann","may"]',
    ]


def test_queues_are_full_and_free_as_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    run_program_of("back-pressure.md")

    assert capsys.readouterr().out.splitlines() == ["mail jobs 2 3", "True 3", "True"]


def test_a_breaker_opens_and_closes_as_the_page_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    run_program_of("breakers.md")

    assert capsys.readouterr().out.splitlines() == [
        "charge open",
        "task 'charge' is paused by breaker",
        "charge closed",
        "0 wait",
    ]

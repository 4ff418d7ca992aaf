"""docs/limits.md works as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_limits_are_put_shown_and_removed_as_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(PROGRAMS[0], "limits.py", "exec"), {"__name__": "limits"})

    use, *_, key, queue, task, answers = capsys.readouterr().out.splitlines()
    assert use == "0 of 3 run, 2 wait"
    assert key.startswith("key tenant:7 3 anna None")
    assert queue.startswith("queue crm 100 ben 20")
    assert task == "task crm.sync 50 anna None their server is small"
    assert answers == "False True"


def test_rates_and_limits_for_many_keys_are_put_as_the_page_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exec(compile(PROGRAMS[1], "limits.py", "exec"), {"__name__": "limits"})

    exact, prefix, task = capsys.readouterr().out.splitlines()
    assert exact == "key 'tenant:7' runs 0 of 20 and may start 1 at once at its rate of 1000/min"
    assert prefix.startswith("key 'tenant:8', by the limit on key 'tenant:*', runs 0 of 3 and may start 20 ")
    assert task == "key 'user:1', by the limit on each key of task 'export', runs 0 of 5"


def test_a_rate_limited_service_is_called_as_often_as_it_allows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[3], "limits.py", "exec"), {"__name__": "limits"})

    assert capsys.readouterr().out == "[10, 10, 5]\n"


def test_limits_are_declared_as_the_page_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(PROGRAMS[2], "declared.py", "exec"), {"__name__": "declared"})

    assert capsys.readouterr().out.splitlines() == [
        "task sync 10 None 1 code",
        "task_key export * 3 0:00:00.600000 20 code",
    ]

"""docs/keys.md works as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "keys.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_keys_are_made_as_the_page_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    exec(compile(PROGRAMS[0], "keys.py", "exec"), {"__name__": "keys"})

    assert capsys.readouterr().out.splitlines() == [
        "tenant:7 vip None",
        "False True True",
        'bill ["ann","may"]',
    ]

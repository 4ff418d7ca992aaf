"""The page about traces and errors works as written: docs/tracing.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tracing.md"


def run(program: str, name: str, folder: Path) -> str:
    (folder / f"{name}.py").write_text(program)
    command = [sys.executable, "-m", "propolis", "worker", f"{name}:app", "--until-empty"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_both_programs_work_and_the_first_prints_one_trace(tmp_path: Path) -> None:
    traced, reported = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    run(reported, "reported", tmp_path)
    printed = run(traced, "traced", tmp_path)
    assert "sent to ann@example.org" in printed
    spans = {
        span["name"]: span
        for text in re.findall(r"^\{.*?^\}", printed, re.MULTILINE | re.DOTALL)
        for span in [json.loads(text)]
    }
    assert {"send mail", "process mail"} <= set(spans)
    assert spans["process mail"]["parent_id"] == spans["send mail"]["context"]["span_id"]

"""Write docs/job.schema.json from the types of propolis: run it when a field of a job has changed."""

from __future__ import annotations

import json
from pathlib import Path

from propolis.core import wire

PATH = Path(__file__).resolve().parents[1] / "docs" / "job.schema.json"


def text() -> str:
    return json.dumps(wire.schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")

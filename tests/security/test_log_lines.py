"""Whoever reads a log can believe each line of it."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest

import propolis
from propolis.engines.shared.log_lines import LOGGERS

HOSTILE = "mail\n2026-01-01 ERROR root: all is lost\r\x1b[2K\u202egnp.exe\u2028"


def test_every_logger_of_ours_is_known() -> None:
    """S10: or else what it says would not be cleaned."""
    sources = Path(propolis.__file__).parent.rglob("*.py")
    named = {name for path in sources for name in re.findall(r'getLogger\("([^"]+)"\)', path.read_text())}
    assert named <= set(LOGGERS)


@pytest.mark.parametrize("name", LOGGERS)
def test_a_message_is_one_line_whatever_is_in_it(name: str) -> None:
    """S10: with any handler of the app's own."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        logger.error("no queue %s: %s", HOSTILE, ValueError(HOSTILE))
        logger.error("a plain %s", "one")
    finally:
        logger.removeHandler(handler)
    first, second, rest = written.getvalue().split("\n")
    assert first.isprintable()
    assert (second, rest) == ("a plain one", "")
    assert first.count("gnp.exe") == 2

"""How a worker and its child processes write their logs, where the app has not set that up in its own way."""

from __future__ import annotations

import logging
from typing import Any

from propolis.engines.address import masked_text

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTINUED = "  | "


class LogLines(logging.Formatter):
    """A message is one line, whatever is in it; the lines of a traceback begin as no message does.

    So nobody who gets a text into a log can write lines of it, or steer a terminal.  Passwords of URLs are
    masked, also in tracebacks: jobs, and drivers of their own, quote them.
    """

    def format(self, record: logging.LogRecord) -> str:
        record.exc_text = None  # as another formatter may have left it
        return masked_text(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _continued(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _continued(super().formatStack(stack_info))


def one_line(text: str) -> str:
    """`text` with every character that could end a line, move a cursor or turn the direction, spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _continued(text: str) -> str:
    return "\n".join(CONTINUED + one_line(line) for line in text.splitlines())


def log_to_stderr(level: int | str) -> None:
    """Unless the app has set logging up in its own way."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])

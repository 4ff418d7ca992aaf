"""How a worker and its child processes write their logs, where the app has not set that up in its own way."""

from __future__ import annotations

import json
import logging
import time
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from propolis.app.context import JobFilter
from propolis.core.job import storable, traceback_text
from propolis.engines.address import masked_text

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONTINUED = "  | "


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class TimedLines(logging.Formatter):
    """Lines with their time, of which all but the last digits are made once per second.

    A traceback is of bounded size.
    """

    _second: tuple[int, str] = (-1, "")

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return super().formatException(ei) if ei[1] is None else traceback_text(ei[1], ei[2]).rstrip("\n")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        if datefmt is not None:
            return super().formatTime(record, datefmt)
        second, text = self._second
        if second != int(record.created):
            second = int(record.created)
            text = time.strftime(self.default_time_format, self.converter(second))
            self._second = (second, text)
        assert self.default_msec_format is not None
        return self.default_msec_format % (text, record.msecs)


class LogLines(TimedLines):
    """A message is one line, whatever is in it; the lines of a traceback begin as no message does.

    So nobody who gets a text into a log can write lines of it, or steer a terminal.  Passwords of URLs are
    masked, also in tracebacks: jobs, and drivers of their own, quote them.  What is logged while a job runs
    names it at its end, unless it has the id of the job in it.
    """

    def format(self, record: logging.LogRecord) -> str:
        if self._fmt is FORMAT and not record.exc_info and not record.stack_info:  # in half the time
            text = f"{self.formatTime(record)} {record.levelname} {record.name}: {_with_job(record)}"
            return masked_text(text)
        record.exc_text = None  # as another formatter may have left it
        return masked_text(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = _with_job(record)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _continued(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _continued(super().formatStack(stack_info))


def _with_job(record: logging.LogRecord) -> str:
    message = record.getMessage()
    fields = record.__dict__
    job = fields.get("job")
    if job is not None and str(job) not in message:
        message += f" [{fields.get('task')} {job}, attempt {fields.get('attempt')}]"
    return one_line(message)


class JsonLines(TimedLines):
    """A record is one line with one JSON object, with the fields that its `extra` and a `JobFilter` gave it.

    Passwords of URLs are masked in them all.  Characters that could end a line or steer a terminal are
    escaped.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        given = record.__dict__.items()
        fields = own | {n: v for n, v in given if n not in _OF_EVERY_RECORD and v is not None} | own
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        line = _as_json(fields)
        if "://" in line:
            line = _as_json(_masked(msgspec.json.decode(line)))
        return line if line.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in line)


_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_ESCAPED = json.JSONEncoder(ensure_ascii=True).encode


def _escaped(character: str) -> str:
    return _ESCAPED(character)[1:-1]


def _text_of(value: object) -> str:
    try:
        return storable(str(value))
    except Exception as error:
        return f"(a {type(value).__name__} that cannot be shown: {type(error).__name__})"


UNSOUND = (TypeError, ValueError, OverflowError, RecursionError)  # of whatever somebody gives as a field
_encoder = msgspec.json.Encoder(enc_hook=_text_of)


def _as_json(fields: dict[str, Any]) -> str:
    try:
        return _encoder.encode(fields).decode()
    except UNSOUND:
        sound = {_text_of(name): _with_json(value) for name, value in fields.items()}
        return _encoder.encode(sound).decode()


def _with_json(value: object) -> object:
    try:
        _encoder.encode(value)
    except UNSOUND:
        return _text_of(value)
    return value


def _masked(value: Any) -> Any:
    match value:
        case str():
            return masked_text(value)
        case dict():
            return {masked_text(name): _masked(each) for name, each in value.items()}
        case list():
            return [_masked(each) for each in value]
    return value


def one_line(text: str) -> str:
    """`text` with every character that could end a line, move a cursor or turn the direction, spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _continued(text: str) -> str:
    return "\n".join(CONTINUED + one_line(line) for line in text.splitlines())


# --- setting it up -----------------------------------------------------------------------


class LogSetup(Struct, frozen=True):
    """How a process logs: everybody's level, our own, and the format."""

    level: int
    own_level: int = logging.NOTSET
    format: LogFormat = LogFormat.TEXT


class LineHandler(logging.StreamHandler[Any]):
    """Writes lines to the standard error, with the job that runs; each line is there when it returns."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._name_job = JobFilter(outside=None).filter

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._name_job(record)
            self.stream.write(self.format(record) + "\n")
            self.stream.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)


def log_to_stderr(level: int | str, format: LogFormat = LogFormat.TEXT) -> None:
    """Unless the app has set logging up in its own way."""
    formatter = JsonLines() if format is LogFormat.JSON else LogLines(FORMAT)
    logging.basicConfig(level=level, handlers=[LineHandler(formatter)])


def log_setup() -> LogSetup | None:
    """That of this process; None if nothing has been set up."""
    root = logging.getLogger()
    if not root.handlers:
        return None
    is_json = any(isinstance(handler.formatter, JsonLines) for handler in root.handlers)
    own_level = logging.getLogger("propolis").level
    return LogSetup(root.level, own_level, LogFormat.JSON if is_json else LogFormat.TEXT)


def log_as(setup: LogSetup) -> None:
    """As another process does, unless the app has set logging up here as well."""
    log_to_stderr(setup.level, setup.format)
    logging.getLogger("propolis").setLevel(setup.own_level)

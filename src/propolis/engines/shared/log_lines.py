"""A message in our logs is one line, whatever is in it: names, and what servers say, come from strangers."""

from __future__ import annotations

import logging

from propolis.core.job import MAX_PART, joined, traceback_parts

LOGGERS = (
    "propolis",
    "propolis.engines",
    "propolis.postgres",
    "propolis.redis",
    "propolis.schedules",
    "propolis.worker",
)


def one_line(record: logging.LogRecord) -> bool:
    """Spell out what could end the line, move a cursor, or turn the reading direction.

    A traceback stays, unless what was raised has a long text: then what formatters keep of it is shorter.
    """
    if record.exc_info and (error := record.exc_info[1]) is not None:
        parts = traceback_parts(error, record.exc_info[2])
        if max(map(len, parts)) > MAX_PART:
            record.exc_text = joined(parts)
    text = record.getMessage()
    if not text.isprintable():
        record.msg = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        record.args = ()
    return True


# Not the handlers: those are the app's.  And not their common parent alone, whose filters see none of theirs.
for name in LOGGERS:
    logging.getLogger(name).addFilter(one_line)

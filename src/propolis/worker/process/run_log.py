"""What the log has of the runs of jobs: which of them, and in which words."""

from __future__ import annotations

import logging
import random
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any

from propolis.app.context import Job, as_extra
from propolis.core.job import Dead, Error, Retried
from propolis.core.policy import AT_ONCE
from propolis.worker.attempt import LEFT, Attempt, Ended, Slot, own_frames
from propolis.worker.outcomes import raised
from propolis.worker.process.storms import FailureKind, Storm, Storms, shape_of
from propolis.worker.settings import LoggedRuns, Monotonic, Settings

log = logging.getLogger("propolis.worker")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

LOST = "lost"  # instead of an outcome, where none is recorded
MILLISECOND = timedelta(milliseconds=1)
_NO_JOB = dict.fromkeys(("job", "attempt", "queue"))


class RunLog:
    """One line for each run that is to have one.

    Its history says of a job that failed what the log says, unless the job is deleted; of one that is done
    nothing may be left but such a line.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Monotonic,
        *,
        choose: Callable[[int], int] = random.randrange,
    ) -> None:
        self._runs = LoggedRuns.named(settings.log_jobs)
        self.every_end = self._runs.one_in is not None  # is it to hear of runs that did not fail?
        self._every_run = self._runs.one_in == 1
        self._span, self._holder = settings.lease, settings.holder
        self._clock = clock
        self._choose = choose
        self._place = self._chosen = 0
        self.storms = Storms()
        self._template = vars(log.makeRecord(log.name, logging.INFO, __file__, 0, "", (), None, "ended"))

    def ended(self, attempt: Attempt, ended: Ended, slot: Slot) -> None:
        """Log it, if it is to be.  What a filter of the app raises is shown, and changes no outcome."""
        try:
            match ended.outcome:
                case Retried(error=Error() as error) | Dead(error=Error() as error):
                    if self._runs.failures:
                        self._log_failure(attempt, ended, slot, error)
                case outcome if self.every_end and slot.state not in LEFT and self._is_chosen():
                    name = LOST if outcome is None else type(outcome).__name__.lower()
                    fields = self._fields(attempt.job, slot, name)
                    self._log_quickly(f"{_named(fields)}, ended as {name}", fields)
        except Exception:
            traceback.print_exc()

    # --- runs that failed --------------------------------------------------------------------

    def _log_failure(self, attempt: Attempt, ended: Ended, slot: Slot, error: Error) -> None:
        outcome = type(ended.outcome).__name__.lower()
        self._sum_up(self.storms.over(self._clock()))
        kind = FailureKind(attempt.task.name, outcome, error.type, shape_of(error.message))
        in_full = self.storms.admits(kind, error.message, self._clock())
        if not (in_full or self._every_run):
            return
        fields = self._fields(attempt.job, slot, outcome)
        what = (error.type, error.message)
        match ended.outcome:
            case Retried(delay=delay):
                when = f"after {delay.total_seconds():g} s" if delay else "at once"
                log.warning(
                    "%s, failed and runs again %s: %s: %s",
                    _named(fields),
                    when,
                    *what,
                    extra=as_extra(fields),
                )
            case Dead(reason=reason, keep=keep):
                log.error(
                    "%s, is %s (%s): %s: %s",
                    _named(fields),
                    "deleted" if keep == AT_ONCE else "dead",
                    reason,
                    *what,
                    exc_info=_shown_of(raised(ended)) if error.traceback and in_full else None,
                    extra=as_extra(fields),
                )

    def sum_up(self) -> None:
        """Log how many failures were only counted, where that is due."""
        self._sum_up(self.storms.over(self._clock()))

    def end(self) -> None:
        """The same for all that were counted so far."""
        self._sum_up(self.storms.all_over())

    def _sum_up(self, storms: Iterable[tuple[FailureKind, Storm]]) -> None:
        for kind, storm in storms:
            if self._every_run:  # each of them has had its line
                continue
            log.log(
                logging.ERROR if kind.outcome == "dead" else logging.WARNING,
                "%s more of these within %.0f s: %s in %s, such as: %s",
                f"{storm.more:,}",
                max(1, self._clock() - storm.began),
                kind.error,
                kind.task,
                storm.message,
                extra=as_extra(
                    {
                        **_NO_JOB,  # least of all the one that runs while this is noticed
                        "task": kind.task,
                        "outcome": kind.outcome,
                        "error": kind.error,
                        "more": storm.more,
                        "worker": self._holder,
                    }
                ),
            )

    # --- all others --------------------------------------------------------------------------

    def _is_chosen(self) -> bool:
        """One in so many, each time another of them, so that no rhythm hides a task."""
        if self._every_run:
            return True
        assert self._runs.one_in is not None
        if self._place == 0:
            self._chosen = self._choose(self._runs.one_in)
        chosen = self._place == self._chosen
        self._place = (self._place + 1) % self._runs.one_in
        return chosen

    def _log_quickly(self, text: str, fields: dict[str, Any]) -> None:
        """As `log.info(text, extra=fields)`, in half the time: every line has the same place in the code."""
        if not log.isEnabledFor(logging.INFO):
            return
        if logging.getLogRecordFactory() is not logging.LogRecord:  # the app wants more in every record
            log.info(text, extra=as_extra(fields))
            return
        log.handle(RunRecord(self._template, text, fields))

    def _fields(self, job: Job, slot: Slot, outcome: str) -> dict[str, Any]:
        lease, envelope = job.lease, job.envelope
        due = lease.put_at
        if envelope.delay_ms:
            due += envelope.delay_ms * MILLISECOND
        elif envelope.due_at is not None and envelope.due_at > due:
            due = envelope.due_at
        waited = (lease.until - due - self._span) // MILLISECOND
        return {
            "job": lease.id,
            "task": lease.task,
            "attempt": lease.attempt,
            "queue": lease.queue,
            "outcome": outcome,
            "wait_ms": max(0, waited),
            "run_ms": int((slot.clock() - slot.started) * 10_000 + 0.5) / 10,
            "worker": lease.holder,
        }


class RunRecord(logging.LogRecord):
    """A record that is as another one but for its time, its text and its fields."""

    def __init__(self, template: dict[str, Any], text: str, fields: dict[str, Any]) -> None:
        now = time.time()
        self.__dict__ = {**template, **fields}
        self.msg = text
        self.created = now
        self.msecs = int(now % 1 * 1000) + 0.0
        self.relativeCreated = template["relativeCreated"] + (now - template["created"]) * 1000


def _shown_of(error: BaseException | None) -> ExcInfo | None:
    """What the log shows below its line."""
    return None if error is None else (type(error), error, own_frames(error))


def _named(fields: dict[str, Any]) -> str:
    return (
        f"{fields['task']} {fields['job']}, attempt {fields['attempt']} (queue {fields['queue']}, "
        f"waited {fields['wait_ms'] / 1000:.3f} s, ran {fields['run_ms'] / 1000:.3f} s)"
    )

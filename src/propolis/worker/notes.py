"""What running jobs report: progress, lines and checkpoints, until the engine has them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from propolis.core.job import Identity, Lease, Progress
from propolis.core.protocols import LOG_LINES, Engine, Note
from propolis.errors import EngineError, EngineUnavailable, LeaseLost, StorageFull

log = logging.getLogger("propolis.worker")


class UnsentNote:
    """What one job has reported since the last turn."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.progress: Progress | None = None
        self.lines: deque[str] = deque(maxlen=LOG_LINES)
        self.checkpoint: bytes | None = None
        self.saves: list[Future[None]] = []  # whoever waits for it to be stored

    def follow(self, earlier: UnsentNote) -> None:
        """What was not sent the last time is older than this."""
        self.progress = self.progress or earlier.progress
        self.lines.extendleft(reversed(earlier.lines))
        self.checkpoint = earlier.checkpoint if self.checkpoint is None else self.checkpoint
        self.saves += earlier.saves

    def answer(self, error: Exception | None) -> None:
        for save in self.saves:
            if save.cancelled():  # in this very thread, by its job
                continue
            if error is None:
                save.set_result(None)
            else:
                save.set_exception(error)


class UnsentNotes:
    """Of each job what it has reported since the last call; between two calls only the newest is kept."""

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine = engine
        self._wake = wake
        self._notes: dict[Identity, UnsentNote] = {}
        self._sending = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self._notes)

    def report(self, lease: Lease, progress: Progress | None, lines: Iterable[str]) -> None:
        unsent = self._of(lease)
        unsent.progress = progress or unsent.progress
        unsent.lines.extend(lines)
        self._wake()

    def save(self, lease: Lease, checkpoint: bytes, saved: Future[None]) -> None:
        """What a running job wants to be kept; it waits for the answer."""
        unsent = self._of(lease)
        unsent.checkpoint = checkpoint
        unsent.saves.append(saved)
        self._wake()

    def _of(self, lease: Lease) -> UnsentNote:
        return self._notes.setdefault((lease.id, lease.fence), UnsentNote(lease))

    async def send(self) -> None:
        """Returns when all that has been reported is stored, also what another call has taken along."""
        async with self._sending:
            if self._notes:
                await self._send()

    async def _send(self) -> None:
        notes, self._notes = self._notes, {}
        try:
            lost = await self._engine.note(
                [
                    Note(note.lease, note.progress, (*note.lines,), checkpoint=note.checkpoint)
                    for note in notes.values()
                ]
            )
        except StorageFull as error:
            # Outcomes come after notes, and make room.  What was only reported goes, what is awaited stays.
            log.warning("what %d running jobs have reported is not kept: %s", len(notes), error)
            self._keep({identity: note for identity, note in notes.items() if note.saves})
            return
        except (EngineError, asyncio.CancelledError):
            self._keep(notes)
            raise
        except Exception as error:  # more than the engine can store
            for note in notes.values():
                note.answer(error)
            raise
        gone = {(lease.id, lease.fence) for lease in lost}
        for identity, note in notes.items():
            note.answer(LeaseLost(note.lease.id) if identity in gone else None)

    def _keep(self, notes: dict[Identity, UnsentNote]) -> None:
        for note in self._notes.values():  # what has been reported meanwhile is newer
            if earlier := notes.pop((note.lease.id, note.lease.fence), None):
                note.follow(earlier)
        self._notes = {**notes, **self._notes}

    def end(self) -> None:
        """Whoever waits for an answer has one."""
        for note in self._notes.values():
            note.answer(EngineUnavailable("the worker has ended, and nothing was saved"))

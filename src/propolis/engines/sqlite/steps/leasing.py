"""Jobs go out: leases are given, renewed and noted on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from propolis.core import wire
from propolis.core.clock import from_us, span_us
from propolis.core.envelope import Envelope
from propolis.core.job import Lease
from propolis.core.protocols import LOG_LINES, Note, Renewal
from propolis.engines.shared.damaged import decoded
from propolis.engines.shared.from_exchange import ClaimTerms
from propolis.engines.sqlite.rows import LINES, text_of
from propolis.engines.sqlite.steps.claims import Claim
from propolis.engines.sqlite.steps.lines import promote
from propolis.engines.sqlite.steps.puts import put
from propolis.engines.sqlite.steps.rules.groups import open_with_room
from propolis.engines.sqlite.steps.work import Work


def lease(work: Work, terms: ClaimTerms) -> list[Lease]:
    if not terms.wants:
        open_with_room(work, work.groups_freed())
        return []
    claim = Claim(work, terms.span, terms.holder)
    for queue, want in terms.wants.items():
        room = min(want, terms.limit - len(claim.leases))
        if room > 0:
            promote(work, queue)
            claim.take_from(queue, room, terms.tasks)
    claim.finish()
    return claim.leases


def renew(work: Work, leases: Sequence[Lease], span: timedelta) -> list[Renewal]:
    until_us = work.now_us + span_us(span)
    until = from_us(until_us)
    renewals = []
    for lease in leases:
        row = work.run("renew", until_us=until_us, now_us=work.now_us, **_identity(lease)).fetchone()
        renewals.append(Renewal(None) if row is None else Renewal(until, bool(row[0])))
    return renewals


def _identity(lease: Lease) -> dict[str, str | int]:
    return {"id": lease.id, "fence": lease.fence, "holder": lease.holder}


def note(work: Work, notes: Sequence[Note]) -> list[Lease]:
    lost: list[Lease] = []
    jobs: list[Envelope] = []
    for note in notes:
        lease = note.lease
        row = work.run("log_of", now_us=work.now_us, **_identity(lease)).fetchone()
        if row is None:
            lost.append(lease)
            continue
        seq, log = row
        lines = [*(decoded(LINES, log) or ()), *note.lines][-LOG_LINES:]
        work.run(
            "note",
            progress=None if note.progress is None else text_of(note.progress),
            log=text_of(lines) if lines else None,
            checkpoint=note.checkpoint,
            seq=seq,
        )
        if note.began:
            work.run("begin", seq=seq)
        jobs += note.puts
    if jobs:
        put(work, jobs, wire.encode_all(jobs), None)
    return lost

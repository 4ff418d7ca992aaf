"""L5.11: a job that emits thousands holds up nobody who shares its event loop."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from propolis.core import wire
from propolis.core.job import Done
from propolis.core.protocols import Engine
from propolis.testing.engines.samples import HOLDER, SPAN, a_job
from propolis.testing.engines.steps import put_one, take_one

MANY = 600


@pytest.mark.parametrize("make", ["sqlite", "postgres", "redis", "shards"], indirect=True)
@pytest.mark.parametrize(("size", "apart"), [(3, False), (MANY, True)])
@pytest.mark.parametrize("special", [False, True])
async def test_what_a_job_emits_is_not_written_down_in_the_event_loop(
    handles: list[Engine], monkeypatch: pytest.MonkeyPatch, size: int, apart: bool, special: bool
) -> None:
    """L5.11: where it is much; and it is all there."""
    monkeypatch.setattr(
        "propolis.engines.sqlite.file.SLOW_COMMIT", math.inf
    )  # then all writes are in a thread
    engine = handles[0]
    await put_one(engine)
    lease = await take_one(engine)
    more: dict[str, Any] = {"delay_ms": 0, "headers": {"a": "b"}} if special else {}
    emit = tuple(a_job(n, queue="next", chosen=True, **more) for n in range(size))
    in_loop: list[bool] = []
    encode, encode_all = wire.encode, wire.encode_all

    def watched(made: Any) -> Any:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return encode_all(made) if isinstance(made, list | tuple) else encode(made)

    monkeypatch.setattr(wire, "encode", watched)
    monkeypatch.setattr(wire, "encode_all", watched)

    assert await engine.settle([(lease, Done(emit=emit))]) == []

    assert set(in_loop) == {not apart}
    monkeypatch.undo()
    leases = await engine.lease({"next": size + 1}, span=SPAN, holder=HOLDER)
    leases += await engine.lease({"next": size + 1}, span=SPAN, holder=HOLDER)
    assert [it.id for it in leases] == [job.id for job in emit]

"""Where the CPU of this process goes, by looking at its stacks a thousand times per second of CPU."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EVERY = 0.001  # seconds of CPU between two looks

PartOf = Callable[[str, str], str | None]  # of a file and a function; None: whoever called it decides


class Samples:
    """How many looks found each part at work, and the CPU seconds of all of them together."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.cpu = 0.0

    def seconds(self) -> dict[str, float]:
        total = sum(self.seen.values())
        return {part: self.cpu * count / total for part, count in self.seen.most_common()} if total else {}


def part_at(frame: FrameType | None, part_of: PartOf, otherwise: str) -> str:
    """The part to which the innermost frame belongs that belongs to any."""
    while frame is not None:
        part = part_of(frame.f_code.co_filename, frame.f_code.co_name)
        if part is not None:
            return part
        frame = frame.f_back
    return otherwise


def at_work(frame: FrameType, part_of: PartOf) -> bool:
    """A thread that waits does so in a function of Python's own, which belongs to no part."""
    return part_of(frame.f_code.co_filename, frame.f_code.co_name) is not None


@contextmanager
def sampled(part_of: PartOf, *, waiting: str, otherwise: str = "other") -> Iterator[Samples]:
    """Use it in the main thread.  What C code does counts for the Python function that called it.

    While the main thread is in the part `waiting`, another one that is at work is the one that needs the CPU.
    """
    samples = Samples()
    main = threading.main_thread().ident

    def sample(_: int, frame: FrameType | None) -> None:
        part = part_at(frame, part_of, otherwise)
        if part == waiting:
            others = [each for ident, each in sys._current_frames().items() if ident != main]
            busy = [each for each in others if at_work(each, part_of)]
            part = part_at(busy[0], part_of, otherwise) if busy else part
        samples.seen[part] += 1

    before = signal.signal(signal.SIGPROF, sample)
    began = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    try:
        yield samples
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        samples.cpu = time.process_time() - began
        signal.signal(signal.SIGPROF, before)

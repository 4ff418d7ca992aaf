"""Programs that put jobs and have no event loop of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from propolis.app.client.blocking import Background
from propolis.errors import EngineUnavailable, OutcomeUnknown

from .fleet import wait_for

PUT_ONE = """
from propolis import App

app = App({url!r})

@app.task
def ping() -> None: ...

ping.enqueue()
"""

AND_FORK = """
import os
if os.fork() == 0:
    ping.enqueue()
    raise SystemExit
os.wait()
ping.enqueue()
"""


@pytest.mark.parametrize("more", ["", AND_FORK, "app.close()"], ids=["at once", "after a fork", "closed"])
def test_a_program_that_puts_a_job_ends_without_a_word(engine_url: str, more: str) -> None:
    """Nobody has to close anything, and a child that ends leaves the connections of its parent alone."""
    program = PUT_ONE.format(url=engine_url) + more
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


HELD = """
import os, threading
from propolis import App

app = App({url!r})
held, go_on = threading.Event(), threading.Event()

def hold() -> None:
    with app.client._lock:
        held.set()
        go_on.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    app.jobs.find()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go_on.set()
holder.join()
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent(tmp_path: Path) -> None:
    """That makes the engine, which may take a while, when the fork happens."""
    program = HELD.format(url=f"sqlite:///{tmp_path}/jobs.db")
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=30
    )
    assert (ended.stdout, ended.stderr) == ("7\n", "")


def test_a_task_that_leaves_the_program_ends_nobody_elses_wait() -> None:
    """F58: as a job of `with app.test()` may do."""
    background = Background()

    async def leave() -> None:
        sys.exit(4)

    async def work() -> str:
        with pytest.raises(SystemExit):
            await asyncio.create_task(leave())
        return "went on"

    assert background._submitted(work()).result(timeout=10) == "went on"
    background.stop()


def test_whoever_waits_while_another_thread_closes_the_app_hears_of_it() -> None:
    background = Background()
    waiting = asyncio.Event()

    async def wait_for_ever() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def stop() -> None:
        wait_for(waiting.is_set)
        background.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(OutcomeUnknown, match="closed by another thread"):
        background.wait(wait_for_ever())
    stopping.join()


# --- at odd moments ----------------------------------------------------------------------

ODD = """
import asyncio, atexit, gc, os, signal, sys, threading, time
{before}
from propolis import App

class Now:
    def now_us(self) -> int:
        at_the_engine()
        return time.time_ns() // 1000

def at_the_engine() -> None: ...

app = App({url!r}, clock=Now())

@app.task
def ping() -> None: ...

def put(moment: str) -> None:
    try:
        ping.enqueue()
        text = "put"
    except Exception as error:
        text = type(error).__name__
    os.write(1, f"{{moment}}: {{text}}\\n".encode())

class Last:
    def __init__(self) -> None:
        self.itself = self  # only the collector finds it
    def __del__(self) -> None:
        put("__del__")
"""

AT_EXIT = """
atexit.register(put, "registered first")
put("main")
atexit.register(app.close)
atexit.register(put, "registered last")
"""

FIRST_AT_EXIT = """
atexit.register(put, "at exit")
"""

BEFORE_IMPORT = """
import atexit
atexit.register(lambda: put("at exit"))
"""

AT_TEARDOWN = """
put("main")
last = Last()
"""

FIRST_AT_TEARDOWN = """
last = Last()
"""

COLLECTED_BY_THE_ENGINE = """
def at_the_engine() -> None:
    gc.collect()

put("main")
gc.disable()
Last()
put("main")
"""

BY_A_SIGNAL = """
signal.signal(signal.SIGUSR1, lambda *_: put("signal"))
put("main")

def at_the_engine() -> None:
    global at_the_engine
    def at_the_engine() -> None: ...
    signal.raise_signal(signal.SIGUSR1)

asyncio.run(ping.aenqueue())
put("main")
"""

WHILE_IT_WAITS = """
signal.signal(signal.SIGUSR1, lambda *_: put("signal"))
put("main")

def at_the_engine() -> None:
    global at_the_engine
    def at_the_engine() -> None: ...
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

put("main")
"""

IN_A_THREAD_THAT_IS_LEFT = """
def put_late() -> None:
    threading.main_thread().join()
    put("thread")

threading.Thread(target=put_late).start()
put("main")
"""

WITH_CLOSED_LOOPS = """
asyncio.run(ping.aenqueue())
asyncio.run(ping.aenqueue())
put("main")
app.close()
put("closed")
"""


@pytest.mark.parametrize(
    ("moment", "before", "said"),
    [
        (AT_EXIT, "", ["main: put", "registered last: put", "registered first: put"]),
        (FIRST_AT_EXIT, "", ["at exit: put"]),
        ("put('main')", BEFORE_IMPORT, ["main: put", "at exit: EngineUnavailable"]),
        (AT_TEARDOWN, "", ["main: put", "__del__: EngineUnavailable"]),
        (FIRST_AT_TEARDOWN, "", ["__del__: EngineUnavailable"]),
        (COLLECTED_BY_THE_ENGINE, "", ["main: put", "__del__: EngineUnavailable", "main: put"]),
        (WHILE_IT_WAITS, "", ["main: put", "signal: put", "main: put"]),
        (WITH_CLOSED_LOOPS, "", ["main: put", "closed: put"]),
    ],
    ids=[
        "at exit",
        "first at exit",
        "registered before the import",
        "at teardown",
        "first at teardown",
        "collected by the engine",
        "in a signal handler",
        "with closed loops",
    ],
)
def test_whoever_puts_at_an_odd_moment_never_hangs(
    engine_url: str, moment: str, before: str, said: list[str]
) -> None:
    """F60: it works, or it raises at once."""
    assert said_by(ODD.format(url=engine_url, before=before) + moment) == said


def test_a_thread_that_outlives_the_main_thread_puts_or_hears_why_not(engine_url: str) -> None:
    """F60: by then nobody waits for a file that happens to be busy."""
    first, second = said_by(ODD.format(url=engine_url, before="") + IN_A_THREAD_THAT_IS_LEFT)
    assert first == "main: put"
    assert second in ("thread: put", "thread: EngineUnavailable")


def test_a_signal_handler_that_interrupts_the_engine_never_hangs(engine_url: str) -> None:
    """F60: SQLite writes in the loop of the thread that is interrupted, others in one that waits for it."""
    interrupted = "EngineUnavailable" if engine_url.startswith("sqlite") else "put"
    lines = said_by(ODD.format(url=engine_url, before="") + BY_A_SIGNAL)
    assert lines == ["main: put", f"signal: {interrupted}", "main: put"]


def test_where_no_name_can_be_resolved_any_more_an_error_says_so(engine_url: str) -> None:
    """F60: the first put of all, in the last moment."""
    url = engine_url.replace("127.0.0.1", "localhost")
    [line] = said_by(ODD.format(url=url, before="") + FIRST_AT_EXIT)
    assert line in ("at exit: put", "at exit: EngineUnavailable")


IMPORTING = """
import os, sys, threading
from propolis import App

importing, forked = threading.Event(), threading.Event()

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("propolis.engines.{engine}.") and not importing.is_set():
            importing.set()
            forked.wait(1)  # whoever forks now waits for us, and not the other way round
        return None

sys.meta_path.insert(0, Slow())
app = App({url!r})

@app.task
def ping() -> None: ...

first = threading.Thread(target=ping.enqueue)
first.start()
importing.wait()
child = os.fork()
if child == 0:
    ping.enqueue()
    os._exit(7)
forked.set()
first.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_during_the_first_import_can_put(engine_url: str) -> None:
    """F60: the lock of a module whose import another thread has begun is never released in a child."""
    engine = engine_url.partition(":")[0].replace("postgresql", "postgres")
    assert said_by(IMPORTING.format(url=engine_url, engine=engine)) == ["7"]


def said_by(program: str) -> list[str]:
    """The lines of a program that ends by itself, and complains of nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def test_whoever_comes_while_the_app_is_closed_hears_of_it() -> None:
    """F60."""
    background = Background()
    winding_up, go_on = threading.Event(), asyncio.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            winding_up.set()
            await go_on.wait()

    async def come() -> None:
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        await asyncio.Event().wait()

    async def begin() -> asyncio.Task[None]:
        return asyncio.create_task(end_slowly())

    background.wait(begin())
    stopping = threading.Thread(target=background.stop)
    stopping.start()
    winding_up.wait()
    with pytest.raises(OutcomeUnknown, match="closed by another thread"):
        background.wait(come())
    stopping.join()
    with pytest.raises(EngineUnavailable, match="closed by another thread"):
        background.wait(come())

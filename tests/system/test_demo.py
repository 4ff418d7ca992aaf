"""The demo is the first thing that a newcomer sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

PROOF = "Every job ended exactly once, and every further run has its reason."


def test_the_demo_proves_what_it_promises_without_a_terminal() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "propolis.demo"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for text in (
        "async def send_mail",
        "kill -9 of worker",
        "ConnectionError",
        "its worker was killed",
        "it timed out",
        "0 lost",
        PROOF,
    ):
        assert text in shown.stdout
    assert shown.stderr == ""


def test_the_demo_can_be_interrupted() -> None:
    """Also where SIGINT was inherited as ignored, the child of this test has it restored."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "propolis.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert demo.stdout is not None
    while "two workers" not in demo.stdout.readline():
        assert demo.poll() is None
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=120)
    assert errors.strip() == "stopped"
    assert demo.returncode == 1

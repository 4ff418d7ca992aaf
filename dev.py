#!/usr/bin/env python3
"""Set up, show and check propolis with nothing but Python and pip.

    python3 dev.py setup             make .venv with everything in it
    python3 dev.py demo [...]        run the demo; what follows goes to it
    python3 dev.py test [...]        lint, types and tests; what follows goes to pytest
                    --fast           in a minute: only the tests that need no server
                    --full           in a night: every test at its full size, in every set-up, on
                                     every PostgreSQL that is installed
    python3 dev.py lint              only ruff
    python3 dev.py types             only mypy

Every command sets up by itself when it must, and runs at the root of the repository.
"""

# Standard library only, and written so that Python 3.6 can still parse it and reach
# the version check: no future import, no walrus, tomllib only where it is used.
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"dev.py needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}")

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "made-for"
LOCK = ROOT / ".venv.lock"  # beside .venv, not in it: making .venv anew empties it

OLDEST_PIP = (22, 3)  # the first that can install into an environment without pip (--python)

Step = tuple[str, Sequence[str]]

LINT: list[Step] = [
    ("ruff check", ["ruff", "check"]),
    ("ruff format", ["ruff", "format", "--check"]),
]
TYPES: list[Step] = [("mypy", ["mypy"])]

# What needs no server, and the whole contract on the two engines that need none either.
FAST = ["tests/unit", "tests/contract/test_memory.py", "tests/contract/test_sqlite.py"]


class Failed(Exception):
    """The environment cannot be made; the message says what to do about it."""


def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "setup": setup,
        "demo": demo,
        "test": test,
        "lint": lint,
        "types": types,
    }
    if not argv or argv[0] not in commands:
        asked = bool(argv) and argv[0] in ("-h", "--help", "help")
        print(__doc__.strip() if __doc__ else "", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        return commands[argv[0]](argv[1:])
    except Failed as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# The commands.


def setup(args: Sequence[str]) -> int:
    refuse(args)
    if not ensure_environment():
        say(f"{VENV.name} is up to date")
    return 0


def demo(args: Sequence[str]) -> int:
    """Become the demo, so that signals and the exit code are its own."""
    ensure_environment()
    os.chdir(ROOT)
    os.execve(PYTHON, [str(PYTHON), "-m", "propolis.demo", *args], child_environment())


def test(args: Sequence[str]) -> int:
    ensure_environment()
    with tempfile.TemporaryDirectory() as name:
        coverage, skipped = Path(name) / "coverage.json", Path(name) / "skipped.json"
        os.environ["PROPOLIS_SKIPPED"] = str(skipped)
        # Many tests wait for a lease to end or a process to start, so that two cores serve four.
        options = ["-n", "4", "--dist", "worksteal"]
        if "--fast" in args:
            options += [] if any(is_path(arg) for arg in args) else FAST
        elif "--full" in args:  # measuring takes a quarter of the time
            options += ["--cov=propolis", "--cov-report=term", f"--cov-report=json:{coverage}"]
        runner = "pytest" if "--pdb" in args else "tools.watchdog"  # a debugger waits as long as it likes
        code = run_steps([*LINT, ("pytest", [runner, *options, *args])], beside=TYPES)
        if coverage.exists():  # not when pytest was stopped early, or given --no-cov
            report_coverage(json.loads(coverage.read_text())["totals"])
        if skipped.exists():
            report_skipped(json.loads(skipped.read_text()))
    return code


def is_path(arg: str) -> bool:
    return (ROOT / arg.partition("::")[0]).exists()


def lint(args: Sequence[str]) -> int:
    refuse(args)
    ensure_environment()
    return run_steps(LINT)


def types(args: Sequence[str]) -> int:
    refuse(args)
    ensure_environment()
    return run_steps(TYPES)


def refuse(args: Sequence[str]) -> None:
    if args:
        raise Failed(f"this command takes no arguments, and was given: {' '.join(args)}")


def run_steps(steps: Sequence[Step], *, beside: Sequence[Step] = ()) -> int:
    """Run all of them, also after a failure: one run should show everything that is wrong.

    Those in `beside` run at the same time as the others and show what they have to say afterwards.
    """
    with contextlib.ExitStack() as stack:
        started = [(name, stack.enter_context(start_beside(command))) for name, command in beside]
        results = [(name, *run_step(name, command)) for name, command in steps]
        results += [(name, *finish()) for name, finish in started]
    print()
    for name, code, seconds in results:
        verdict = f"failed ({code})" if code else "ok"
        say(f"{name:12} {verdict} in {seconds:.1f} s")
    return 1 if any(code for _, code, _ in results) else 0


def run_step(name: str, command: Sequence[str]) -> tuple[int, float]:
    say(f"{name} ...")
    start = time.monotonic()
    code = subprocess.run([str(PYTHON), "-m", *command], cwd=ROOT, env=child_environment()).returncode
    return code, time.monotonic() - start


@contextlib.contextmanager
def start_beside(command: Sequence[str]) -> Iterator[Callable[[], tuple[int, float]]]:
    """Start a step; what is given waits for its end, shows its output and gives its code and its time."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [str(PYTHON), "-m", *command], cwd=ROOT, env=child_environment(), stdout=output, stderr=output
        )

        def finish() -> tuple[int, float]:
            code = process.wait()
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", flush=True)
            return code, time.monotonic() - start

        try:
            yield finish
        finally:
            process.kill()  # only if the other steps were interrupted
            process.wait()


def report_coverage(totals: Mapping[str, int]) -> None:
    """Print lines and branches apart: coverage's own table only has the two mixed."""
    lines = percentage(totals["covered_lines"], totals["num_statements"])
    branches = percentage(totals["covered_branches"], totals["num_branches"])
    say(f"{'coverage':12} lines {lines}, branches {branches}")


def report_skipped(reasons: Mapping[str, int]) -> None:
    """Say it as the last thing of all: what is skipped is not tested, and nobody scrolls back."""
    for reason, count in sorted(reasons.items(), key=lambda each: -each[1]):
        say(f"{'SKIPPED':12} {count} tests: {reason.removeprefix('Skipped: ')}")


def percentage(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


# The environment.


def ensure_environment() -> bool:
    """Make .venv unless it is there and fits; says whether it was made.

    Looks once without the lock, which makes the usual case fast and lets it work in a
    tree that the user cannot write to; and again with it, because another dev.py may
    have made .venv while this one waited.
    """
    wanted = fingerprint()
    if is_made_for(wanted):
        return False
    try:
        with locked():
            if is_made_for(wanted):
                return False
            make_environment(wanted)
    except OSError as error:
        raise Failed(f"cannot make {VENV}: {error}.  Mend that, or remove it, and try again") from error
    return True


def fingerprint() -> str:
    """What .venv depends on: this Python, this place, and what pyproject.toml makes pip install.

    The place counts because scripts and the editable install hold absolute paths.
    """
    import tomllib  # not in the Pythons that the check at the top is for

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    installed = [pyproject["build-system"], pyproject["project"], pyproject["tool"].get("hatch")]
    parts = [sys.version, sys.platform, platform.machine(), sys.base_prefix, str(ROOT), installed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def is_made_for(wanted: str) -> bool:
    try:
        if STAMP.read_text() != wanted:
            return False
        return probe() == 0
    except OSError:  # no stamp, or no interpreter that can be started
        return False


def probe() -> int:
    """Find, without importing them, the packages that every command needs."""
    find = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
    command = [str(PYTHON), "-c", find, "propolis", "ruff", "mypy", "pytest"]
    return subprocess.run(command, cwd=VENV, env=child_environment(), stderr=subprocess.DEVNULL).returncode


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other dev.py away from .venv, where the system has such locks.

    Children inherit the lock: when dev.py alone is killed, the pip that it leaves
    behind goes on writing, and the next dev.py must wait for it.
    """
    with LOCK.open("a") as file:
        if sys.platform != "win32":
            import fcntl

            os.set_inheritable(file.fileno(), True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another dev.py, which is making {VENV.name}")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make_environment(wanted: str) -> None:
    """Make .venv anew.  The stamp goes first and comes last, so that half of one never fits."""
    check_pip()
    start = time.monotonic()
    say(f"making {VENV.name} with Python {sys.version.split()[0]}")
    STAMP.unlink(missing_ok=True)
    # Without pip in it, because Debian ships ensurepip apart from Python.
    venv.EnvBuilder(clear=True, symlinks=os.name != "nt", with_pip=False).create(VENV)
    say("installing propolis and its tools, which takes about half a minute")
    command = [*pip(), "--python", str(PYTHON), "install", "--quiet", "--disable-pip-version-check"]
    code = run_with_lock([*command, "--editable", ".[dev]"])
    if code:
        raise Failed(f"pip could not install propolis and its tools (exit code {code}): see above")
    STAMP.write_text(wanted)
    say(f"{VENV.name} is ready, after {time.monotonic() - start:.1f} s")


def run_with_lock(command: Sequence[str]) -> int:
    return subprocess.run(command, cwd=ROOT, env=child_environment(), close_fds=False).returncode


def check_pip() -> None:
    command = [*pip(), "--version"]
    answer = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True)
    if answer.returncode:
        raise Failed(
            f"{interpreter()} has no pip.  Install it (Debian and Ubuntu: apt install python3-pip; "
            f"elsewhere: {interpreter()} -m ensurepip) and try again"
        )
    version = answer.stdout.split()[1]
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PIP:
        raise Failed(
            f"pip {version} is too old, {OLDEST_PIP[0]}.{OLDEST_PIP[1]} is needed: "
            f"run {interpreter()} -m pip install --upgrade pip and try again"
        )


def pip() -> list[str]:
    return [interpreter(), "-m", "pip"]


def interpreter() -> str:
    """The Python that brings pip: this one, unless it is .venv's own, which has none."""
    if Path(sys.prefix).resolve() == VENV:
        return str(getattr(sys, "_base_executable", sys.executable))
    return sys.executable


def child_environment() -> dict[str, str]:
    """Ours, without what would make .venv's Python or pip look, or install, elsewhere.

    Where pip finds packages stays the user's choice.
    """
    elsewhere = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "PIP_PREFIX", "PIP_ROOT", "PIP_TARGET"}
    kept = {name: value for name, value in os.environ.items() if name not in elsewhere}
    return {**kept, "PIP_USER": "0"}


def say(text: str) -> None:
    print(f"dev.py: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""An environment for each peer, made once below a cache folder: a venv, or a node_modules."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from harness.catalogue import Language, Peer

ADAPTERS = Path(__file__).resolve().parent.parent / "adapters"
INSTALLS_WITHIN = 600.0


class Unavailable(Exception):
    """The peer cannot be run here; the message is the reason, for the table."""


@dataclass(frozen=True, slots=True)
class Environment:
    """How to start a peer's adapter, and what is installed beside it."""

    command: tuple[str, ...]
    variables: dict[str, str]
    packages: dict[str, str]


class Environments:
    def __init__(self, cache: Path, *, latest: bool = False) -> None:
        self._cache = cache
        self._latest = latest

    def of(self, peer: Peer) -> Environment:
        """Make it unless it is there.  Raises `Unavailable` with the reason where that fails."""
        make = self._node if peer.language is Language.NODE else self._python
        try:
            return make(peer)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"installation took longer than {INSTALLS_WITHIN:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"installation failed: {last_words(error.stderr or error.stdout)}") from error

    def _python(self, peer: Peer) -> Environment:
        python = Path(sys.executable)
        if peer.environment:
            folder = self._folder(peer)
            python = folder / "bin/python"
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                venv.create(folder, with_pip=True)
                _run([str(python), "-m", "pip", "install", "--quiet", *self._wanted(peer)], folder)
                (folder / "made").touch()
        script = (
            "import importlib.metadata as m, json, platform;"
            "print(json.dumps({'Python': platform.python_version()}"
            " | {d.name: d.version for d in m.distributions()}))"
        )
        packages = json.loads(_run([str(python), "-P", "-c", script], ADAPTERS))
        command = (str(python), "-P", "-m", f"adapters.{peer.adapter}")
        return Environment(command, {"PYTHONPATH": str(ADAPTERS.parent)}, packages)

    def _node(self, peer: Peer) -> Environment:
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            raise Unavailable("node and npm are not installed")
        folder = self._folder(peer)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "package.json").write_text('{"private": true}')
            _run([npm, "install", "--no-audit", "--no-fund", *self._wanted(peer)], folder)
            (folder / "made").touch()
        packages = {"Node": _run([node, "--version"], folder).strip().removeprefix("v")}
        for wanted in peer.packages:
            name = package_name(wanted)
            packages[name] = json.loads((folder / "node_modules" / name / "package.json").read_text())[
                "version"
            ]
        command = (node, str(ADAPTERS / f"{peer.adapter}.mjs"))
        return Environment(command, {"BENCH_ENVIRONMENT": str(folder), "NODE_ENV": "production"}, packages)

    def _wanted(self, peer: Peer) -> list[str]:
        return (
            [without_version(package) for package in peer.packages] if self._latest else list(peer.packages)
        )

    def _folder(self, peer: Peer) -> Path:
        wanted = self._wanted(peer)
        mark = hashlib.sha256(json.dumps([sys.version, wanted]).encode()).hexdigest()[:8]
        return self._cache / f"{peer.environment}-{mark}"


def without_version(package: str) -> str:
    """`a[b]==1` and `a@1` without their versions; a scope's `@` stays."""
    return re.sub(r"(?<=.)(==|@).*$", "", package)


def package_name(package: str) -> str:
    return re.sub(r"\[.*\]", "", without_version(package))


def last_words(text: str, limit: int = 240) -> str:
    """The end of what a program wrote, on one line and without folders: there it says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"at |File |Node\.js v|\^|[{}]", line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    chosen = errors[-1:] or lines[-2:]
    return re.sub(r"(?<![\w:/])/[\w./@+-]*/", "", " | ".join(chosen))[-limit:] or "it said nothing"


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=INSTALLS_WITHIN,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    ).stdout

"""What the fault tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def ignored_here_only() -> Iterator[None]:
    """What these tests send is heard also where they themselves run in the background, or with nohup.

    Processes inherit that a signal is ignored, and our workers heed it; a handler ends with `exec`.
    """
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A storage of its own on each engine that worker processes can share."""
    match request.param:
        case "sqlite":
            return f"sqlite:///{tmp_path}/jobs.db"
        case "postgres":
            server, schema = request.getfixturevalue("postgres_url"), request.getfixturevalue("schema")
            return f"{server}?schema={schema}"
        case _:
            server, prefix = request.getfixturevalue("valkey_url"), request.getfixturevalue("prefix")
            return f"{server}?prefix={prefix}:"

"""S13: a server on another machine has to show who it is.

Its name leads to loopback here, because the tests change what names lead to.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from propolis.engines.postgres.engine import PostgresEngine
from propolis.errors import BadSetting, EngineUnavailable
from propolis.testing.engines.samples import a_job
from propolis.testing.servers.certificates import Certificate

ELSEWHERE = "db.example"
ASKS_FOR_TLS = b"\0\0\0\x08\x04\xd2\x16/"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that looks like one of another machine."""
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == ELSEWHERE else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGHOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    return Certificate(tmp_path_factory.mktemp("tls"), f"DNS:{ELSEWHERE}")


@pytest_asyncio.fixture
async def tls_port(certificate: Certificate, postgres_url: str) -> AsyncIterator[int]:
    """Where the server speaks TLS with this certificate: not every PostgreSQL of a wheel can."""
    context = certificate.for_a_server()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while some := await reader.read(65536):
                writer.write(some)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            assert await reader.readexactly(8) == ASKS_FOR_TLS
            writer.write(b"S")
            await writer.start_tls(context)
            behind = await asyncio.open_connection("127.0.0.1", port_of(postgres_url))
            await asyncio.gather(pass_on(reader, behind[1]), pass_on(behind[0], writer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


def port_of(url: str) -> str:
    return url.rpartition(":")[2].partition("/")[0]


async def put_through(url: str, schema: str) -> bool:
    engine = await PostgresEngine(url, schema=schema).open()
    [receipt] = await engine.put([a_job()])
    await engine.close()
    return receipt.created


async def test_plain_text_is_not_spoken_to_another_machine_unless_that_is_wanted(
    postgres_url: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"postgresql://postgres@{ELSEWHERE}:{port_of(postgres_url)}/postgres"

    with pytest.raises(EngineUnavailable, match=r"\?tls=off"):
        await put_through(url, schema)
    assert await put_through(f"{url}?tls=off", schema)
    assert await put_through(f"{url}?sslmode=prefer", schema)
    monkeypatch.setenv("PGSSLMODE", "disable")
    assert await put_through(url, schema)


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    tls_port: int, certificate: Certificate, schema: str
) -> None:
    url = f"postgresql://postgres@{ELSEWHERE}:{tls_port}/postgres"

    with pytest.raises(EngineUnavailable, match=r"sslrootcert=.*\?tls=off"):
        await put_through(url, schema)
    assert await put_through(f"{url}?sslrootcert={certificate.file}", schema)
    assert await put_through(f"{url}?sslmode=require", schema)


async def test_a_certificate_for_another_name_is_refused(
    tls_port: int, certificate: Certificate, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", "other.example")
    url = f"postgresql://postgres@other.example:{tls_port}/postgres?sslrootcert={certificate.file}"

    with pytest.raises(EngineUnavailable, match=r"\?tls=off"):
        await put_through(url, schema)


async def test_on_this_machine_nothing_is_asked_for(tls_port: int, schema: str) -> None:
    assert await put_through(f"postgresql://postgres@127.0.0.1:{tls_port}/postgres", schema)


def test_what_is_not_to_be_understood_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="tls='no'"):
        PostgresEngine("postgresql://host/jobs?tls=no")
    with pytest.raises(BadSetting, match="cannot be read"):
        PostgresEngine(f"postgresql://host/jobs?sslrootcert={tmp_path}/none")
